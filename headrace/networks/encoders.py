"""Encoders of a user's own: which leaf of the observation goes to which, and whether they fit it.

An encoder is made by ``make(leaf, context, rngs)``, a module with ``out_features``. It takes ``[rows, *leaf.shape]`` in
the agent's type (uint8 images stay uint8), or ``[rows, context + 1, *leaf.shape]`` where frames are stacked, and gives
floats ``[rows, out_features]``.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from headrace.errors import ConfigError
from headrace.references import load_function
from headrace.settings.fields import nearest
from headrace.spaces import Leaf, Spec, names

MakeEncoder: TypeAlias = Callable[[Leaf, int, nnx.Rngs], nnx.Module]
"""``(leaf, context, rngs) -> module``; a class whose constructor takes these is one."""
Encoders: TypeAlias = Mapping[str | Callable[[Leaf], bool], MakeEncoder]
"""By the name of a leaf (``arm.0``, as in ``spaces.names``), or by a predicate over leaves."""


def loaded(references: Mapping[str, str]) -> Encoders:
    """``encoders`` of the settings: each ``my.module:name`` replaced by what it names.

    Raises:
        ConfigError: there is no such thing.
    """
    return {name: load_function(reference) for name, reference in references.items()}


def assign(observation: Spec, encoders: Encoders) -> dict[str, MakeEncoder]:
    """The maker of each leaf that has one of its own, by name. A name goes before predicates, those in their order.

    Raises:
        ConfigError: no leaf has that name (the nearest is given), or none satisfies a predicate.
    """
    found = dict(names(observation))
    for key in encoders:
        if isinstance(key, str) and key not in found:
            there = ", ".join(map(repr, found))
            raise ConfigError(
                f"encoders: the observation has no part {key!r}{nearest(key, found)} There is {there}"
            )
        if not isinstance(key, str) and not any(key(leaf) for leaf in found.values()):
            raise ConfigError(f"encoders: no part of the observation satisfies {_name(key)}; leave it out")
    chosen: dict[str, MakeEncoder] = {}
    for name, leaf in found.items():
        fits = [make for key, make in encoders.items() if not isinstance(key, str) and key(leaf)]
        if name in encoders or fits:
            chosen[name] = encoders[name] if name in encoders else fits[0]
    return chosen


def make_checked(make: MakeEncoder, name: str, leaf: Leaf, context: int, rngs: nnx.Rngs) -> Any:
    """The encoder of a leaf, tried on two abstract rows.

    Raises:
        ConfigError: it cannot be made, fails on what it would see, or gives something else than its features.
    """
    who = f"the encoder {_name(make)} of observation {name!r}"
    stack = (context + 1,) if context else ()
    seen = jax.ShapeDtypeStruct((2, *stack, *leaf.shape), leaf.dtype)
    expected = "expected a module with an int out_features, made by (leaf, context, rngs)"
    try:
        module: Any = make(leaf, context, rngs)
        size = getattr(module, "out_features", None)
        if not isinstance(size, int) or not callable(module):
            raise ConfigError(f"{who} is a {type(module).__name__} with out_features={size!r}; {expected}")
        got: Any = jax.eval_shape(module, seen)
    except ConfigError:
        raise
    except Exception as exc:  # whatever a user's module raises
        text = f"{type(exc).__name__}: {exc}"
        raise ConfigError(f"{who} failed on {seen.dtype}{list(seen.shape)}: {text}; {expected}") from exc
    if getattr(got, "shape", None) != (2, size) or not jnp.issubdtype(got.dtype, jnp.floating):
        raise ConfigError(
            f"{who} gives {_form(got)} for {seen.dtype}{list(seen.shape)}; expected floats [2, {size}], as its "
            "out_features says"
        )
    return module


def _form(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else f"a {type(value).__name__}"


def _name(thing: Any) -> str:
    return getattr(thing, "__name__", None) or repr(thing)
