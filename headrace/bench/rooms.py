"""Each room alone: the least that any program must do for a row, as a bare loop of the libraries.

A loop is a generator that yields how many rows each turn made; whoever drives it keeps the time. Nothing of ``envs``,
``inference``, ``experience`` or ``learner`` runs in one, apart from what they are made to run: the environments
themselves, the agent's policy and the compiled update. Where a loop has several forms the faster one counts, so
that the comparison never flatters the path.
"""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from headrace import xla
from headrace.agents.agent import ActInput, Agent
from headrace.bench.env_loops import env_loops
from headrace.envs.contract import EnvSpec
from headrace.learner.stages import compile_update
from headrace.runtime.parts import blank_row
from headrace.seeds import Role, stream_seed
from headrace.settings.config import Config
from headrace.spaces import BoxSpec, DiscreteSpec, Leaf, MultiDiscreteSpec, map_leaves
from headrace.types import Context, Progress, PyTree, Row, TimeStep, Trajectory

Turns: TypeAlias = Generator[int, None, None]
Loop: TypeAlias = Callable[[], Turns]
"""Begins a loop; closing it waits for what is on its way and frees what it holds."""


class Sizes(NamedTuple):
    """A run's sizes.

    Attributes:
        num_envs: ``N``, environments.
        group: ``b``, environments of a group.
        batch: ``B``, trajectories of a batch.
        length: ``T``, transitions of a trajectory.
        stride: rows from the start of one trajectory to that of the next.
        context: ``n``, rows before row 0.
    """

    num_envs: int
    group: int
    batch: int
    length: int
    stride: int
    context: int


def sizes_of(config: Config, agent: Agent) -> Sizes:
    """The sizes that a run with these settings has."""
    e = agent.experience
    group = config.env.num_envs // config.env.groups
    return Sizes(config.env.num_envs, group, e.batch_size, e.length, e.length - e.overlap, e.context)


def bare_loops(config: Config, agent: Agent, spec: EnvSpec) -> Mapping[str, Mapping[str, Loop]]:
    """The loops of every room, by room and form. What they compile is compiled once, in their first turn."""
    sizes = sizes_of(config, agent)
    return {
        "envs": env_loops(config),
        "inference": inference_loops(agent, spec, sizes, config),
        "experience": {"ring": lambda: experience_turns(blank_row(agent, spec), sizes)},
        "learner": learner_loops(agent, spec, sizes, config),
    }


def inference_loops(agent: Agent, spec: EnvSpec, sizes: Sizes, config: Config) -> dict[str, Loop]:
    """Forward and sample, compiled: a group's newest rows from host memory in, actions and extras in host memory out.

    Frames before the newest wait on the device; no memory of slots is kept, no request is looked at. One at a time, or as
    many under way as there are groups.
    """

    def forward(
        params: Any, past: PyTree, timestep: TimeStep, previous: PyTree, carry: PyTree, keys: Any
    ) -> Any:
        observation = timestep.observation
        if sizes.context:
            observation = jax.tree.map(
                lambda old, new: jnp.concatenate([old, new[:, None]], axis=1), past, observation
            )
        x = ActInput(timestep._replace(observation=observation), previous, jnp.ones(sizes.group))
        return agent.act(params, carry, x, jax.random.wrap_key_data(keys))

    compiled = xla.jit(forward)

    def loop(depth: int) -> Turns:
        rng, b = np.random.default_rng(0), sizes.group
        params = agent.policy_params(jax.jit(agent.init)(jax.random.key(stream_seed(config.seed, Role.INIT))))
        past = jax.device_put(random_observation(spec, (b, sizes.context), rng)) if sizes.context else ()
        timestep = random_timestep(spec, (b,), rng)
        keys = jax.random.key_data(jax.random.split(jax.random.key(0), b))
        previous = jax.device_put(jax.tree.map(lambda x: np.zeros((b, *x.shape), x.dtype), agent.action))
        memory = [(previous, agent.initial_carry(b)) for _ in range(depth)]
        turn = itertools.cycle(range(depth))

        def start() -> Any:
            index = next(turn)
            (action, extras), carry = compiled(params, past, timestep, *memory[index], keys)
            memory[index] = action, carry
            return action, extras

        return pipelined(start, lambda answer: jax.tree.map(np.asarray, answer), depth, b)

    return {f"{depth} under way": partial(loop, depth) for depth in sorted({1, config.env.groups})}


def learner_loops(agent: Agent, spec: EnvSpec, sizes: Sizes, config: Config) -> dict[str, Loop]:
    """The compiled update on one collated batch in host memory, put on the device anew for each update.

    One at a time, or the next one dispatched before the one before is waited for.
    """
    update, init = compile_update(agent), jax.jit(agent.init)
    batch = random_trajectory(agent, spec, sizes, np.random.default_rng(0))

    def loop(depth: int) -> Turns:
        held = [init(jax.random.key(stream_seed(config.seed, Role.INIT)))]
        key, progress = jax.random.key(0), Progress(np.float32(0), np.int32(0))

        def start() -> Any:
            done = update(held[0], jax.device_put(batch), progress, key)
            held[0] = done.state
            return done.metrics

        return pipelined(start, jax.block_until_ready, depth, sizes.length * sizes.batch)

    return {f"{depth} under way": partial(loop, depth) for depth in (1, 2)}


def pipelined(start: Callable[[], Any], finish: Callable[[Any], Any], depth: int, rows: int) -> Turns:
    """Start and finish in turn with ``depth`` under way; each turn finishes one of ``rows`` rows."""
    under_way: deque[Any] = deque()
    try:
        while True:
            under_way.append(start())
            if len(under_way) == depth:
                finish(under_way.popleft())
                yield rows
    finally:
        while under_way:
            finish(under_way.popleft())


def experience_turns(row: Row, sizes: Sizes) -> Turns:
    """Rows of a group into a ring ``[time, N]``, every ``stride`` rows the finished ranges of all slots out again.

    Batches ``[T+1, B]`` (observations with their context before them) are copied into the same arrays each time.
    """
    length, context = sizes.length + 1, sizes.context
    capacity = 2 * (length + context)
    none = jax.tree.map(lambda _: 0, row)
    seen = none.timestep._replace(
        observation=jax.tree.map(lambda _: context, row.timestep.observation), first=context
    )
    blank = [np.asarray(x) for x in jax.tree.leaves(row)]
    rings = [np.zeros((capacity, sizes.num_envs, *x.shape), x.dtype) for x in blank]
    copied = list(zip(rings, jax.tree.leaves(none._replace(timestep=seen)), strict=True))
    batch = [np.zeros((length + n, sizes.batch, *ring.shape[2:]), ring.dtype) for ring, n in copied]
    message = [np.ones((sizes.group, *ring.shape[2:]), ring.dtype) for ring, _ in copied]
    filled = 0
    for now in itertools.count():
        for low in range(0, sizes.num_envs, sizes.group):
            for (ring, _), value in zip(copied, message, strict=True):
                ring[now % capacity, low : low + sizes.group] = value
            if (
                low + sizes.group == sizes.num_envs
                and now >= sizes.length
                and (now - sizes.length) % sizes.stride == 0
            ):
                start = now - sizes.length
                for (ring, n), out in zip(copied, batch, strict=True):
                    _copy_ranges(ring, start - n, out, filled)
                filled = (filled + sizes.num_envs) % sizes.batch
            yield sizes.group


def _copy_ranges(ring: np.ndarray, start: int, out: np.ndarray, filled: int) -> None:
    """The rows from ``start`` of every slot into the batch's columns from ``filled`` on; a full one begins again."""
    capacity, num_slots = ring.shape[:2]
    start, (length, size), slot = start % capacity, out.shape[:2], 0
    unwrapped = min(length, capacity - start)
    while slot < num_slots:
        count = min(num_slots - slot, size - filled)
        mine, theirs = slice(filled, filled + count), slice(slot, slot + count)
        out[:unwrapped, mine] = ring[start : start + unwrapped, theirs]
        if unwrapped < length:
            out[unwrapped:, mine] = ring[: length - unwrapped, theirs]
        slot, filled = slot + count, (filled + count) % size


def random_observation(spec: EnvSpec, axes: tuple[int, ...], rng: np.random.Generator) -> PyTree:
    """Observations ``[*axes, ...]`` in agent types, within the bounds of integers, normal where they are real numbers."""

    def draw(leaf: Leaf) -> np.ndarray:
        shape = (*axes, *leaf.shape)
        if isinstance(leaf, BoxSpec) and leaf.dtype.kind == "f":
            return rng.standard_normal(shape).astype(leaf.dtype)
        if isinstance(leaf, BoxSpec):
            low, high = (np.clip(np.asarray(bound, np.float64), -128, 255) for bound in (leaf.low, leaf.high))
            return rng.uniform(low, high, shape).astype(leaf.dtype)
        most = (
            np.array(leaf.nvec)
            if isinstance(leaf, MultiDiscreteSpec)
            else leaf.n
            if isinstance(leaf, DiscreteSpec)
            else 2
        )
        return rng.integers(0, most, shape).astype(leaf.dtype)

    return map_leaves(draw, spec.observation)


def random_timestep(spec: EnvSpec, axes: tuple[int, ...], rng: np.random.Generator) -> TimeStep:
    """Rows ``[*axes, ...]`` in the middle of episodes."""
    reward, never = rng.standard_normal(axes).astype(np.float32), np.zeros(axes, bool)
    extra = map_leaves(lambda leaf: np.ones((*axes, *leaf.shape), leaf.dtype), spec.extra)  # all is allowed
    return TimeStep(random_observation(spec, axes, rng), reward, never, never.copy(), never.copy(), extra)


def random_trajectory(agent: Agent, spec: EnvSpec, sizes: Sizes, rng: np.random.Generator) -> Trajectory:
    """A batch as the experience room collates it, in the same types."""
    time, size = sizes.length + 1, sizes.batch
    blank = blank_row(agent, spec)

    def zeros(tree: PyTree, *axes: int) -> PyTree:
        return jax.tree.map(lambda x: np.zeros((*axes, *np.shape(x)), np.asarray(x).dtype), tree)

    return Trajectory(
        rows=Row(random_timestep(spec, (time, size), rng), *zeros(blank[1:], time, size)),
        context=Context(
            random_observation(spec, (sizes.context, size), rng), np.zeros((sizes.context, size), bool)
        ),
        carry=jax.tree.map(np.asarray, agent.initial_carry(size)),
        prev_action=zeros(agent.action, size),
        slot_id=np.arange(size, dtype=np.int32) % sizes.num_envs,
        item_id=(),
        weight=np.ones(size, np.float32),
    )
