"""A ``JaxEnv`` mapped over slots, as pure functions that keep the contract of ``EnvGroup``.

Next-step order: the row after an episode's last row is the ``first`` row of a reset, and the action chosen at the last row
goes nowhere. All slots are in one batch, so a run's step has one shape and compiles once.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from headrace import spaces
from headrace.envs import rows
from headrace.envs.contract import EnvSpec
from headrace.envs.jax_env import JaxEnv
from headrace.errors import EnvironmentFailure, UnsupportedSpaceError
from headrace.spaces import BoxSpec, Leaf, Spec
from headrace.types import Array, PyTree, TimeStep


class EnvSlots(NamedTuple):
    """The environments of ``N`` slots, on the device; donated to each step.

    Attributes:
        state: the environments' own, ``[N, ...]``.
        key: uint32 key data of each slot's stream.
        count: i32 ``[N]``, rows given in this life: the position in that stream.
        elapsed: i32 ``[N]``, steps of the episode.
        last: bool ``[N]``, the row before was an episode's last.
    """

    state: PyTree
    key: Array
    count: Array
    elapsed: Array
    last: Array


EnvStep: TypeAlias = Callable[[EnvSlots, PyTree], tuple[EnvSlots, TimeStep]]
"""``(slots, action [N, ...] in the environment's coordinates) -> (slots, rows [N])``, to be traced."""


class Functions(NamedTuple):
    """``begin``: seeds uint32 ``[N]`` to slots and their ``first`` rows; ``step``: an ``EnvStep``."""

    spec: EnvSpec
    begin: Callable[[Array], tuple[EnvSlots, TimeStep]]
    step: EnvStep


def functions(env: JaxEnv, name: str, limit: int | None) -> Functions:
    """The functions of ``env``, with episodes truncated after ``limit`` steps.

    Raises:
        EnvironmentFailure: what ``reset`` or ``step`` gives has not the form that was declared; names the leaf.
        UnsupportedSpaceError: a space that cannot be carried.
    """
    observation_space, action_space = (
        _on_device(spaces.from_gymnasium(space, path), path)
        for space, path in ((env.observation_space, "observation space"), (env.action_space, "action space"))
    )
    spec = EnvSpec(observation_space, action_space, name=name)
    try:
        like = _checked_forms(env, spec)
    except EnvironmentFailure as exc:
        raise EnvironmentFailure(f"env {name}: {exc}") from exc

    def reset(key: Array) -> tuple[PyTree, PyTree]:
        state, observation = env.reset(key)
        return _typed(state, like), spaces.to_agent(spec.observation, observation)

    def step(key: Array, state: PyTree, action: PyTree) -> tuple[PyTree, PyTree, Array, Array]:
        state, observation, reward, terminated = env.step(key, state, action)
        observation = spaces.to_agent(spec.observation, observation)
        reward, terminated = jnp.reshape(reward, ()), jnp.reshape(terminated, ())
        return _typed(state, like), observation, reward.astype(jnp.float32), terminated.astype(bool)

    def begin(seeds: Array) -> tuple[EnvSlots, TimeStep]:
        key = jax.vmap(lambda seed: jax.random.key_data(jax.random.key(seed)))(seeds)
        zero = jnp.zeros(len(seeds), jnp.int32)
        state, observation = jax.vmap(reset)(_keys(key, zero))
        no = jnp.zeros(len(seeds), bool)
        timestep = TimeStep(observation, jnp.zeros(len(seeds), jnp.float32), ~no, no, no)
        return EnvSlots(state, key, zero + 1, zero, no), timestep

    def step_all(slots: EnvSlots, action: PyTree) -> tuple[EnvSlots, TimeStep]:
        first, keys = slots.last, _keys(slots.key, slots.count)
        action = rows.env_batch(spec.action, action, len(first))
        state, observation, reward, terminated = jax.vmap(step)(keys, slots.state, action)
        # A branch of the whole batch, so that resets cost nothing where no episode has ended.
        fresh = jax.lax.cond(jnp.any(first), lambda: jax.vmap(reset)(keys), lambda: (state, observation))
        state, observation = _choose(first, fresh, (state, observation))
        elapsed = jnp.where(first, 0, slots.elapsed + 1)
        terminated &= ~first
        truncated = ~first & (elapsed >= limit) if limit is not None else jnp.zeros_like(first)
        reward = jnp.where(first, jnp.float32(0), reward)
        slots = EnvSlots(state, slots.key, slots.count + 1, elapsed, terminated | truncated)
        return slots, TimeStep(observation, reward, first, terminated, truncated)

    return Functions(spec, begin, step_all)


def is_key(x: Any) -> bool:
    """Whether ``x`` is an array of typed PRNG keys."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _keys(key: Array, count: Array) -> Array:
    return jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(key), count)


def _choose(mask: Array, one: PyTree, other: PyTree) -> PyTree:
    def choose(a: Array, b: Array) -> Array:
        return jnp.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, one, other)


def _typed(state: PyTree, like: PyTree) -> PyTree:
    """Without weak types (Python's own numbers), which would compile a second time."""
    return jax.tree.map(lambda x, s: x if is_key(s) else jnp.asarray(x, s.dtype), state, like)


def _on_device(spec: Spec, path: str) -> Spec:
    """The spec with the dtypes that JAX has: int64 is int32 there unless it was told otherwise."""

    def narrow(leaf: Leaf) -> Leaf:
        leaf = replace(leaf, env_dtype=np.dtype(jax.dtypes.canonicalize_dtype(leaf.env_dtype)))
        if isinstance(leaf, BoxSpec) and leaf.dtype == np.int32 and leaf.env_dtype != np.int32:
            raise UnsupportedSpaceError(
                f"{path} holds a Box of {leaf.env_dtype}, which on a device cannot be checked to fit int32; expected "
                f"int32, a smaller integer, bool or a float"
            )
        return leaf

    return spaces.map_leaves(narrow, spec)


def _checked_forms(env: JaxEnv, spec: EnvSpec) -> PyTree:
    """Shapes and dtypes of the state, having looked at all that ``reset`` and ``step`` give; nothing is computed."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    state, observation = _parts("reset", jax.eval_shape(env.reset, key), ("state", "observation"))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    action = spaces.map_leaves(
        lambda leaf: jax.ShapeDtypeStruct(rows.env_shape(leaf), leaf.env_dtype), spec.action
    )
    given = jax.eval_shape(env.step, key, state, action)
    new, seen, reward, terminated = _parts("step", given, ("state", "observation", "reward", "terminated"))
    for where, value in (("reset", observation), ("step", seen)):
        _check_observation(where, value, spec.observation)
    after, before = str(jax.tree.structure(new)), str(jax.tree.structure(state))
    if after != before:
        raise EnvironmentFailure(f"step gives a state of {after}; expected that of reset, {before}")
    for (path, a), b in zip(jax.tree.leaves_with_path(new), jax.tree.leaves(state), strict=True):
        _check_form(f"step gives state{jax.tree_util.keystr(path)}", a, b.shape, b.dtype, "as reset gave it")
    for what, value, kinds in (("reward", reward, "fiub"), ("terminated", terminated, "b")):
        if (
            not hasattr(value, "shape")
            or np.prod(value.shape) != 1
            or np.dtype(value.dtype).kind not in kinds
        ):
            expected = "one bool" if kinds == "b" else "one number"
            raise EnvironmentFailure(f"step gives {what} {value}; expected {expected}")
    return state


def _parts(where: str, given: Any, names: tuple[str, ...]) -> Any:
    if not isinstance(given, tuple) or len(given) != len(names):
        got = f"a tuple of {len(given)}" if isinstance(given, tuple) else f"a {type(given).__name__}"
        raise EnvironmentFailure(f"{where} gives {got}; expected ({', '.join(names)})")
    return given


def _check_observation(where: str, value: PyTree, spec: Spec) -> None:
    try:
        pairs = list(rows.tree_leaves(spec, value))
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        raise EnvironmentFailure(
            f"{where} gives an observation of {value}; expected the structure of {spec}"
        ) from exc
    for (path, leaf), (_, part) in zip(spaces.leaves(spec), pairs, strict=True):
        what = f"{where} gives observation{path}"
        _check_form(what, part, rows.env_shape(leaf), _dtype_of(leaf, part), "as its space says")


def _dtype_of(leaf: Leaf, value: Any) -> Any:
    """A box's dtype is its own; categories and bits may come in any integer type, or as bools."""
    if isinstance(leaf, BoxSpec) or not hasattr(value, "dtype") or np.dtype(value.dtype).kind not in "iub":
        return leaf.env_dtype
    return value.dtype


def _check_form(what: str, got: Any, shape: tuple[int, ...], dtype: Any, why: str) -> None:
    if getattr(got, "shape", None) != shape or got.dtype != dtype:
        form = f"{got.dtype} {got.shape}" if hasattr(got, "dtype") else f"a {type(got).__name__}"
        raise EnvironmentFailure(f"{what} as {form}; expected {dtype} {shape} {why}")
