"""How a Gymnasium environment's state is kept: the generator at its last reset, and the actions since.

An environment that draws all its randomness from ``np_random`` is a function of these two, so replaying the
actions brings it back exactly. Nothing is pickled.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from headrace.envs.contract import EnvSpec
from headrace.envs.rows import pick, put, tree_arrays, tree_from_arrays, unstack, zeros_env
from headrace.spaces import Spec, map_leaves
from headrace.types import PyTree, TimeStep

MAX_REPLAY = 100_000
"""Episodes longer than this are not replayed: the slot starts a new life on resume."""


class Origin(NamedTuple):
    """How a slot's present episode began.

    Attributes:
        seed: the seed its reset was given, or -1 for none.
        generator: the encoded state of the generator just before that reset; None where there was none.
    """

    seed: int
    generator: dict[str, Any] | None


def generator_of(env: gym.Env) -> np.random.Generator | None:
    """The environment's NumPy generator, without making one where it never had one."""
    generator = getattr(env, "_np_random", None)
    return generator if isinstance(generator, np.random.Generator) else None


def raw_state(generator: np.random.Generator | None) -> dict[str, Any] | None:
    """The bit generator's state as NumPy gives it."""
    return None if generator is None else dict(generator.bit_generator.state)


def encode(value: Any) -> Any:
    """A bit generator's state with its integers (of up to 128 bits) as strings "i…", its strings as "s…"."""
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return value.copy()
    return f"s{value}" if isinstance(value, str) else f"i{int(value)}"


def decode(value: Any) -> Any:
    """Inverse of ``encode``."""
    if isinstance(value, Mapping):
        return {k: decode(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return value.copy()
    return value[1:] if value[0] == "s" else int(value[1:])


def same(one: Any, other: Any) -> bool:
    """Whether two encoded states are equal."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def encoded(env: gym.Env) -> dict[str, Any] | None:
    """The environment's generator as it is now, encoded; None where it has none."""
    state = raw_state(generator_of(env))
    return None if state is None else encode(state)


def set_generator(env: gym.Env, state: dict[str, Any]) -> bool:
    """Put the generator's raw state back; False where NumPy has no such generator.

    In place where its kind allows: parts of an environment may hold a reference.
    """
    generator = generator_of(env)
    if generator is None or generator.bit_generator.state["bit_generator"] != state["bit_generator"]:
        kind = getattr(np.random, str(state["bit_generator"]), None)
        if kind is None:
            return False
        generator = np.random.Generator(kind())
        env.np_random = generator
    generator.bit_generator.state = state
    return True


class ActionLog:
    """The batches of actions since the oldest present episode began.

    One entry a batch, not one a slot, so that logging costs a lock-step group one append a step.
    """

    def __init__(self, spec: Spec, num_slots: int) -> None:
        self._spec = spec
        self._entries: list[tuple[PyTree, np.ndarray | None]] = []
        self._offset = 0
        self._start = np.zeros(num_slots, np.int64)

    @property
    def _end(self) -> int:
        return self._offset + len(self._entries)

    def append(self, action: PyTree, mask: np.ndarray | None) -> None:
        """Log actions ``[N, ...]`` taken by the slots of ``mask`` (None: by all)."""
        self._entries.append((action, mask))
        if len(self._entries) % 1024 == 0:  # seldom, so that its cost is spread
            oldest = max(int(self._start.min()), self._end - MAX_REPLAY - 1)
            del self._entries[: oldest - self._offset]
            self._offset = oldest

    def restart(self, slot: int) -> None:
        """The slot's episode begins after the last entry."""
        self._start[slot] = self._end

    def actions(self, slot: int) -> list[PyTree] | None:
        """The actions of the slot's present episode in order, or None where they are too many."""
        start = int(self._start[slot]) - self._offset
        if start < 0 or len(self._entries) - start > MAX_REPLAY:
            return None
        chosen = self._entries[start:]
        return [pick(self._spec, action, slot) for action, mask in chosen if mask is None or mask[slot]]

    def replace(self, slot_actions: list[list[PyTree]], empty: PyTree) -> None:
        """Start over with these episodes, aligned at their ends; ``empty`` is a zero batch ``[N, ...]``."""
        longest = max((len(a) for a in slot_actions), default=0)
        self._entries, self._offset = [], 0
        for t in range(longest):
            batch = map_leaves(lambda _, leaf: leaf.copy(), self._spec, empty)
            for slot, actions in enumerate(slot_actions):
                k = t - (longest - len(actions))
                if k >= 0:
                    put(self._spec, batch, slot, actions[k])
            self._entries.append((batch, None))
        self._start = np.array([longest - len(a) for a in slot_actions], np.int64)


def stack_actions(spec: Spec, actions: list[PyTree], empty: PyTree) -> dict[str, np.ndarray]:
    """Actions of all slots one after the other, ``[sum of lengths, ...]`` by leaf."""
    if not actions:
        return tree_arrays(spec, pick(spec, empty, slice(0, 0)))
    columns = [tree_arrays(spec, action) for action in actions]
    return {key: np.stack([column[key] for column in columns]) for key in columns[0]}


def split_actions(spec: Spec, state: Mapping[str, Any]) -> list[list[PyTree] | None]:
    """Inverse of ``stack_actions``: the actions of each slot; None where its episode was too long to keep."""
    tree = tree_from_arrays(spec, {key: np.asarray(value) for key, value in state["actions"].items()})
    lengths = np.asarray(state["lengths"])
    ends = np.cumsum(np.maximum(lengths, 0))
    return [
        None if length < 0 else [pick(spec, tree, t) for t in range(end - length, end)]
        for length, end in zip(lengths.tolist(), ends.tolist(), strict=True)
    ]


def one(spec: Spec, action: PyTree) -> Any:
    """One logged action as ``env.step`` takes it, of a copy."""
    return unstack(spec, map_leaves(lambda _, value: np.array(value)[None], spec, action), 1)[0]


class Slots:
    """What a group knows of its slots beside the environments themselves.

    Attributes:
        life: int64 ``[N]``, restarts of each slot.
        steps: int64 ``[N]``, steps in this life.
        ended: bool ``[N]``, the slot's previous row was last.
        held: bool ``[N]``, the slot's first row waits to be received.
        again: bool ``[N]``, the slot's last row was not received by anybody and is to be given again.
        sent: bool ``[N]``, the slot was sent an action.
        pending: actions ``[N, ...]`` of the slots in ``sent``; None where there are none.
        origin: how each slot's episode began.
        log: the actions since.
        last: each slot's last received row, ``[N, ...]``; None before the first.
    """

    def __init__(self, num_slots: int, action: Spec) -> None:
        self.life, self.steps = np.zeros(num_slots, np.int64), np.zeros(num_slots, np.int64)
        self.ended, self.held, self.sent, self.again = (np.zeros(num_slots, bool) for _ in range(4))
        self.pending: PyTree = None
        self.origin = [Origin(-1, None)] * num_slots
        self.log = ActionLog(action, num_slots)
        self.last: TimeStep | None = None


def read(spec: EnvSpec, slots: Slots, generator_now: list[dict[str, Any] | None]) -> dict[str, Any]:
    """The slots and their generators as they are now, as plain data; ``slots.last`` must be there."""
    assert slots.last is not None
    n, last = len(slots.life), slots.last
    logs = [slots.log.actions(slot) for slot in range(n)]
    pending = zeros_env(spec.action, n)
    if slots.pending is not None:
        put(spec.action, pending, slots.sent, pick(spec.action, slots.pending, slots.sent))
    return {
        "env": spec.name,
        "num_slots": n,
        "flags": np.stack([slots.ended, slots.held, slots.sent, slots.again]),
        "counts": np.stack([slots.life, slots.steps]),
        "pending": tree_arrays(spec.action, pending),
        "lengths": np.array([-1 if log is None else len(log) for log in logs], np.int64),
        "actions": stack_actions(spec.action, [a for log in logs if log is not None for a in log], pending),
        "seed": np.array([origin.seed for origin in slots.origin], np.int64),
        "generator": [None if o.generator is None else encode(o.generator) for o in slots.origin],
        "generator_now": generator_now,
        "last": tree_arrays(spec.observation, last.observation),
        "last_reward": np.array(last.reward),
        "last_flags": np.stack([last.first, last.terminated, last.truncated]),
    }


def load(spec: EnvSpec, state: Mapping[str, Any]) -> tuple[Slots, list[list[PyTree] | None]]:
    """Inverse of ``read``: the slots, and the actions to replay in each (None: too many were made)."""
    slots = Slots(int(state["num_slots"]), spec.action)
    slots.ended, slots.held, slots.sent, slots.again = np.array(state["flags"], bool)
    slots.life, slots.steps = np.array(state["counts"], np.int64)
    if slots.sent.any():
        slots.pending = tree_from_arrays(spec.action, {k: np.array(v) for k, v in state["pending"].items()})
    slots.last = TimeStep(
        tree_from_arrays(spec.observation, {k: np.array(v) for k, v in state["last"].items()}),
        np.array(state["last_reward"], np.float32),
        *np.array(state["last_flags"], bool),
    )
    slots.origin = [
        Origin(int(seed), None if generator is None else decode(generator))
        for seed, generator in zip(state["seed"], state["generator"], strict=True)
    ]
    actions = split_actions(spec.action, state)
    slots.log.replace([log or [] for log in actions], zeros_env(spec.action, len(slots.life)))
    return slots, actions


_BY_SLOT = {
    "flags": 1, "counts": 1, "lengths": 0, "seed": 0, "last_reward": 0, "last_flags": 1,
}  # fmt: skip
"""The axis of slots in each array of a state."""
_TREES, _LISTS = ("pending", "last"), ("generator", "generator_now")


def join(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of one group, of the states of its parts."""

    def joined(values: list[np.ndarray], axis: int = 0) -> np.ndarray:
        return np.concatenate(values, axis=axis)

    state: dict[str, Any] = {"env": states[0]["env"], "num_slots": sum(s["num_slots"] for s in states)}
    state |= {key: joined([s[key] for s in states], axis) for key, axis in _BY_SLOT.items()}
    for key in (*_TREES, "actions"):
        state[key] = {leaf: joined([s[key][leaf] for s in states]) for leaf in states[0][key]}
    return state | {key: [x for s in states for x in s[key]] for key in _LISTS}


def split(state: Mapping[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
    """Inverse of ``join``, whatever parts it was joined from."""
    parts, low, first = [], 0, 0
    for size in sizes:
        mine = slice(low, low + size)
        last = first + int(np.maximum(state["lengths"][mine], 0).sum())
        part: dict[str, Any] = {"env": state["env"], "num_slots": size}
        part |= {key: state[key][mine] if not axis else state[key][:, mine] for key, axis in _BY_SLOT.items()}
        part |= {key: {leaf: value[mine] for leaf, value in state[key].items()} for key in _TREES}
        part["actions"] = {leaf: value[first:last] for leaf, value in state["actions"].items()}
        parts.append(part | {key: list(state[key][mine]) for key in _LISTS})
        low, first = low + size, last
    return parts
