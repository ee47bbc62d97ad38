"""What any ``EnvGroup`` must do, as one function: run it on a group of your own.

from headrace.envs.conformance import check_group
assert check_group(lambda: MyGroup(...)) == []
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.envs import rows
from headrace.envs.contract import EnvGroup
from headrace.spaces import BoxSpec, DiscreteSpec, Leaf, MultiDiscreteSpec, Spec, map_leaves
from headrace.types import PyTree, TimeStep

RECV_TIMEOUT_S = 60.0


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


@dataclass(frozen=True)
class Tape:
    """What was received in one run.

    Attributes:
        messages: each message as received.
        copies: copies of them made at once.
        by_slot: for each slot the flattened rows in order: (observation leaves…, reward, first, terminated,
            truncated).
        findings: breaches found on the way.
    """

    messages: list[tuple[TimeStep, np.ndarray]]
    copies: list[tuple[TimeStep, np.ndarray]]
    by_slot: list[list[tuple[np.ndarray, ...]]]
    findings: list[Finding]


def check_group(make: Callable[[], EnvGroup], steps: int = 300, random_seed: int = 0) -> list[Finding]:
    """Drive groups with random actions and name every rule of ``contract`` that is broken.

    Args:
        make: makes a fresh group, with the same seeds every time. Called three times.
        steps: messages to receive from each.
        random_seed: of the actions.

    Returns:
        The findings; empty for a group that keeps the contract.
    """
    first, group = _run(make, steps, random_seed)
    findings = first.findings + list(_overwritten(first))
    if findings:
        group.close()
        return findings
    findings += _lives(group) + _seeding(first)
    findings += _state(make, group, steps, random_seed)
    for _ in range(2):  # a second close must be harmless
        group.close()
    second, group = _run(make, steps, random_seed)
    group.close()
    return findings + _differences("equal seeds, equal rows", first.by_slot, second.by_slot)


def sample(spec: Spec, rng: np.random.Generator) -> PyTree:
    """One random action in the environment's coordinates; unbounded boxes within ±1."""

    def one(leaf: Leaf) -> np.ndarray:
        if isinstance(leaf, DiscreteSpec):
            return np.asarray(leaf.start + rng.integers(leaf.n), leaf.env_dtype)
        if isinstance(leaf, MultiDiscreteSpec):
            return (
                (np.array(leaf.start) + rng.integers(leaf.nvec))
                .astype(leaf.env_dtype)
                .reshape(leaf.env_shape)
            )
        if isinstance(leaf, BoxSpec):
            low, high = (np.clip(x.astype(np.float64), -1e6, 1e6) for x in (leaf.low, leaf.high))
            low, high = (
                np.where(np.isfinite(leaf.low), low, high.clip(max=1) - 2),
                np.where(np.isfinite(leaf.high), high, low.clip(min=-1) + 2),
            )
            return np.clip(rng.uniform(low, high), leaf.low, leaf.high).astype(leaf.env_dtype)
        return rng.integers(2, size=leaf.shape).astype(leaf.env_dtype)

    return map_leaves(one, spec)


class _Actor:
    """Random actions from one stream a slot, so that the order of answers changes none."""

    def __init__(self, group: EnvGroup, seed: int) -> None:
        self._spec = group.spec.action
        self._streams = [np.random.default_rng((seed, slot)) for slot in range(group.num_slots)]

    def __call__(self, slot_ids: np.ndarray) -> PyTree:
        chosen = [sample(self._spec, self._streams[slot]) for slot in slot_ids.tolist()]
        return map_leaves(lambda _, *values: np.stack(values), self._spec, *chosen)


def _run(make: Callable[[], EnvGroup], steps: int, seed: int) -> tuple[Tape, EnvGroup]:
    group = make()
    tape = Tape([], [], [[] for _ in range(group.num_slots)], [])
    tape.findings.extend(_group_form(group))
    if not tape.findings:
        _drive(group, _Actor(group, seed), tape, steps)
    return tape, group


def _drive(group: EnvGroup, act: _Actor, tape: Tape, steps: int) -> None:
    """Receive and answer ``steps`` times; ends between ``send`` and ``recv``, or at the first finding."""
    was_last = np.array([not rows_ or bool(rows_[-1][-1] | rows_[-1][-2]) for rows_ in tape.by_slot])
    for _ in range(steps):
        timestep, slot_ids = group.recv(RECV_TIMEOUT_S)
        tape.findings.extend(_message_form(group, timestep, slot_ids))
        if tape.findings:
            return
        tape.findings.extend(_order(timestep, slot_ids, was_last))
        was_last[slot_ids] = timestep.last
        tape.messages.append((timestep, slot_ids))
        tape.copies.append((_copy(group, timestep), slot_ids.copy()))
        leaves = [np.array(v) for _, v in rows.tree_leaves(group.spec.observation, timestep.observation)]
        for k, slot in enumerate(slot_ids.tolist()):
            tape.by_slot[slot].append(tuple(leaf[k] for leaf in [*leaves, *map(np.array, timestep[1:5])]))
        answer = act(slot_ids)
        kept = map_leaves(lambda _, value: value.copy(), group.spec.action, answer)
        group.send(answer, slot_ids)
        if any(
            not np.array_equal(a, b) for a, b in zip(_flat(group, answer), _flat(group, kept), strict=True)
        ):
            tape.findings.append(
                Finding(
                    "actions are not written",
                    "send changed its action",
                    "an untouched array",
                    "copy before writing",
                )
            )
    silent = [slot for slot, heard in enumerate(tape.by_slot) if not heard]
    if silent:
        tape.findings.append(
            Finding(
                "every slot speaks", f"nothing from slots {silent}", "rows of each", "serve slots in turn"
            )
        )


def _flat(group: EnvGroup, action: PyTree) -> list[np.ndarray]:
    return [value for _, value in rows.tree_leaves(group.spec.action, action)]


def _copy(group: EnvGroup, timestep: TimeStep) -> TimeStep:
    return TimeStep(
        rows.copied(group.spec.observation, timestep.observation), *(np.array(x) for x in timestep[1:5])
    )


def _group_form(group: EnvGroup) -> list[Finding]:
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


def _message_form(group: EnvGroup, timestep: TimeStep, slot_ids: np.ndarray) -> Iterator[Finding]:
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
    try:
        for leaf, value in rows.tree_leaves(group.spec.observation, timestep.observation):
            forms.append(("observation", value, (b, *leaf.shape), leaf.dtype))
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        yield Finding(
            "observation's structure", repr(exc), f"that of {group.spec.observation}", "convert with to_agent"
        )
    for name, value, shape, dtype in forms:
        got = np.asarray(value)
        if got.shape != shape or got.dtype != dtype:
            yield Finding(
                f"{name}'s form",
                f"{got.dtype} {got.shape}",
                f"{np.dtype(dtype)} {shape}",
                "convert at the adapter",
            )


def _order(timestep: TimeStep, slot_ids: np.ndarray, was_last: np.ndarray) -> Iterator[Finding]:
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


def _overwritten(tape: Tape) -> Iterator[Finding]:
    for t, ((now, ids), (then, ids_then)) in enumerate(zip(tape.messages, tape.copies, strict=True)):
        pairs = [
            (ids, ids_then),
            *zip(now[1:5], then[1:5], strict=True),
            *_pairs(now.observation, then.observation),
        ]
        if not all(_equal(a, b) for a, b in pairs):
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


def _equal(one: Any, other: Any) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other))


def _lives(group: EnvGroup) -> list[Finding]:
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


def _seeding(tape: Tape) -> list[Finding]:
    """Slots draw from streams of their own, and a reset goes on with its stream."""
    firsts = [
        [tuple(x.tobytes() for x in row[:-4]) for row in slot_rows if row[-3]] for slot_rows in tape.by_slot
    ]
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


def _state(make: Callable[[], EnvGroup], group: EnvGroup, steps: int, seed: int) -> list[Finding]:
    """A second group continues from the state exactly, or says that it does not and begins new lives."""
    state = group.get_state()
    if state is None:
        return []
    findings = list(_plain(state, "state"))
    if findings:
        return findings
    other = make()
    try:
        before = np.asarray(group.run_ids())
        if not other.set_state(state):
            if (other.run_ids() == before).all():
                return [Finding("set_state that fails", "the same run ids", "new ones", "begin a new life")]
            return []
        tapes = [Tape([], [], [[] for _ in range(group.num_slots)], []) for _ in range(2)]
        for each, tape in ((group, tapes[0]), (other, tapes[1])):
            _continue(each, _Actor(each, seed + 1), tape, min(steps, 200))
        return _differences("set_state continues exactly", tapes[0].by_slot, tapes[1].by_slot)
    finally:
        other.close()


def _continue(group: EnvGroup, act: _Actor, tape: Tape, steps: int) -> None:
    for _ in range(steps):
        timestep, slot_ids = group.recv(RECV_TIMEOUT_S)
        leaves = [np.array(v) for _, v in rows.tree_leaves(group.spec.observation, timestep.observation)]
        for k, slot in enumerate(slot_ids.tolist()):
            tape.by_slot[slot].append(tuple(leaf[k] for leaf in [*leaves, *map(np.array, timestep[1:5])]))
        group.send(act(slot_ids), slot_ids)


def _plain(value: Any, path: str) -> Iterator[Finding]:
    """Only dicts with string keys over NumPy arrays and JSON scalars, lists and strings."""
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                yield Finding("state's form", f"{path} has the key {key!r}", "string keys", "name it")
            yield from _plain(part, f"{path}[{key!r}]")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _plain(part, f"{path}[{i}]")
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


def _differences(
    what: str, one: list[list[tuple[np.ndarray, ...]]], other: list[list[tuple[np.ndarray, ...]]]
) -> list[Finding]:
    for slot, (a_rows, b_rows) in enumerate(zip(one, other, strict=True)):
        for t, (a, b) in enumerate(zip(a_rows, b_rows, strict=False)):
            if not all(_equal(x, y) for x, y in zip(a, b, strict=True)):
                return [
                    Finding(
                        what,
                        f"slot {slot} row {t}: {b}",
                        f"{a}",
                        "draw only from generators seeded with seed_of",
                    )
                ]
    return []
