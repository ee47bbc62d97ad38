"""gymnax's environments as ``JaxEnv``.

gymnax's own ``step`` resets an ended environment at once and takes the final observation away, so ``step_env`` and
``reset_env`` are used. Since gymnax 1.0 ``step_env`` reports the end of the task alone, and ``max_steps_in_episode`` of its
params is a limit that only ``step`` applies: it becomes ours. (Before 1.0 the two were one flag; those are refused.)
"""

import difflib
import functools
import inspect
import json
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import jax
import numpy as np

from headrace.envs import resolve
from headrace.envs.jax_env import JaxEnv
from headrace.errors import ConfigError, EnvironmentIdError, UnsupportedSpaceError

LIMIT = "max_steps_in_episode"


def make(target: str, kwargs: Mapping[str, Any], max_episode_steps: int | None) -> JaxEnv:
    """The gymnax environment ``target``; the same record for the same arguments.

    Args:
        target: gymnax's id, such as ``Catch-bsuite``.
        kwargs: fields of its params, or arguments of its constructor; JSON values.
        max_episode_steps: in place of its own limit; what it shows of its time follows.

    Raises:
        EnvironmentIdError: gymnax is not installed, too old, or has no such environment.
        ConfigError: a setting that it does not take; the nearest is named.
    """
    return _made(target, resolve.as_json(f"gymnax:{target}", kwargs), max_episode_steps)


@functools.lru_cache(maxsize=16)
def _made(target: str, kwargs: str, max_episode_steps: int | None) -> JaxEnv:
    settings = json.loads(kwargs)
    name, factory = f"gymnax:{target}", _factory(target)
    own = [p for p in inspect.signature(factory).parameters if p in settings]
    env = factory(**{key: settings.pop(key) for key in own})
    params = _params(name, env, settings, sorted(inspect.signature(factory).parameters))
    if max_episode_steps is not None:
        params = params.replace(**{LIMIT: type(getattr(params, LIMIT))(max_episode_steps)})

    def reset(key: Any) -> tuple[Any, Any]:
        observation, state = env.reset_env(key, params)
        return state, observation

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any]:
        observation, state, reward, terminated, _ = env.step_env(key, state, action, params)
        return state, observation, reward, terminated

    observation = jax.eval_shape(reset, jax.random.key(0))[1]
    return JaxEnv(
        reset,
        step,
        _space(env.observation_space(params), f"env {name}: observation space", observation),
        _space(env.action_space(params), f"env {name}: action space"),
        int(getattr(params, LIMIT)),
    )


def _factory(target: str) -> Any:
    try:
        import gymnax.environments.environment
        from gymnax import registration
    except ImportError as exc:
        raise EnvironmentIdError(
            f'gymnax:{target} needs gymnax, which is not installed; run: pip install "headrace[gymnax]"'
        ) from exc
    if not hasattr(gymnax.environments.environment.Environment, "is_truncated"):
        raise EnvironmentIdError(
            f"gymnax:{target}: the installed gymnax does not tell truncation from termination; expected 1.0 or newer, run: "
            'pip install "headrace[gymnax]"'
        )
    known = registration._registry
    if target not in known:
        raise EnvironmentIdError(f"gymnax has no environment {target!r}; {resolve.nearest(target, known)}")
    return known[target]


def _params(name: str, env: Any, settings: Mapping[str, Any], arguments: list[str]) -> Any:
    """The default params with ``settings`` in place of theirs, each in its default's type."""
    params = env.default_params
    fields = sorted(params.__dataclass_fields__)
    changed = {}
    for key, value in settings.items():
        if key == LIMIT:
            raise ConfigError(f"{name}: got {LIMIT!r} among its kwargs; use env.max_episode_steps")
        if key not in fields:
            near = difflib.get_close_matches(key, {*fields, *arguments} - {LIMIT}, n=3, cutoff=0.5)
            raise ConfigError(f"{name} takes no setting {key!r}; nearest: {', '.join(near) or 'none'}")
        changed[key] = _like(f"{name}: {key}", getattr(params, key), value)
    return params.replace(**changed)


_FITS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}
"""Kinds of numbers that a param of a kind may be given."""


def _like(what: str, default: Any, value: Any) -> Any:
    form, given = np.asarray(default), np.asarray(value)
    if given.shape != form.shape or given.dtype.kind not in _FITS.get(form.dtype.kind, ""):
        shape = f" of shape {form.shape}" if form.shape else ""
        raise ConfigError(f"{what} is {value!r}; expected {form.dtype}{shape}, such as {default}")
    if isinstance(default, bool | int | float):
        return type(default)(value)
    return jax.numpy.asarray(given, form.dtype)


def _space(space: Any, path: str, like: Any = None) -> gym.Space:
    """Gymnasium's space of a gymnax one.

    The dtype is that of ``like``, what the environment really gives: some declare another.
    """
    from gymnax.environments import spaces

    match space:
        case spaces.Discrete():
            return gym.spaces.Discrete(space.n, dtype=np.dtype(space.dtype).type)
        case spaces.Box():
            dtype = np.dtype(space.dtype if like is None else like.dtype)
            low, high = (
                np.broadcast_to(np.asarray(x), space.shape).astype(dtype) for x in (space.low, space.high)
            )
            return gym.spaces.Box(low, high, space.shape, dtype.type)
        case spaces.Dict():
            parts = {k: (v, None if like is None else like[k]) for k, v in space.spaces.items()}
            return gym.spaces.Dict({k: _space(v, f"{path}[{k!r}]", x) for k, (v, x) in parts.items()})
        case spaces.Tuple():
            given = [None] * len(space.spaces) if like is None else like
            return gym.spaces.Tuple(
                [
                    _space(v, f"{path}[{i}]", x)
                    for i, (v, x) in enumerate(zip(space.spaces, given, strict=True))
                ]
            )
    raise UnsupportedSpaceError(f"{path} is a {type(space).__name__}; expected Box, Discrete, Dict or Tuple")
