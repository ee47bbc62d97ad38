"""Action distributions for any nesting of Dict and Tuple over Box, Discrete, MultiDiscrete and MultiBinary.

``distribution(spec)`` is a record of pure functions over one flat parameter vector ``[.., P]``, as a
network head produces it. Actions are in the distribution's own coordinates until ``to_env``: what is
stored is what was sampled, so the first ratio of a policy update is 1.

| leaf | parameters | own coordinates | log-prob of |
|---|---|---|---|
| Discrete(n) | n logits | index i32 | the index |
| MultiDiscrete(nvec) | Σ nvec logits, row by row | indices i32 | the indices, summed |
| MultiBinary | a logit of each bit | bits i8 | the bits, summed |
| Box, ``clipped_normal`` | D means, D raw stds | raw f32, env units | the raw sample, before the clip |
| Box, ``tanh_normal`` | D means, D raw stds | pre-tanh f32 | tanh(sample) in [−1, 1] coordinates |

Std: ``normals.normal_params``. Floats go to an integer or bool Box rounded.

Of ``tanh_normal``:

    log p = Σ log N(x; μ, σ) − 2·(ln 2 − x − softplus(−2x))

is the density of tanh(x) in [−1, 1], *not* in environment units (those differ by the constant −Σ
ln((high−low)/2), which drops out of every ratio, gradient and KL). Its entropy has no closed form:

    H = H(N(μ, σ)) + E[log(1 − tanh²x)]

where the expectation is a fixed 33-node quadrature: it needs no key and has a gradient, and errs by < 1e-6
nats a dimension for σ ≤ 2 and by ≤ 0.013 at the cap σ = e². Its KL is that of the normals, tanh being
a bijection. Haarnoja et al. 2018, arXiv:1812.05905, appendix C.
"""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from headrace import spaces
from headrace.errors import ConfigError, UnsupportedSpaceError
from headrace.ops import families, normals
from headrace.ops.families import Distribution
from headrace.spaces import BoxSpec, DiscreteSpec, Leaf, MultiBinarySpec, MultiDiscreteSpec, Spec
from headrace.types import ACTION_MASK, Array, PyTree

BoxFamily = Literal["clipped_normal", "tanh_normal"]


def distribution(spec: Spec, *, box: BoxFamily = "clipped_normal") -> Distribution:
    """The distribution over the actions of ``spec``.

    Parameters are the leaves' in the order of ``spaces.leaves``; leaves are independent, so log-probs,
    entropies and KLs are their sums.

    Args:
        spec: the action spec.
        box: family of every Box leaf.

    Raises:
        ConfigError: no such ``box`` family.
        UnsupportedSpaceError: ``tanh_normal`` over infinite bounds, an integer Box wider than float32
            counts, or a spec without leaves; names the leaf.

    Example:
        >>> import numpy as np
        >>> d = distribution(DiscreteSpec(3, 0, np.dtype(np.int64)))
        >>> d.size, round(float(d.entropy(np.zeros(3))), 4)
        (3, 1.0986)
    """
    if box not in get_args(BoxFamily):
        raise ConfigError(
            f"box={box!r} is no family of Box actions; expected one of {list(get_args(BoxFamily))}"
        )
    parts = [_family(leaf, f"action{path}", box) for path, leaf in spaces.leaves(spec)]
    if not parts:
        raise UnsupportedSpaceError(f"the action spec {spec!r} has no leaves; expected at least one")
    return _composite(spec, parts)


def _family(leaf: Leaf, path: str, box: BoxFamily) -> Distribution:
    match leaf:
        case DiscreteSpec() | MultiDiscreteSpec():
            return families.categorical(leaf)
        case MultiBinarySpec():
            return families.bernoulli(leaf)
        case BoxSpec():
            return normals.normal(leaf, path, squash=box == "tanh_normal")
    raise UnsupportedSpaceError(f"{path} is a {type(leaf).__name__}; expected a leaf spec of headrace.spaces")


def _composite(spec: Spec, parts: list[Distribution]) -> Distribution:
    structure: Any = jax.tree.structure(spec)  # sorts dict keys as ``spaces.leaves`` does
    size = sum(part.size for part in parts)
    cuts = np.cumsum([part.size for part in parts])[:-1].tolist()

    def split(params: Array) -> list[Array]:
        params = jnp.asarray(params)
        if params.ndim == 0 or params.shape[-1] != size:
            raise ValueError(
                f"got parameters {params.shape}, expected [.., {size}]; size the head by `.size`"
            )
        return jnp.split(params, cuts, axis=-1)

    def sample(params: Array, key: Array) -> PyTree:
        keys = [key] if len(parts) == 1 else jax.random.split(key, len(parts))
        return structure.unflatten(
            [d.sample(p, k) for d, p, k in zip(parts, split(params), keys, strict=True)]
        )

    def mode(params: Array) -> PyTree:
        return structure.unflatten([d.mode(p) for d, p in zip(parts, split(params), strict=True)])

    def log_prob(params: Array, action: PyTree) -> Array:
        actions = structure.flatten_up_to(action)
        return sum(d.log_prob(p, a) for d, p, a in zip(parts, split(params), actions, strict=True))

    def entropy(params: Array) -> Array:
        return sum(d.entropy(p) for d, p in zip(parts, split(params), strict=True))

    def kl(params_p: Array, params_q: Array) -> Array:
        return sum(d.kl(p, q) for d, p, q in zip(parts, split(params_p), split(params_q), strict=True))

    def mask(params: Array, mask: PyTree) -> Array:
        masks = structure.flatten_up_to(mask)
        return jnp.concatenate(
            [d.mask(p, m) for d, p, m in zip(parts, split(params), masks, strict=True)], -1
        )

    def by_leaf(name: str, value: PyTree) -> PyTree:
        return spaces.map_leaves(lambda d, x: getattr(d, name)(x), structure.unflatten(parts), value)

    return Distribution(
        size=size,
        sample=sample,
        mode=mode,
        log_prob=log_prob,
        entropy=entropy,
        kl=kl,
        to_env=lambda action: by_leaf("to_env", action),
        from_env=lambda value: by_leaf("from_env", value),
        zeros=lambda batch=(): structure.unflatten([d.zeros(batch) for d in parts]),
        mask=mask,
    )


def masked(dist: Distribution, params: Array, extra: PyTree) -> Array:
    """``params`` under the action mask of ``TimeStep.extra``; as they are where it holds none.

    To be applied to what a network gives, with the mask of the same row, in acting and in learning.
    """
    return (
        dist.mask(params, extra[ACTION_MASK]) if isinstance(extra, dict) and ACTION_MASK in extra else params
    )
