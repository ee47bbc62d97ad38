"""Slow NumPy twins, written from the papers' definitions, float64, loops and all."""

import numpy as np


def clip_above(x, bound):
    return x if bound is None else min(x, bound)


def vtrace_episode(
    values, rewards, discounts, ratios, lambda_=1.0, clip_rho=1.0, clip_pg_rho=1.0, clip_c=1.0
):
    """Espeholt et al. 2018, eq. 1, as a double sum over one stretch of an episode.

    values: V(x_0) … V(x_n); rewards, discounts, ratios: r_s, γ_s, ρ_s of the n steps between.
    Returns (v_s for s = 0 … n, advantage for s = 0 … n−1); v_n is V(x_n).
    """
    n = len(rewards)
    targets = np.array(values, np.float64)
    for s in range(n):
        for t in range(s, n):
            weight = 1.0
            for i in range(s, t):
                weight *= discounts[i] * lambda_ * clip_above(ratios[i], clip_c)
            delta = clip_above(ratios[t], clip_rho) * (rewards[t] + discounts[t] * values[t + 1] - values[t])
            targets[s] += weight * delta
    advantages = [
        clip_above(ratios[s], clip_pg_rho) * (rewards[s] + discounts[s] * targets[s + 1] - values[s])
        for s in range(n)
    ]
    return targets, np.array(advantages)


def episodes(first):
    """The stretches [start, stop] (inclusive rows) of one trajectory that are whole or cut episodes."""
    starts = [0, *[k for k in range(1, len(first)) if first[k]]]
    return list(zip(starts, [s - 1 for s in starts[1:]] + [len(first) - 1], strict=True))


def vtrace_rows(values, rewards, first, terminated, gamma, ratios, **options):
    """V-trace of T+1 rows: split at the boundaries, each part treated alone.

    rewards, first, terminated are the rows' own; ratios those of the actions at rows 0 … T−1. Returns
    targets [T] and advantages [T]; the last row of an episode has its own value as target and no advantage.
    """
    steps = len(values) - 1
    targets, advantages = np.array(values[:steps], np.float64), np.zeros(steps)
    for start, stop in episodes(first):
        arrived = slice(start + 1, stop + 1)
        vs, adv = vtrace_episode(
            values[start : stop + 1],
            rewards[arrived],
            [0.0 if t else gamma for t in terminated[arrived]],
            ratios[start:stop],
            **options,
        )
        targets[start:stop], advantages[start:stop] = vs[:-1], adv
    return targets, advantages


def log_softmax(logits):
    return logits - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()


def tanh_normal_log_prob(mean, std, x):
    """Log density of tanh(x) in [−1, 1], float64; log(1 − tanh²x) = −2·log cosh x."""
    log_cosh = np.logaddexp(x, -x) - np.log(2.0)
    return -0.5 * ((x - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi) + 2 * log_cosh


def tanh_normal_entropy(mean, std):
    """By dense integration of −p log p over the pre-tanh line."""
    x = mean + std * np.linspace(-10, 10, 200_001)
    density = np.exp(-0.5 * ((x - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    return -np.trapezoid(density * tanh_normal_log_prob(mean, std, x), x)
