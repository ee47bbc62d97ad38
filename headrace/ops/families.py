"""The record ``Distribution``, and the families over categories and bits: one leaf of an action spec each.

Every maker returns a ``Distribution`` over one leaf. All arithmetic is float32 whatever the parameters'
dtype, so a bf16 head gives finite results. Leading axes are written ``..``; an action leaf has shape
``[.., *leaf.shape]``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from headrace import spaces
from headrace.spaces import DiscreteSpec, MultiBinarySpec, MultiDiscreteSpec
from headrace.types import Array, PyTree

MASKED_LOGIT = -1e9
"""Logit of a forbidden category: probability exactly 0, yet finite, so that entropy and gradients stay
finite."""


@dataclass(frozen=True)
class Distribution:
    """A record of functions over flat parameters ``[.., size]`` and actions in the distribution's own
    coordinates.

    Own coordinates are int32 indices, int8 bits, and for boxes float32 raw (unclipped) or pre-tanh values.

    Attributes:
        size: P, the length of the parameter vector a network head produces.
        sample: ``(params [.., P], key) -> action [.., ...]``; the key is consumed.
        mode: ``params -> action``: the likeliest category or bit, the normal's mean (pre-tanh where
            squashed).
        log_prob: ``(params, action) -> f32 [..]``.
        entropy: ``params -> f32 [..]``, in nats and in the coordinates of ``log_prob``.
        kl: ``(params_p, params_q) -> f32 [..]``, KL(p‖q).
        to_env: ``action -> action`` in the environment's coordinates and dtype; NumPy.
        from_env: its inverse for foreign data, up to clipping, rounding and saturation; NumPy. Raises
            ``ValueError`` on values outside the space.
        zeros: ``batch axes -> action`` of zeros with the dtypes and shapes of ``sample``; NumPy.
        mask: ``(params, mask) -> params [.., P]`` f32 under which what the mask forbids has probability 0 (see
            ``mask_logits``); masks as ``envs.masks`` gives them: bool ``[.., n]`` for each leaf of categories,
            ``()`` for others.
    """

    size: int
    sample: Callable[[Array, Array], PyTree]
    mode: Callable[[Array], PyTree]
    log_prob: Callable[[Array, PyTree], Array]
    entropy: Callable[[Array], Array]
    kl: Callable[[Array, Array], Array]
    to_env: Callable[[PyTree], PyTree]
    from_env: Callable[[PyTree], PyTree]
    zeros: Callable[..., PyTree]
    mask: Callable[[Array, PyTree], Array]


def mask_logits(params: Array, mask: Array) -> Array:
    """Logits with the forbidden categories ruled out.

    The masked parameters go to ``sample``, ``mode``, ``log_prob``, ``entropy`` and ``kl`` as any others;
    apply the stored mask in learning as in acting. Forbidden categories get probability 0 and gradient 0;
    entropy stays finite. Where everything is forbidden the result is uniform. The KL to a distribution
    under a *narrower* mask is finite but about 1e9.

    Args:
        params: logits ``[.., n]``.
        mask: bool or 0/1 ``[.., n]``, true where allowed.

    Returns:
        f32 ``[.., n]``.

    Raises:
        ValueError: shapes differ.
    """
    params, mask = jnp.asarray(params, jnp.float32), jnp.asarray(mask).astype(bool)
    if params.shape != mask.shape:
        raise ValueError(f"got logits {params.shape} and a mask {mask.shape}; expected equal shapes [.., n]")
    return jnp.where(mask, params, MASKED_LOGIT)


def mask_nothing(params: Array, mask: PyTree) -> Array:
    """The ``mask`` of families without categories.

    Raises:
        ValueError: ``mask`` is anything but ().
    """
    if not (isinstance(mask, tuple) and not mask):
        raise ValueError("got a mask for a Box or MultiBinary; expected (): only categories can be masked")
    return jnp.asarray(params, jnp.float32)


def categorical(leaf: DiscreteSpec | MultiDiscreteSpec) -> Distribution:
    """Independent categories, parameters are the logits of each in turn (sizes may differ); P = Σ nvec."""
    nvec = (leaf.n,) if isinstance(leaf, DiscreteSpec) else leaf.nvec
    widest, starts = max(nvec), np.cumsum((0, *nvec[:-1]))
    # Shorter rows are padded with some logit of another row, which the mask then hides.
    index = np.minimum(starts[:, None] + np.arange(widest), sum(nvec) - 1)
    mask = np.arange(widest) < np.asarray(nvec)[:, None]

    def logits(params: Array) -> Array:
        params = jnp.asarray(params, jnp.float32)
        if mask.all():
            return params.reshape(*params.shape[:-1], len(nvec), widest)
        table = params[..., index]
        return jnp.where(jnp.broadcast_to(mask, table.shape), table, MASKED_LOGIT)

    def log_probs(params: Array) -> Array:
        return jax.nn.log_softmax(logits(params), axis=-1)

    def shaped(indices: Array) -> Array:
        return indices.astype(jnp.int32).reshape(*indices.shape[:-1], *leaf.shape)

    def log_prob(params: Array, action: Array) -> Array:
        action = jnp.asarray(action)
        rows = action.reshape(*batch_axes(action, leaf.shape), len(nvec), 1)
        return jnp.take_along_axis(log_probs(params), rows, axis=-1)[..., 0].sum(-1)

    def kl(params_p: Array, params_q: Array) -> Array:
        p, q = log_probs(params_p), log_probs(params_q)
        return (jnp.exp(p) * (p - q)).sum((-2, -1))

    def entropy(params: Array) -> Array:
        p = log_probs(params)
        return -(jnp.exp(p) * p).sum((-2, -1))

    return Distribution(
        size=sum(nvec),
        sample=lambda params, key: shaped(jax.random.categorical(key, logits(params), axis=-1)),
        mode=lambda params: shaped(jnp.argmax(logits(params), axis=-1)),
        log_prob=log_prob,
        entropy=entropy,
        kl=kl,
        to_env=lambda action: spaces.to_env(leaf, action),
        from_env=lambda value: _checked_indices(leaf, value, np.reshape(nvec, leaf.shape)),
        zeros=lambda batch=(): np.zeros((*batch, *leaf.shape), np.int32),
        mask=mask_logits,
    )


def bernoulli(leaf: MultiBinarySpec) -> Distribution:
    """Independent bits, parameters are the logits of each being 1; P = number of bits."""
    size = math.prod(leaf.shape)

    def log_odds(params: Array) -> tuple[Array, Array, Array]:
        params = jnp.asarray(params, jnp.float32)
        return params, -jax.nn.softplus(-params), -jax.nn.softplus(params)

    def shaped(bits: Array) -> Array:
        return bits.astype(jnp.int8).reshape(*bits.shape[:-1], *leaf.shape)

    def sample(params: Array, key: Array) -> Array:
        return shaped(jax.random.bernoulli(key, jax.nn.sigmoid(jnp.asarray(params, jnp.float32))))

    def log_prob(params: Array, action: Array) -> Array:
        _, log_1, log_0 = log_odds(params)
        return jnp.where(flat(action, leaf.shape) > 0, log_1, log_0).sum(-1)

    def expected(params: Array, value_1: Array, value_0: Array) -> Array:
        return (jax.nn.sigmoid(params) * value_1 + jax.nn.sigmoid(-params) * value_0).sum(-1)

    def kl(params_p: Array, params_q: Array) -> Array:
        (logits, p_1, p_0), (_, q_1, q_0) = log_odds(params_p), log_odds(params_q)
        return expected(logits, p_1 - q_1, p_0 - q_0)

    def entropy(params: Array) -> Array:
        logits, log_1, log_0 = log_odds(params)
        return -expected(logits, log_1, log_0)

    return Distribution(
        size=size,
        sample=sample,
        mode=lambda params: shaped(jnp.asarray(params) > 0),
        log_prob=log_prob,
        entropy=entropy,
        kl=kl,
        to_env=lambda action: spaces.to_env(leaf, action),
        from_env=lambda value: _checked_indices(leaf, value, np.full(leaf.shape, 2)),
        zeros=lambda batch=(): np.zeros((*batch, *leaf.shape), np.int8),
        mask=mask_nothing,
    )


def _checked_indices(
    leaf: DiscreteSpec | MultiDiscreteSpec | MultiBinarySpec, value: Array, n: np.ndarray
) -> np.ndarray:
    raw = np.asarray(value)
    indices = spaces.to_agent(leaf, raw)
    if not ((indices >= 0) & (indices < n)).all() or not (spaces.to_env(leaf, indices) == raw).all():
        raise ValueError(
            f"a foreign action is not in {leaf}: got values {raw.min()} … {raw.max()} of {raw.dtype}"
        )
    return indices


def batch_axes(action: Array, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The leading axes of an action leaf ``[.., *shape]``."""
    return action.shape[: action.ndim - len(shape)]


def flat(action: Array, shape: tuple[int, ...]) -> Array:
    """An action leaf ``[.., *shape]`` as ``[.., D]``."""
    action = jnp.asarray(action)
    return action.reshape(*batch_axes(action, shape), math.prod(shape))
