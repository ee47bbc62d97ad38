"""Normal distributions over a Box, clipped into it or squashed by tanh; one leaf of an action spec each."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from headrace import spaces
from headrace.errors import UnsupportedSpaceError
from headrace.ops.families import Distribution, flat, mask_nothing
from headrace.spaces import BoxSpec
from headrace.types import Array

MIN_STD = 1e-4
"""Floor of every normal's standard deviation (log σ ≥ −9.2)."""

MAX_STD_SQUASHED = math.exp(2.0)
"""Cap of σ before tanh: wider only piles mass on both bounds."""

MAX_STD_CLIPPED = math.exp(10.0)
"""Cap of σ in environment units: a guard against overflow only."""

_RAW_STD_SHIFT = math.log(math.expm1(1.0 - MIN_STD))
"""Makes a raw parameter of 0 mean σ = 1."""

_MAX_UNIT = 1.0 - 2.0**-24
"""Largest |u| that ``from_env`` inverts; ``arctanh`` of it is 8.66."""

# Equally spaced nodes converge faster than Gauss-Hermite's here: log(1 − tanh²) has poles next to the real
# axis. Against dense integration 33 nodes over ±5.5 σ err by < 1e-6 for σ ≤ 2 and by 0.013 at most at the
# cap.
_NODES = np.linspace(-5.5, 5.5, 33).astype(np.float32)
_NODE_WEIGHTS = (np.exp(-0.5 * _NODES**2) / np.exp(-0.5 * _NODES**2).sum()).astype(np.float32)


def normal_params(params: Array, max_std: float) -> tuple[Array, Array]:
    """Mean and std ``[.., D]`` of a normal head ``[.., 2D]`` = (means, raw parameters of the std).

        σ = min(MIN_STD + softplus(raw + shift), max_std),   shift such that raw = 0 gives σ = 1

    Softplus rather than exp, so that a large raw value cannot explode; at the cap the gradient of ``raw`` is
    0.
    """
    mean, raw = jnp.split(jnp.asarray(params, jnp.float32), 2, axis=-1)
    return mean, jnp.minimum(MIN_STD + jax.nn.softplus(raw + _RAW_STD_SHIFT), max_std)


def normal(leaf: BoxSpec, path: str, *, squash: bool) -> Distribution:
    """Independent normals over a box, P = 2·dimensions; see ``distributions`` for the coordinates."""
    _refuse(leaf, path, squash)
    max_std = MAX_STD_SQUASHED if squash else MAX_STD_CLIPPED

    def shaped(x: Array) -> Array:
        return x.reshape(*x.shape[:-1], *leaf.shape)

    def sample(params: Array, key: Array) -> Array:
        mean, std = normal_params(params, max_std)
        return shaped(mean + std * jax.random.normal(key, mean.shape, jnp.float32))

    def log_prob(params: Array, action: Array) -> Array:
        mean, std = normal_params(params, max_std)
        x = flat(action, leaf.shape).astype(jnp.float32)
        log_density = -0.5 * jnp.square((x - mean) / std) - jnp.log(std) - 0.5 * math.log(2 * math.pi)
        return (log_density - log_det_tanh(x) if squash else log_density).sum(-1)

    def entropy(params: Array) -> Array:
        mean, std = normal_params(params, max_std)
        of_normal = jnp.log(std) + 0.5 * math.log(2 * math.pi * math.e)
        return (of_normal + _expected_log_det(mean, std) if squash else of_normal).sum(-1)

    def kl(params_p: Array, params_q: Array) -> Array:
        (mean_p, std_p), (mean_q, std_q) = normal_params(params_p, max_std), normal_params(params_q, max_std)
        # expm1 keeps the small differences that a trust region in σ (1e-6) is about.
        log_ratio = jnp.log(std_p) - jnp.log(std_q)
        return 0.5 * (jnp.expm1(2 * log_ratio) - 2 * log_ratio + jnp.square((mean_p - mean_q) / std_q)).sum(
            -1
        )

    def to_env(action: Array) -> Array:
        xp = spaces.namespace(action)
        x = _wide(action)
        return _round_into(leaf, squashed_to_box(leaf, xp.tanh(x)) if squash else x)

    def from_env(value: Array) -> np.ndarray:
        raw = np.asarray(value, np.float64)
        if not np.isfinite(raw).all():
            raise ValueError(f"{path}: a foreign action holds NaN or infinity; drop that row")
        if squash:
            raw = np.arctanh(np.clip(box_to_squashed(leaf, raw, path), -_MAX_UNIT, _MAX_UNIT))
        return raw.astype(np.float32)

    return Distribution(
        size=2 * math.prod(leaf.shape),
        sample=sample,
        mode=lambda params: shaped(normal_params(params, max_std)[0]),
        log_prob=log_prob,
        entropy=entropy,
        kl=kl,
        to_env=to_env,
        from_env=from_env,
        zeros=lambda batch=(): np.zeros((*batch, *leaf.shape), np.float32),
        mask=mask_nothing,
    )


def log_det_tanh(x: Array) -> Array:
    """log(1 − tanh²x) = 2·(ln 2 − x − softplus(−2x)), exact where 1 − tanh² underflows."""
    return 2.0 * (math.log(2.0) - x - jax.nn.softplus(-2.0 * x))


def _expected_log_det(mean: Array, std: Array) -> Array:
    nodes, weights = (x.reshape((1,) * mean.ndim + (-1,)) for x in (_NODES, _NODE_WEIGHTS))
    return (weights * log_det_tanh(mean[..., None] + std[..., None] * nodes)).sum(-1)


def squashed_to_box(leaf: BoxSpec, u: Array) -> Array:
    """From u in [−1, 1] to low + (u+1)/2·(high−low), per dimension, float64 (float32 where JAX traces)."""
    w = (_wide(u) + 1.0) / 2.0
    return _wide(leaf.low, w) * (1.0 - w) + _wide(leaf.high, w) * w


def _wide(value: Array, like: Array | None = None) -> Array:
    """In the widest float type there is where ``like`` (or ``value``) is computed."""
    xp = spaces.namespace(value if like is None else like)
    return xp.asarray(value, np.float64 if xp is np else np.float32)


def box_to_squashed(leaf: BoxSpec, value: Array, path: str = "action") -> np.ndarray:
    """Inverse of ``squashed_to_box``; 0 where a dimension has low = high.

    Raises:
        ValueError: a value outside the box by more than rounding.
    """
    low, high = leaf.low.astype(np.float64), leaf.high.astype(np.float64)
    value, half = np.asarray(value, np.float64), high / 2 - low / 2
    u = (value - (low / 2 + high / 2)) / np.where(half > 0, half, 1.0)
    if (np.abs(u) > 1.0 + 1e-5).any():
        raise ValueError(
            f"{path}: a foreign action lies outside its box (scaled to [-1, 1] it reaches "
            f"{np.abs(u).max():.6g}); clip the data to the action space first"
        )
    return np.clip(u, -1.0, 1.0)


def _round_into(leaf: BoxSpec, value: Array) -> Array:
    return spaces.to_env(leaf, value if leaf.env_dtype.kind == "f" else spaces.namespace(value).rint(value))


def _refuse(leaf: BoxSpec, path: str, squash: bool) -> None:
    if squash and not leaf.bounded:
        raise UnsupportedSpaceError(
            f"{path} is a Box with infinite bounds, which tanh_normal cannot be scaled to; use "
            "box='clipped_normal' (an agent that does not squash), or give it finite bounds with "
            "gymnasium.wrappers.TransformAction"
        )
    bounds = (*leaf.low.flat, *leaf.high.flat) if leaf.env_dtype.kind in "iu" else ()
    if any(abs(int(x)) > 2**24 for x in bounds):
        raise UnsupportedSpaceError(
            f"{path} is a Box of {leaf.env_dtype} with bounds beyond ±2**24, which float32 cannot count; "
            "expected narrower bounds or a float Box (gymnasium.wrappers.TransformAction)"
        )
