"""From an environment's id to a group of its environments.

| id | what it is |
|---|---|
| ``CartPole-v1`` | a Gymnasium id; ``module:Env-v0`` imports the module that registers it first |
| ``my_file:make_env`` | a callable of an importable module (the working directory counts as importable) |
| ``prefix:rest`` | ``rest`` is made by the prefix's factory: ``gym:``, ``vector:``, ``envpool:``, ``gymnax:``, or
one that was registered |
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym

from headrace.envs import resolve
from headrace.envs.contract import EnvGroup, EnvSpec
from headrace.envs.envpool import EnvPoolGroup
from headrace.envs.failures import Budget
from headrace.envs.gym import GymGroup
from headrace.envs.gym_vector import VectorGroup
from headrace.envs.jax_env import JaxEnv, makes_jax_env
from headrace.envs.pool.group import PoolGroup
from headrace.envs.pool.probe import Probe, probe
from headrace.envs.request import Request as Request
from headrace.envs.request import Vectorization
from headrace.errors import ConfigError, EnvironmentFailure, EnvironmentIdError

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


def make_group(env_id: str, num_slots: int, seed_of: Callable[[int, int], int], **options: Any) -> EnvGroup:
    """Make a group of ``num_slots`` environments; arguments and options as in ``Request``.

    Raises:
        EnvironmentIdError: no environment goes by that id, or its package is missing.
        UnsupportedSpaceError: a space the system cannot carry.
        ConfigError: a setting the environment does not take.
        EnvironmentFailure: the environment could not be made or reset; its error is the cause.
    """
    request = Request(env_id, env_id, num_slots, seed_of, **options)
    group = _make(request)
    if request.action_mask is not None and not group.spec.extra:
        group.close()
        raise ConfigError(
            f"env {env_id}: its {type(group).__name__} gives no action masks; leave out env.action_mask"
        )
    return group


def single_of(
    env_id: str, kwargs: Mapping[str, Any] = {}, max_episode_steps: int | None = None
) -> Callable[[], gym.Env] | None:
    """What makes each of the single environments of a group; None where a group has none.

    Raises:
        HeadraceError: as ``make_group``; errors of the environments themselves are raised by what is returned.
    """
    kept: list[Callable[[], gym.Env]] = []

    def keep(make_env: Callable[[], gym.Env], *_: Any, **__: Any) -> None:
        kept.append(make_env)

    request = Request(
        env_id, env_id, 1, _no_seed, kwargs, max_episode_steps=max_episode_steps, drive_single=keep
    )
    group = _make(request)
    if kept:
        return kept[0]
    group.close()
    return None


def describe(env_id: str, **options: Any) -> EnvSpec:
    """What an environment looks like: makes one, reads its spec, closes it. Options as of ``make_group``."""
    request = Request(env_id, env_id, 1, _no_seed, **options)
    if request.workers:
        return probe(_pooled(request)).spec
    group = _make(request)
    try:
        return group.spec
    finally:
        group.close()


def measure(env_id: str, **options: Any) -> Probe:
    """As ``describe``, in a process of its own, with the time that a step takes."""
    return probe(_pooled(Request(env_id, env_id, 1, _no_seed, **options | {"workers": 1})), measure=True)


def steps_in_thread(env_id: str, vectorization: Vectorization = "single") -> bool:
    """Whether an environment is stepped in the caller's thread unless the user says otherwise.

    That is for environments that are known to be quick and well behaved, and for those that come as one for many slots.
    """
    prefix, colon, rest = env_id.partition(":")
    if vectorization == "vector" or (colon and prefix in _FACTORIES and prefix != "gym"):
        return True
    if prefix == "__main__" or prefix.startswith("headrace."):
        return True
    if colon and prefix != "gym":
        function = _attribute(env_id)
        return function is not None and _makes_many(function)
    entry = getattr(gym.registry.get(rest or env_id), "entry_point", None)
    return isinstance(entry, str) and entry.startswith(_QUICK)


def _makes_many(function: Callable[..., Any]) -> bool:
    return makes_jax_env(function) or "num_envs" in inspect.signature(function).parameters


_QUICK = ("gymnasium.envs.classic_control", "gymnasium.envs.toy_text", "gymnasium.envs.tabular")


def _no_seed(slot: int, life: int) -> int:
    return 0


def _make(request: Request) -> EnvGroup:
    prefix, colon, rest = request.env_id.partition(":")
    if request.workers:
        return PoolGroup(_pooled(request))
    if colon and prefix in _FACTORIES:
        return _FACTORIES[prefix](replace(request, target=rest))
    return _from_module(request) if colon else _gym(request)


def _pooled(request: Request) -> Request:
    """The request, where its environments can be stepped in processes."""
    prefix, colon, rest = request.env_id.partition(":")
    known = prefix in _FACTORIES or prefix == "__main__"
    many = colon and (known or makes_jax_env(_attribute(request.env_id)))
    refused = request.vectorization == "vector" or (many and prefix != "gym")
    if refused or prefix == "__main__":
        why = (
            "__main__ is another module in them" if prefix == "__main__" else "it comes as one for many slots"
        )
        raise ConfigError(
            f"got workers={request.workers} for env {request.env_id}, which cannot be stepped in worker processes: {why}; "
            "leave env.workers out or set it 0"
        )
    return replace(request, target=rest) if colon and prefix == "gym" else request


def single_maker(request: Request) -> Callable[[], gym.Env]:
    """What makes one environment of a request for Gymnasium environments."""
    prefix, colon, rest = request.env_id.partition(":")
    if not colon or prefix == "gym":
        target = replace(request, target=rest if colon else request.env_id)
        return _checked(target, lambda: _make_by_id(target))
    function = _attribute(request.env_id)
    if function is None:
        return _checked(request, lambda: _make_by_id(request))
    make = _drawing(request, function)
    return _checked(request, lambda: _limited(make(), request.max_episode_steps))


def _gym(request: Request) -> EnvGroup:
    """Gymnasium ids: gym:CartPole-v1, or without the prefix."""
    if request.vectorization == "vector":
        return _vector(request)
    return _single(request)


def _vector(request: Request) -> EnvGroup:
    """Gymnasium ids as one vector environment: vector:CartPole-v1."""

    def make(**kwargs: Any) -> gym.vector.VectorEnv:
        limit: dict[str, Any] = (
            {} if request.max_episode_steps is None else {"max_episode_steps": request.max_episode_steps}
        )
        return gym.make_vec(request.target, num_envs=request.num_slots, **limit, **kwargs)

    return _vectorised(
        request, lambda: resolve.by_id(request.env_id, request.target, _drawing(request, make))
    )


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
        render=request.render,
        action_mask=request.action_mask,
    )


def _gymnax(request: Request) -> EnvGroup:
    """JAX environments of gymnax, stepped in one program with the policy: gymnax:Catch-bsuite."""
    from headrace.envs import gymnax

    return _jax(request, lambda: gymnax.make(request.target, request.kwargs, request.max_episode_steps))


def _jax(request: Request, make: Callable[[], Any]) -> EnvGroup:
    from headrace.envs.jax_group import JaxGroup  # here, because it imports JAX

    _no_threads(request)
    refused = {
        "vectorization": request.vectorization != "single",
        "batch_size": request.batch_size not in (None, request.num_slots),
        "on_bad_value": request.on_bad_value != "error",
        "bounds": request.bounds == "error",
    }
    for option in (name for name, wrong in refused.items() if wrong):
        raise ConfigError(
            f"env {request.env_id}: got {option}={getattr(request, option)!r}; leave it out: the slots of a JAX environment "
            "are one batch on the device, and nothing looks into a single one there"
        )
    with resolve.translated(request.env_id, request.kwargs):
        env = make()
        if not isinstance(env, JaxEnv):
            raise EnvironmentFailure(
                f"env {request.env_id}: got a {type(env).__name__}; expected the JaxEnv that its annotation says"
            )
        return JaxGroup(
            env,
            request.num_slots,
            request.seed_of,
            name=request.env_id,
            max_episode_steps=request.max_episode_steps,
            first_slot=request.first_slot,
        )


@functools.lru_cache(maxsize=16)
def _made_once(function: Callable[..., JaxEnv], kwargs: str) -> JaxEnv:
    """So that the groups of a run share what is compiled for it."""
    return function(**json.loads(kwargs))


def _single(request: Request) -> EnvGroup:
    _no_threads(request)
    if request.batch_size not in (None, request.num_slots):
        raise ConfigError(
            f"got batch_size={request.batch_size} for env {request.env_id}, whose {request.num_slots} slots are stepped one "
            "after the other; expected None. It is for worker processes and EnvPool."
        )
    return (request.drive_single or GymGroup)(
        single_maker(request),
        request.num_slots,
        request.seed_of,
        name=request.env_id,
        first_slot=request.first_slot,
        budget=Budget(request.num_slots, request.max_restarts),
        on_bad_value=request.on_bad_value,
        bounds=request.bounds,
        action_mask=request.action_mask,
    )


def _checked(request: Request, make: Callable[[], Any]) -> Callable[[], gym.Env]:
    def checked() -> gym.Env:
        with resolve.translated(request.env_id, request.kwargs):
            env = make()
        if isinstance(env, gym.Env):
            return env
        hint = " Use vectorization='vector'." if isinstance(env, gym.vector.VectorEnv) else ""
        if isinstance(env, JaxEnv):
            hint = " Annotate its function with `-> JaxEnv`, by which it is known before it is called."
        raise EnvironmentFailure(
            f"env {request.env_id}: got a {type(env).__name__}; expected a gymnasium.Env.{hint}"
        )

    return checked


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
        return VectorGroup(
            env,
            request.seed_of,
            name=request.env_id,
            first_slot=request.first_slot,
            action_mask=request.action_mask,
        )
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
    def make(**kwargs: Any) -> gym.Env:
        return gym.make(
            request.target, max_episode_steps=request.max_episode_steps, disable_env_checker=True, **kwargs
        )

    return resolve.by_id(request.env_id, request.target, _drawing(request, make))


def _drawing(request: Request, make: Callable[..., Any]) -> Callable[[], Any]:
    """``make`` with the request's kwargs, and ready to draw where that is asked for and it can."""
    if not request.render:
        return lambda: make(**request.kwargs)
    return lambda: resolve.with_render_mode(make, request.kwargs)


def _attribute(env_id: str) -> Callable[..., Any] | None:
    """The callable that ``module:attribute`` names; None where it is Gymnasium's ``module:Env-v0``.

    Raises:
        EnvironmentIdError: there is no such module, or it has nothing of that name.
    """
    module_name, _, attribute = env_id.partition(":")
    with resolve.translated(env_id, {}), resolve.cwd_importable():
        module = resolve.import_module(env_id, module_name, prefixes())
    function = getattr(module, attribute, None)
    if function is None:
        if attribute in gym.registry or re.search(r"-v\d+$", attribute):
            return None
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise EnvironmentIdError(
            f"module {module_name} has no {attribute!r} and registers no environment of that name; "
            f"{resolve.nearest(attribute, names + list(gym.registry))}"
        )
    if not callable(function):
        raise EnvironmentIdError(
            f"{env_id} is a {type(function).__name__}; expected a callable that makes an environment"
        )
    return function


def _from_module(request: Request) -> EnvGroup:
    """``module:attribute``, or Gymnasium's ``module:Env-v0``."""
    function = _attribute(request.env_id)
    if function is None:
        return _gym(request)
    if makes_jax_env(function):
        kwargs = resolve.as_json(request.env_id, request.kwargs)
        return _jax(request, lambda: _made_once(function, kwargs))
    if request.vectorization == "vector" or "num_envs" in inspect.signature(function).parameters:
        if request.max_episode_steps is not None:
            raise ConfigError(
                f"env {request.env_id}: max_episode_steps={request.max_episode_steps} cannot be set on a "
                "vector "
                "environment made by a callable; give it as the callable's own argument"
            )
        return _vectorised(request, _drawing(request, partial(function, num_envs=request.num_slots)))
    return _single(request)


def _limited(env: Any, max_episode_steps: int | None) -> Any:
    if max_episode_steps is None or not isinstance(env, gym.Env):
        return env
    return gym.wrappers.TimeLimit(env, max_episode_steps)


for _prefix, _factory in {"gym": _gym, "vector": _vector, "envpool": _envpool, "gymnax": _gymnax}.items():
    register(_prefix, _factory)
