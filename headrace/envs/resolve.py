"""Finding what an environment's id names, and saying in one line what is wrong where it cannot be made."""

import contextlib
import difflib
import importlib
import importlib.util
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import gymnasium as gym

from headrace.envs.render import quieten_sdl
from headrace.errors import ConfigError, EnvironmentFailure, EnvironmentIdError, HeadraceError

# Packages whose import registers ids with Gymnasium: id's beginning -> (module, package on PyPI).
_FAMILIES = {
    "ALE/": ("ale_py", "ale-py"),
    "MiniGrid-": ("minigrid", "minigrid"),
    "BabyAI-": ("minigrid", "minigrid"),
    "Fetch": ("gymnasium_robotics", "gymnasium-robotics"),
    "Hand": ("gymnasium_robotics", "gymnasium-robotics"),
    "highway-": ("highway_env", "highway-env"),
    "parking-": ("highway_env", "highway-env"),
    "dm_control/": ("shimmy", '"shimmy[dm-control]"'),
}


def by_id(env_id: str, target: str, make: Callable[[], Any]) -> Any:
    """``make()`` an environment of a Gymnasium id, having imported the package its family is registered by.

    Raises:
        EnvironmentIdError: no such id, or its package is missing.
    """
    family = next((v for k, v in _FAMILIES.items() if target.startswith(k)), None)
    if family and importlib.util.find_spec(family[0]):
        importlib.import_module(family[0])
    try:
        with cwd_importable():
            return make()
    except (gym.error.UnregisteredEnv, gym.error.DeprecatedEnv) as exc:
        if family and not importlib.util.find_spec(family[0]):
            raise EnvironmentIdError(
                f"env {env_id} comes with a package that is not installed; run: pip install {family[1]}"
            ) from exc
        raise EnvironmentIdError(f"no environment {env_id!r}; {nearest(target, gym.registry)}") from exc


def with_render_mode(make: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """``make(**kwargs)`` with ``render_mode="rgb_array"``, or as it is where the environment refuses that."""
    quieten_sdl()
    plain = {key: value for key, value in kwargs.items() if key != "render_mode"}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*render_mode")
            return make(**plain, render_mode="rgb_array")
    except AssertionError:  # Gymnasium's template asserts that it knows the mode
        return make(**plain)
    except TypeError as exc:
        if "unexpected keyword argument 'render_mode'" not in str(exc):
            raise
        return make(**plain)


def nearest(name: str, known: Any) -> str:
    """The known names most like ``name``, as the end of a message."""
    by_lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    return (
        f"nearest: {', '.join(by_lower[k] for k in near)}" if near else "`headrace list` names what there is"
    )


def as_json(env_id: str, kwargs: Mapping[str, Any]) -> str:
    """``kwargs`` as text, equal for equal ones: the key that what is made once is kept by.

    Raises:
        ConfigError: they are not JSON values.
    """
    try:
        return json.dumps(kwargs, sort_keys=True)
    except TypeError as exc:
        raise ConfigError(f"env {env_id}: got kwargs {kwargs}; expected JSON values ({exc})") from exc


def import_module(env_id: str, module_name: str, prefixes: Iterable[str]) -> Any:
    """Import the module of ``module:attribute``.

    Raises:
        EnvironmentIdError: there is no such module; a module missing *within* it is left to ``translated``.
    """
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        missing = exc.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise EnvironmentIdError(
                f"env {env_id}: there is no module {missing!r} in {os.getcwd()} or on Python's "
                "path; expected "
                f"a Gymnasium id, module:callable, or one of the prefixes {', '.join(prefixes)}"
            ) from exc
        raise


@contextlib.contextmanager
def cwd_importable() -> Iterator[None]:
    """Let modules of the working directory be imported."""
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


@contextlib.contextmanager
def translated(env_id: str, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Whatever making an environment raises, as an error a user can read in one line."""
    try:
        yield
    except HeadraceError:
        raise
    except gym.error.DependencyNotInstalled as exc:
        raise EnvironmentIdError(f"env {env_id}: {' '.join(str(exc).split())}") from exc
    except ModuleNotFoundError as exc:
        raise EnvironmentIdError(
            f"env {env_id} needs the module {exc.name!r}, which is not installed; run: pip install {exc.name}"
        ) from exc
    except Exception as exc:  # whatever a user's constructor raises
        refused = re.search(r"unexpected keyword argument '(\w+)'", str(exc))
        if isinstance(exc, TypeError) and refused and refused[1] in kwargs:
            raise ConfigError(f"env {env_id} takes no setting {refused[1]!r}; got {dict(kwargs)}") from exc
        raise EnvironmentFailure(
            f"env {env_id}: making it raised {type(exc).__name__}: {' '.join(str(exc).split())}"
        ) from exc
