"""What any ``EnvGroup`` must do, as one function: run it on a group of your own.

from headrace.envs.conformance import check_group
assert check_group(lambda: MyGroup(...)) == []
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headrace.envs import conformance_rules as rules
from headrace.envs import rows
from headrace.envs.conformance_rules import Finding, Messages, SlotRows
from headrace.envs.contract import EnvGroup
from headrace.spaces import BoxSpec, DiscreteSpec, Leaf, MultiDiscreteSpec, Spec, map_leaves
from headrace.types import PyTree, TimeStep

RECV_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Tape:
    """What was received in one run.

    Attributes:
        messages: each message as received.
        copies: copies of them made at once.
        by_slot: for each slot the flattened rows in order: (leaves of observation and extra…, reward, first,
            terminated, truncated).
        findings: breaches found on the way.
    """

    messages: Messages
    copies: Messages
    by_slot: SlotRows
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
    findings = first.findings + list(rules.overwritten(first.messages, first.copies))
    if findings:
        group.close()
        return findings
    findings += rules.lives(group) + rules.seeding(first.by_slot)
    findings += _state(make, group, steps, random_seed)
    for _ in range(2):  # a second close must be harmless
        group.close()
    second, group = _run(make, steps, random_seed)
    group.close()
    return findings + rules.differences("equal seeds, equal rows", first.by_slot, second.by_slot)


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
    tape.findings.extend(rules.group_form(group))
    if not tape.findings:
        _drive(group, _Actor(group, seed), tape, steps)
    return tape, group


def _drive(group: EnvGroup, act: _Actor, tape: Tape, steps: int) -> None:
    """Receive and answer ``steps`` times; ends between ``send`` and ``recv``, or at the first finding."""
    was_last = np.array([not rows_ or bool(rows_[-1][-1] | rows_[-1][-2]) for rows_ in tape.by_slot])
    for _ in range(steps):
        timestep, slot_ids = group.recv(RECV_TIMEOUT_S)
        tape.findings.extend(rules.message_form(group, timestep, slot_ids))
        if tape.findings:
            return
        tape.findings.extend(rules.order(timestep, slot_ids, was_last))
        was_last[slot_ids] = timestep.last
        tape.messages.append((timestep, slot_ids))
        tape.copies.append((_copy(group, timestep), slot_ids.copy()))
        _note(tape, group, timestep, slot_ids)
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


def _note(tape: Tape, group: EnvGroup, timestep: TimeStep, slot_ids: np.ndarray) -> None:
    """Put a message's rows on the tape."""
    trees = ((group.spec.observation, timestep.observation), (group.spec.extra, timestep.extra))
    leaves = [np.array(v) for spec, tree in trees for _, v in rows.tree_leaves(spec, tree)]
    for k, slot in enumerate(slot_ids.tolist()):
        tape.by_slot[slot].append(tuple(leaf[k] for leaf in [*leaves, *map(np.array, timestep[1:5])]))


def _flat(group: EnvGroup, action: PyTree) -> list[np.ndarray]:
    return [value for _, value in rows.tree_leaves(group.spec.action, action)]


def _copy(group: EnvGroup, timestep: TimeStep) -> TimeStep:
    spec = group.spec
    observation, extra = (
        rows.copied(s, x) for s, x in ((spec.observation, timestep.observation), (spec.extra, timestep.extra))
    )
    reward, first, terminated, truncated = (np.array(x) for x in timestep[1:5])
    return TimeStep(observation, reward, first, terminated, truncated, extra)


def _state(make: Callable[[], EnvGroup], group: EnvGroup, steps: int, seed: int) -> list[Finding]:
    """A second group continues from the state exactly, or says that it does not and begins new lives."""
    state = group.get_state()
    if state is None:
        return []
    findings = list(rules.plain(state, "state"))
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
        return rules.differences("set_state continues exactly", tapes[0].by_slot, tapes[1].by_slot)
    finally:
        other.close()


def _continue(group: EnvGroup, act: _Actor, tape: Tape, steps: int) -> None:
    for _ in range(steps):
        timestep, slot_ids = group.recv(RECV_TIMEOUT_S)
        _note(tape, group, timestep, slot_ids)
        group.send(act(slot_ids), slot_ids)
