"""What the learner makes of a reward. Returns are always reported raw, the result as ``return_train``."""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from headrace.errors import ConfigError
from headrace.types import Array

RewardKind = Literal["none", "abs_one", "soft_asymmetric", "max_abs"]


def reward_transform(kind: RewardKind, max_abs: float | None = None) -> Callable[[Array], Array]:
    """A function of rewards of any shape, NumPy in NumPy out, JAX in JAX out; NaN stays NaN.

        none:             r
        abs_one:          clip(r, −1, 1)                                     (Mnih et al. 2015)
        soft_asymmetric:  5·tanh(r/5) for r ≥ 0, 0.3 · 5·tanh(r/5) for r < 0   (Espeholt et al. 2018, DMLab)
        max_abs:          clip(r, −max_abs, max_abs)

    Args:
        kind: which.
        max_abs: the bound, > 0; for ``max_abs`` alone.

    Raises:
        ConfigError: an unknown kind; ``max_abs`` missing, not positive and finite, or given to another kind.
    """
    if kind not in get_args(RewardKind):
        raise ConfigError(
            f"reward transform {kind!r} is unknown; expected one of {list(get_args(RewardKind))}"
        )
    if (max_abs is not None) != (kind == "max_abs"):
        raise ConfigError(
            f"got kind {kind!r} with max_abs={max_abs}; max_abs belongs to kind 'max_abs', which needs it"
        )
    match kind:
        case "none":
            return lambda reward: reward
        case "soft_asymmetric":
            return _soft_asymmetric
        case "abs_one":
            return _clip_to(1.0)
    assert max_abs is not None
    if not 0.0 < max_abs < math.inf:
        raise ConfigError(f"max_abs={max_abs}; expected a positive finite bound")
    return _clip_to(max_abs)


def _module(reward: Array) -> Any:
    return jnp if isinstance(reward, jax.Array) else np  # tracers are jax.Array too


def _soft_asymmetric(reward: Array) -> Array:
    xp = _module(reward)
    squeezed = xp.tanh(reward / 5.0) * 5.0
    return xp.where(reward < 0, 0.3 * squeezed, squeezed)


def _clip_to(bound: float) -> Callable[[Array], Array]:
    return lambda reward: _module(reward).clip(reward, -bound, bound)
