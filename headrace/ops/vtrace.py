"""V-trace: off-policy corrected value targets and policy gradients for one stream ``[T]``."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from headrace.types import Array


class VTrace(NamedTuple):
    """What V-trace says of the transitions k = 0 … T−1, f32 ``[T]``.

    Attributes:
        vs_tm1: value targets of rows k; their own value where not valid. No gradient.
        pg_advantages: advantages of the actions at rows k, with their importance weight; 0 where not
            valid. No gradient.
        errors: ``vs_tm1 − v_tm1``, 0 where not valid; the gradient flows through that one ``v_tm1`` only.
    """

    vs_tm1: Array
    pg_advantages: Array
    errors: Array


def vtrace(
    v_tm1: Array,
    v_t: Array,
    r_t: Array,
    discount_t: Array,
    log_rho_tm1: Array,
    valid: Array,
    *,
    lambda_: float = 1.0,
    clip_rho: float | None = 1.0,
    clip_pg_rho: float | None = 1.0,
    clip_c: float | None = 1.0,
) -> VTrace:
    """V-trace targets and advantages (Espeholt et al. 2018, arXiv:1802.01561, eq. 1 and section 4.2).

    Entry k of every argument belongs to the transition from row k (time t−1) to row k+1 (time t). With
    m[k] = ``valid[k]`` and the ratios ρ[k] = exp(``log_rho_tm1[k]``) = π(a_k|x_k)/μ(a_k|x_k):

        δ[k]  = m[k] · min(ρ̄, ρ[k]) · (r_t[k] + discount_t[k] · v_t[k] − v_tm1[k])
        c[k]  = m[k] · λ · min(c̄, ρ[k])
        e[k]  = δ[k] + discount_t[k] · c[k] · e[k+1],            e[T] = 0
        vs[k] = v_tm1[k] + e[k]
        A[k]  = m[k] · min(ρ̄_pg, ρ[k]) · (r_t[k] + discount_t[k] · vs[k+1] − v_tm1[k]),     vs[T] = v_t[T−1]

    The transition into another episode (m = 0) has e = 0, so its target is its own value and nothing
    crosses it. A truncated last row k has m[k] = 0; the transition k−1 → k before it bootstraps with
    ``v_t[k−1]``, the value of its observation.

    Departures: the paper's V(x_s), r_s, γ are ``v_tm1[k]``, ``r_t[k]``, ``discount_t[k]`` (the discount
    carries the termination of row k+1). A uses the full target vs[k+1] for every λ, as the paper; rlax
    mixes in (1−λ)·v. λ is the paper's Remark 2. All inputs count as constants except one: see
    ``VTrace.errors``.

    Args:
        v_tm1: V of row k, ``[T]``.
        v_t: V of row k+1, ``[T]``; equal to ``v_tm1`` shifted, and the bootstrap value at T−1.
        r_t: reward on arriving at row k+1.
        discount_t: γ, or 0 where row k+1 is terminated (``types.transition_masks``).
        log_rho_tm1: log π − log μ of the action taken at row k. Ignored where not valid, even if not finite.
        valid: bool or 0/1, false where row k+1 is the first of another episode.
        lambda_: λ in [0, 1].
        clip_rho: ρ̄, which fixes whose value is learned; None: no clip.
        clip_pg_rho: ρ̄ of the policy gradient; None: no clip.
        clip_c: c̄, how far corrections reach; None: no clip.

    Raises:
        ValueError: arguments that are not ``[T]`` alike; vmap over a batch.
    """
    arrays = [jnp.asarray(x) for x in (v_tm1, v_t, r_t, discount_t, log_rho_tm1, valid)]
    if arrays[0].ndim != 1 or any(x.shape != arrays[0].shape for x in arrays):
        raise ValueError(
            f"got shapes {[x.shape for x in arrays]}, expected one stream [T] each; vmap over a batch"
        )
    live_v_tm1 = arrays[0].astype(jnp.float32)
    v_tm1, v_t, r_t, discount_t, log_rho = (jax.lax.stop_gradient(x.astype(jnp.float32)) for x in arrays[:5])
    mask = arrays[5].astype(jnp.float32)

    def ratio(clip: float | None) -> Array:
        rho = jnp.exp(jnp.where(mask > 0, log_rho, 0.0))
        return mask * (rho if clip is None else jnp.minimum(rho, clip))

    deltas = ratio(clip_rho) * (r_t + discount_t * v_t - v_tm1)
    errors = backward_sum(deltas, discount_t * lambda_ * ratio(clip_c))
    vs_tm1 = v_tm1 + errors
    vs_t = jnp.concatenate([vs_tm1[1:], v_t[-1:]])
    pg_advantages = ratio(clip_pg_rho) * (r_t + discount_t * vs_t - v_tm1)
    return VTrace(vs_tm1, pg_advantages, mask * (vs_tm1 - live_v_tm1))


def backward_sum(x: Array, decay: Array) -> Array:
    """y[k] = x[k] + decay[k] · y[k+1] with y[T] = 0, for one stream ``[T]``."""

    def step(y: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        x_k, decay_k = inputs
        y = x_k + decay_k * y
        return y, y

    return jax.lax.scan(step, jnp.zeros((), x.dtype), (x, decay), reverse=True)[1]
