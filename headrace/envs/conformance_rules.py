"""The rules of the environments' contract, one function each; ``conformance`` drives the groups."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from headrace.envs import rows
from headrace.envs.contract import EnvGroup
from headrace.types import PyTree, TimeStep

Messages: TypeAlias = list[tuple[TimeStep, np.ndarray]]
"""What ``recv`` gave, in order."""
SlotRows: TypeAlias = list[list[tuple[np.ndarray, ...]]]
"""For each slot its rows in order: (leaves of observation and extra…, reward, first, terminated, truncated)."""


@dataclass(frozen=True)
class Finding:
    """One breach of the contract.

    Attributes:
        what: the rule.
        got: what the group did.
        expected: what the rule asks.
        todo: what to do about it.
    """

    what: str
    got: str
    expected: str
    todo: str


def group_form(group: EnvGroup) -> list[Finding]:
    """The protocol's members, and the form of ``run_ids``."""
    if not isinstance(group, EnvGroup):
        return [
            Finding(
                "the protocol", f"a {type(group).__name__}", "every member of EnvGroup", "add what is missing"
            )
        ]
    ids = group.run_ids()
    if ids.shape != (group.num_slots,) or ids.dtype != np.int64:
        got = f"run_ids {ids.dtype} {ids.shape}"
        return [Finding("run_ids' form", got, f"int64 ({group.num_slots},)", "return the life of each slot")]
    return []


def message_form(group: EnvGroup, timestep: TimeStep, slot_ids: np.ndarray) -> Iterator[Finding]:
    """Shapes, dtypes and ids of one message."""
    n, ids = group.num_slots, np.asarray(slot_ids)
    if ids.dtype != np.int32 or ids.ndim != 1 or not 1 <= len(ids) <= n:
        yield Finding(
            "slot ids' form", f"{ids.dtype} {ids.shape}", f"int32 (b,), 1 <= b <= {n}", "convert them"
        )
        return
    if len(set(ids.tolist())) != len(ids) or ids.min() < 0 or ids.max() >= n:
        yield Finding(
            "slot ids are unique and in range",
            f"{ids.tolist()}",
            f"each of 0 … {n - 1} at most once",
            "check ids",
        )
        return
    b = len(ids)
    forms: list[tuple[str, Any, tuple[int, ...], Any]] = [("reward", timestep.reward, (b,), np.float32)]
    forms += [
        (name, getattr(timestep, name), (b,), np.bool_) for name in ("first", "terminated", "truncated")
    ]
    for part, spec in (("observation", group.spec.observation), ("extra", group.spec.extra)):
        try:
            for leaf, value in rows.tree_leaves(spec, getattr(timestep, part)):
                forms.append((part, value, (b, *leaf.shape), leaf.dtype))
        except (KeyError, TypeError, ValueError, IndexError) as exc:
            yield Finding(f"{part}'s structure", repr(exc), f"that of {spec}", "convert with to_agent")
    for name, value, shape, dtype in forms:
        got = np.asarray(value)
        if got.shape != shape or got.dtype != dtype:
            yield Finding(
                f"{name}'s form",
                f"{got.dtype} {got.shape}",
                f"{np.dtype(dtype)} {shape}",
                "convert at the adapter",
            )


def order(timestep: TimeStep, slot_ids: np.ndarray, was_last: np.ndarray) -> Iterator[Finding]:
    """``first`` follows last, and nothing else; a ``first`` row brings no reward and no end."""
    first = np.asarray(timestep.first)
    expected = was_last[slot_ids]
    if (first != expected).any():
        k = int(np.argmax(first != expected))
        after = "a last row (or at the start)" if expected[k] else "a row that was not last"
        yield Finding(
            "first follows last",
            f"slot {slot_ids[k]}: first={first[k]} after {after}",
            f"first={expected[k]}",
            "give the true final row, then the reset's row",
        )
    for name, value in (("reward", timestep.reward), ("end flags", timestep.last)):
        if np.any(np.asarray(value)[first]):
            yield Finding(
                f"{name} of first rows", f"{value[first]}", "0", "a reset brings neither reward nor end"
            )


def overwritten(messages: Messages, copies: Messages) -> Iterator[Finding]:
    """Messages still equal the copies made when they came."""
    for t, ((now, ids), (then, ids_then)) in enumerate(zip(messages, copies, strict=True)):
        pairs = [
            (ids, ids_then),
            *zip(now[1:5], then[1:5], strict=True),
            *_pairs(now.observation, then.observation),
            *_pairs(now.extra, then.extra),
        ]
        if not all(equal(a, b) for a, b in pairs):
            yield Finding(
                "arrays are not written again",
                f"message {t} changed later",
                "the same values",
                "hand out copies",
            )
            return


def _pairs(one: PyTree, other: PyTree) -> Iterator[tuple[Any, Any]]:
    if isinstance(one, dict):
        for key in one:
            yield from _pairs(one[key], other[key])
    elif isinstance(one, tuple):
        for a, b in zip(one, other, strict=True):
            yield from _pairs(a, b)
    else:
        yield one, other


def equal(one: Any, other: Any) -> bool:
    """Whether two arrays hold the same values."""
    return np.array_equal(np.asarray(one), np.asarray(other))


def lives(group: EnvGroup) -> list[Finding]:
    """Nothing was restarted, so that all lives are equal."""
    changed = group.run_ids()
    if len(set(changed.tolist())) > 1:
        return [
            Finding(
                "run ids",
                f"{changed}",
                "equal lives where nothing was restarted",
                "change them on restarts only",
            )
        ]
    return []


def seeding(by_slot: SlotRows) -> list[Finding]:
    """Slots draw from streams of their own, and a reset goes on with its stream."""
    firsts = [[tuple(x.tobytes() for x in row[:-4]) for row in slot_rows if row[-3]] for slot_rows in by_slot]
    varies_in_slot = any(len(set(seen)) > 1 for seen in firsts)
    varies_over_slots = len({tuple(seen[:1]) for seen in firsts}) > 1
    findings = []
    shortest = min(len(seen) for seen in firsts)
    if (
        varies_in_slot
        and len(firsts) > 1
        and shortest > 1
        and len({tuple(s[:shortest]) for s in firsts}) == 1
    ):
        findings.append(
            Finding(
                "slots differ",
                "all slots reset alike",
                "a stream for each",
                "seed slot k with seed_of(k, life)",
            )
        )
    long = [seen for seen in firsts if len(seen) >= 3]
    if varies_over_slots and long and all(len(set(seen)) == 1 for seen in long):
        findings.append(
            Finding(
                "a reset does not re-seed",
                "every episode of a slot begins alike",
                "new draws",
                "seed the first reset of a life only",
            )
        )
    return findings


def plain(value: Any, path: str) -> Iterator[Finding]:
    """Only dicts with string keys over NumPy arrays and JSON scalars, lists and strings."""
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                yield Finding("state's form", f"{path} has the key {key!r}", "string keys", "name it")
            yield from plain(part, f"{path}[{key!r}]")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from plain(part, f"{path}[{i}]")
    elif isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            yield Finding(
                "state's form", f"{path} is an array of {value.dtype}", "numbers or bools", "encode it"
            )
    elif not isinstance(value, str | bool | int | float | None) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        yield Finding(
            "state's form", f"{path} is a {type(value).__name__}", "JSON scalars and arrays", "encode it"
        )
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        yield Finding(
            "state's form", f"{path} is an integer of over 63 bits", "at most int64", "write it as a string"
        )


def differences(
    what: str, one: list[list[tuple[np.ndarray, ...]]], other: list[list[tuple[np.ndarray, ...]]]
) -> list[Finding]:
    """The first row in which two runs differ, as a breach of ``what``."""
    for slot, (a_rows, b_rows) in enumerate(zip(one, other, strict=True)):
        for t, (a, b) in enumerate(zip(a_rows, b_rows, strict=False)):
            if not all(equal(x, y) for x, y in zip(a, b, strict=True)):
                return [
                    Finding(
                        what,
                        f"slot {slot} row {t}: {b}",
                        f"{a}",
                        "draw only from generators seeded with seed_of",
                    )
                ]
    return []
