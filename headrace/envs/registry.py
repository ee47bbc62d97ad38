"""From an environment's id to a group of its environments.

| id | what it is |
|---|---|
| ``CartPole-v1`` | a Gymnasium id; ``module:Env-v0`` imports the module that registers it first |
| ``my_file:make_env`` | a callable of an importable module (the working directory counts as importable) |
| ``prefix:rest`` | ``rest`` is made by the prefix's factory: ``gym:``, ``vector:``, ``envpool:``, or one that
was registered |
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import gymnasium as gym

from headrace.envs import resolve
from headrace.envs.contract import EnvGroup, EnvSpec
from headrace.envs.envpool import EnvPoolGroup
from headrace.envs.gym import GymGroup
from headrace.envs.gym_vector import VectorGroup
from headrace.errors import ConfigError, EnvironmentFailure, EnvironmentIdError

Vectorization: TypeAlias = Literal["single", "vector"]


@dataclass(frozen=True)
class Request:
    """What a factory is asked for.

    Attributes:
        env_id: the id as the user wrote it.
        target: the id without its prefix.
        num_slots: environments of the group.
        seed_of: ``(slot in group, life) -> seed``.
        kwargs: the environment's own settings.
        vectorization: ``single`` environments, or one ``vector`` environment of ``num_slots``.
        step_timeout_s: how long one step may take, in seconds.
        max_episode_steps: a time limit in agent steps in place of the environment's; None leaves it.
        num_threads: threads of an environment that has its own; 0 lets it choose.
        first_slot: global id of the group's slot 0, for messages.
    """

    env_id: str
    target: str
    num_slots: int
    seed_of: Callable[[int, int], int]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    vectorization: Vectorization = "single"
    step_timeout_s: float = 60.0
    max_episode_steps: int | None = None
    num_threads: int = 0
    first_slot: int = 0


Factory: TypeAlias = Callable[[Request], EnvGroup]

_FACTORIES: dict[str, Factory] = {}


def register(prefix: str, factory: Factory) -> None:
    """Let ids ``prefix:…`` be made by ``factory``, whose docstring's first line describes it.

    Raises:
        ConfigError: the prefix is taken or is no identifier.
    """
    if prefix in _FACTORIES or not prefix.isidentifier():
        raise ConfigError(
            f"got prefix {prefix!r}; expected an identifier other than {', '.join(sorted(_FACTORIES))}"
        )
    _FACTORIES[prefix] = factory


def prefixes() -> dict[str, str]:
    """Each prefix and what its ids are, in one line."""
    return {p: (inspect.getdoc(f) or "").split("\n")[0] for p, f in sorted(_FACTORIES.items())}


def make_group(
    env_id: str,
    num_slots: int,
    seed_of: Callable[[int, int], int],
    *,
    kwargs: Mapping[str, Any] = {},
    vectorization: Vectorization = "single",
    step_timeout_s: float = 60.0,
    max_episode_steps: int | None = None,
    num_threads: int = 0,
    first_slot: int = 0,
) -> EnvGroup:
    """Make a group of ``num_slots`` environments; arguments as in ``Request``.

    Raises:
        EnvironmentIdError: no environment goes by that id, or its package is missing.
        UnsupportedSpaceError: a space the system cannot carry.
        ConfigError: a setting the environment does not take.
        EnvironmentFailure: the environment could not be made or reset; its error is the cause.
    """
    if num_slots < 1:
        raise ConfigError(f"got num_slots={num_slots} for env {env_id}; expected at least 1")
    if vectorization not in ("single", "vector"):
        raise ConfigError(f"got vectorization={vectorization!r}; expected 'single' or 'vector'")
    if max_episode_steps is not None and max_episode_steps < 1:
        raise ConfigError(
            f"got max_episode_steps={max_episode_steps}; expected at least 1, or None for the env's own"
        )
    for key in ("max_episode_steps", "num_envs"):
        if key in kwargs:
            raise ConfigError(
                f"env {env_id}: got {key!r} among its kwargs; it has a setting of its own, use that"
            )
    request = Request(
        env_id,
        env_id,
        num_slots,
        seed_of,
        dict(kwargs),
        vectorization,
        step_timeout_s,
        max_episode_steps,
        num_threads,
        first_slot,
    )
    prefix, colon, rest = env_id.partition(":")
    if colon and prefix in _FACTORIES:
        return _FACTORIES[prefix](replace(request, target=rest))
    return _from_module(request) if colon else _gym(request)


def describe(env_id: str, **options: Any) -> EnvSpec:
    """What an environment looks like: makes one, reads its spec, closes it. Options as of ``make_group``."""
    group = make_group(env_id, 1, lambda slot, life: 0, **options)
    try:
        return group.spec
    finally:
        group.close()


def _gym(request: Request) -> EnvGroup:
    """Gymnasium ids: gym:CartPole-v1, or without the prefix."""
    if request.vectorization == "vector":
        return _vector(request)
    return _single(request, lambda: _make_by_id(request))


def _vector(request: Request) -> EnvGroup:
    """Gymnasium ids as one vector environment: vector:CartPole-v1."""

    def make() -> gym.vector.VectorEnv:
        limit: dict[str, Any] = (
            {} if request.max_episode_steps is None else {"max_episode_steps": request.max_episode_steps}
        )
        return gym.make_vec(request.target, num_envs=request.num_slots, **limit, **request.kwargs)

    return _vectorised(request, lambda: resolve.by_id(request.env_id, request.target, make))


def _envpool(request: Request) -> EnvGroup:
    """EnvPool's C++ environments: envpool:Pong-v5."""
    return EnvPoolGroup(
        request.target,
        request.num_slots,
        request.seed_of,
        kwargs=request.kwargs,
        max_episode_steps=request.max_episode_steps,
        num_threads=request.num_threads,
        first_slot=request.first_slot,
    )


def _single(request: Request, make: Callable[[], Any]) -> EnvGroup:
    _no_threads(request)

    def checked() -> gym.Env:
        with resolve.translated(request.env_id, request.kwargs):
            env = make()
        if isinstance(env, gym.Env):
            return env
        hint = " Use vectorization='vector'." if isinstance(env, gym.vector.VectorEnv) else ""
        raise EnvironmentFailure(
            f"env {request.env_id}: got a {type(env).__name__}; expected a gymnasium.Env.{hint}"
        )

    return GymGroup(
        checked,
        request.num_slots,
        request.seed_of,
        name=request.env_id,
        step_timeout_s=request.step_timeout_s,
        first_slot=request.first_slot,
    )


def _vectorised(request: Request, make: Callable[[], Any]) -> EnvGroup:
    _no_threads(request)
    with resolve.translated(request.env_id, request.kwargs):
        env = make()
    if not isinstance(env, gym.vector.VectorEnv) or env.num_envs != request.num_slots:
        raise EnvironmentFailure(
            f"env {request.env_id}: got a {type(env).__name__} of {getattr(env, 'num_envs', 'no')} "
            "environments; "
            f"expected a gymnasium.vector.VectorEnv of num_envs={request.num_slots}"
        )
    try:
        return VectorGroup(env, request.seed_of, name=request.env_id, first_slot=request.first_slot)
    except BaseException:
        env.close()
        raise


def _no_threads(request: Request) -> None:
    if request.num_threads:
        raise ConfigError(
            f"got num_threads={request.num_threads} for env {request.env_id}; only envpool: environments "
            "have threads "
            "of their own. Leave it 0."
        )


def _make_by_id(request: Request) -> gym.Env:
    # Gymnasium's checker warns and costs time on every step; the group checks what it relies on itself.
    def make() -> gym.Env:
        return gym.make(
            request.target,
            max_episode_steps=request.max_episode_steps,
            disable_env_checker=True,
            **request.kwargs,
        )

    return resolve.by_id(request.env_id, request.target, make)


def _from_module(request: Request) -> EnvGroup:
    """``module:attribute``, or Gymnasium's ``module:Env-v0``."""
    module_name, _, attribute = request.target.partition(":")
    with resolve.translated(request.env_id, request.kwargs), resolve.cwd_importable():
        module = resolve.import_module(request.env_id, module_name, prefixes())
    function = getattr(module, attribute, None)
    if function is None:
        if attribute not in gym.registry and not re.search(r"-v\d+$", attribute):
            names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise EnvironmentIdError(
                f"module {module_name} has no {attribute!r} and registers no environment of that name; "
                f"{resolve.nearest(attribute, names + list(gym.registry))}"
            )
        return _gym(request)
    if not callable(function):
        raise EnvironmentIdError(
            f"{request.env_id} is a {type(function).__name__}; expected a callable that makes an environment"
        )
    if request.vectorization == "vector" or "num_envs" in inspect.signature(function).parameters:
        if request.max_episode_steps is not None:
            raise ConfigError(
                f"env {request.env_id}: max_episode_steps={request.max_episode_steps} cannot be set on a "
                "vector "
                "environment made by a callable; give it as the callable's own argument"
            )
        return _vectorised(request, lambda: function(num_envs=request.num_slots, **request.kwargs))
    return _single(request, lambda: _limited(function(**request.kwargs), request.max_episode_steps))


def _limited(env: Any, max_episode_steps: int | None) -> Any:
    if max_episode_steps is None or not isinstance(env, gym.Env):
        return env
    return gym.wrappers.TimeLimit(env, max_episode_steps)


for _prefix, _factory in {"gym": _gym, "vector": _vector, "envpool": _envpool}.items():
    register(_prefix, _factory)
