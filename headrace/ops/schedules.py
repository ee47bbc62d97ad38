"""Schedules: functions of ``Progress`` giving an f32 scalar, usable inside jit.

With f the learned fraction clipped to [0, 1] and t = clip(f / end_fraction, 0, 1):

    constant:     start
    linear:       start·(1−t) + end·t
    cosine:       end + (start−end)·(1 + cos πt)/2
    exponential:  start^(1−t) · end^t

Every value lies between ``start`` and ``end``, and is exactly ``end`` from ``end_fraction`` on. A warm-up
multiplies by min(1, f / warmup_fraction): from 0, as a learning rate wants it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from headrace.errors import ConfigError
from headrace.types import Progress

Schedule: TypeAlias = Callable[[Progress], jax.Array]
ScheduleKind = Literal["constant", "linear", "cosine", "exponential"]


@dataclass(frozen=True)
class ScheduleConfig:
    """A quantity that changes over the run.

    Attributes:
        kind: its shape.
        start: value at the beginning (after the warm-up).
        end: value from ``end_fraction`` on; not for ``constant``.
        end_fraction: part of the run after which ``end`` holds, in (0, 1].
        warmup_fraction: part of the run over which the value is also multiplied by 0 … 1, in [0, 1).
    """

    kind: ScheduleKind = "constant"
    start: float = 0.0
    end: float | None = None
    end_fraction: float = 1.0
    warmup_fraction: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ConfigError: says which field.
        """
        if self.kind not in get_args(ScheduleKind):
            raise ConfigError(
                f"schedule kind {self.kind!r} is unknown; expected one of {list(get_args(ScheduleKind))}"
            )
        if not all(math.isfinite(x) for x in (self.start, self.end or 0.0)):
            raise ConfigError(f"schedule start={self.start}, end={self.end}; expected finite numbers")
        if not 0.0 < self.end_fraction <= 1.0:
            raise ConfigError(
                f"schedule end_fraction={self.end_fraction}; expected a part of the run in (0, 1]"
            )
        if not 0.0 <= self.warmup_fraction < 1.0:
            raise ConfigError(
                f"schedule warmup_fraction={self.warmup_fraction}; expected a part of the run in [0, 1)"
            )
        if self.kind == "constant" and (self.end is not None or self.end_fraction != 1.0):
            raise ConfigError(
                "a constant schedule has no end and no end_fraction; set kind to linear, or drop them"
            )
        if self.kind != "constant" and self.end is None:
            raise ConfigError(f"a {self.kind} schedule needs an end; give it one, or set kind to constant")
        if self.kind == "exponential" and not (self.start > 0 and (self.end or 0.0) > 0):
            raise ConfigError(f"an exponential schedule needs start, end > 0; got {self.start}, {self.end}")


def make_schedule(config: ScheduleConfig) -> Schedule:
    """The schedule of a config; see the module docstring for the formulas."""
    low, high = sorted((config.start, config.start if config.end is None else config.end))

    def schedule(progress: Progress) -> jax.Array:
        fraction = jnp.clip(jnp.asarray(progress.fraction, jnp.float32), 0.0, 1.0)
        value = jnp.clip(_shape(config, jnp.minimum(fraction / config.end_fraction, 1.0)), low, high)
        if config.warmup_fraction:
            value = value * jnp.minimum(fraction / config.warmup_fraction, 1.0)
        return value

    return schedule


def _shape(config: ScheduleConfig, t: jax.Array) -> jax.Array:
    start, end = config.start, config.start if config.end is None else config.end
    match config.kind:
        case "constant":
            return jnp.full_like(t, start)
        case "linear":
            return start * (1.0 - t) + end * t
        case "cosine":
            # As a weighted sum, so that t = 1 gives ``end`` without rounding.
            w = 0.5 * (1.0 + jnp.cos(math.pi * t))
            return start * w + end * (1.0 - w)
        case "exponential":
            value = jnp.exp((1.0 - t) * math.log(start) + t * math.log(end))
            return jnp.where(t < 1.0, value, end)


def constant(value: float) -> Schedule:
    """``value``, always."""
    return make_schedule(ScheduleConfig("constant", value))


def linear(start: float, end: float, end_fraction: float = 1.0) -> Schedule:
    """A straight line from ``start`` to ``end``."""
    return make_schedule(ScheduleConfig("linear", start, end, end_fraction))


def cosine(start: float, end: float, end_fraction: float = 1.0) -> Schedule:
    """Half a cosine from ``start`` to ``end`` (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5)."""
    return make_schedule(ScheduleConfig("cosine", start, end, end_fraction))


def exponential(start: float, end: float, end_fraction: float = 1.0) -> Schedule:
    """A constant ratio per step from ``start`` to ``end``, both > 0."""
    return make_schedule(ScheduleConfig("exponential", start, end, end_fraction))
