"""Two-dimensional convolution whose gradients the CPU backend computes fast.

XLA on the CPU runs a stride-1 convolution on a threaded path, and the transposed (dilated) ones that
automatic differentiation makes of a strided one on a slow path. So both gradients are written as stride-1
convolutions. With stride s, fold each s × s patch of the input into channels (space to depth),

    X[n, i, j, (u, v, c)] = x[n, s·i + u, s·j + v, c]
    W[a, b, (u, v, c), o] = w[s·a + u, s·b + v, c, o]        (0 where the index runs past the kernel)

so that the layer is y = X ⋆ W with stride 1, and with the kernel's size k × l in this form

    dX = pad(dy, k − 1, l − 1) ⋆ flip(W)ᵀ
    dW = the usual weight gradient of a stride-1 convolution

from which dx and dw are unfolded. The forward pass, and every other backend, keep XLA's own form.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_NUMBERS = ("NHWC", "HWIO", "NHWC")


def conv_general_dilated(
    lhs: Float[Array, "N H W C"],
    rhs: Float[Array, "k l C O"],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    precision: Any = None,
    out_sharding: Any = None,
) -> Float[Array, "N h w O"]:
    """``lax.conv_general_dilated`` for plain image layers; give it to ``nnx.Conv(conv_general_dilated=...)``.

    Equal to the ``lax`` function in value and gradient up to rounding. Reverse mode only.

    Args:
        lhs: images, channels last.
        rhs: kernel.
        window_strides: stride of each spatial axis, both equal.
        padding: ``"VALID"``.
        lhs_dilation: ones, or None.
        rhs_dilation: ones, or None.
        dimension_numbers: channels-last, as ``nnx.Conv`` passes them, or None for the same.
        feature_group_count: 1.
        precision: as in ``lax``.
        out_sharding: None.

    Raises:
        ValueError: another setting than these; names it.
    """
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, _NUMBERS)
    checks = {
        "lhs must be [N, H, W, C]": lhs.ndim == 4,
        "padding must be 'VALID'": padding == "VALID",
        "strides must be equal": len(set(window_strides)) == 1,
        "lhs_dilation must be 1": set(lhs_dilation or (1,)) == {1},
        "rhs_dilation must be 1": set(rhs_dilation or (1,)) == {1},
        "dimension_numbers must be channels-last": dimension_numbers in (None, _NUMBERS, numbers),
        "feature_group_count must be 1": feature_group_count == 1,
        "out_sharding must be None": out_sharding is None,
    }
    if broken := [rule for rule, holds in checks.items() if not holds]:
        raise ValueError(f"{'; '.join(broken)}: use jax.lax.conv_general_dilated for this layer instead")
    return _conv(lhs, rhs, int(window_strides[0]), precision)


def _plain(x: Array, w: Array, stride: int, precision: Any) -> Array:
    return lax.conv_general_dilated(
        x, w, (stride, stride), "VALID", dimension_numbers=_NUMBERS, precision=precision
    )


def space_to_depth(
    x: Float[Array, "N H W C"], w: Float[Array, "k l C O"], stride: int
) -> tuple[Float[Array, "N h w D"], Float[Array, "p q D O"]]:
    """Images and kernel of the stride-1 convolution that equals the one with ``stride``; D = stride² · C."""
    s = stride
    kernel = [-(-size // s) for size in w.shape[:2]]
    output = [(size - k) // s + 1 for size, k in zip(x.shape[1:3], w.shape[:2], strict=True)]
    height, width = (o - 1 + k for o, k in zip(output, kernel, strict=True))
    x = _fit(x, (x.shape[0], height * s, width * s, x.shape[3]))
    x = x.reshape(x.shape[0], height, s, width, s, x.shape[3]).transpose(0, 1, 3, 2, 4, 5)
    w = _fit(w, (kernel[0] * s, kernel[1] * s, *w.shape[2:]))
    w = w.reshape(kernel[0], s, kernel[1], s, *w.shape[2:]).transpose(0, 2, 1, 3, 4, 5)
    return x.reshape(*x.shape[:3], -1), w.reshape(*kernel, -1, w.shape[5])


def _fit(x: Array, shape: tuple[int, ...]) -> Array:
    """Crop or zero-pad each axis at its end."""
    low_high = [(0, size - old, 0) for size, old in zip(shape, x.shape, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), low_high)


def _gradients_forward_form(
    x: Array, w: Array, dy: Array, stride: int, precision: Any
) -> tuple[Array, Array]:
    (folded, kernel), unfold = jax.vjp(lambda x, w: space_to_depth(x, w, stride), x, w)
    k, n = kernel.shape[:2]
    padded = jnp.pad(dy, ((0, 0), (k - 1, k - 1), (n - 1, n - 1), (0, 0)))
    dx = _plain(padded, kernel[::-1, ::-1].swapaxes(2, 3), 1, precision)
    (dw,) = jax.vjp(lambda w: _plain(folded, w, 1, precision), kernel)[1](dy)
    return unfold((dx, dw))


def _gradients_plain(x: Array, w: Array, dy: Array, stride: int, precision: Any) -> tuple[Array, Array]:
    return jax.vjp(lambda x, w: _plain(x, w, stride, precision), x, w)[1](dy)


_conv = jax.custom_vjp(_plain, nondiff_argnums=(2, 3))


def _conv_fwd(x: Array, w: Array, stride: int, precision: Any) -> tuple[Array, tuple[Array, Array]]:
    return _plain(x, w, stride, precision), (x, w)


def _conv_bwd(stride: int, precision: Any, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    # Decided when the program is lowered, so that one process may use the CPU and an accelerator. An input
    # gradient nobody uses (the frames') is dead code in either form.
    return lax.platform_dependent(
        *residuals,
        dy,
        cpu=lambda x, w, dy: _gradients_forward_form(x, w, dy, stride, precision),
        default=lambda x, w, dy: _gradients_plain(x, w, dy, stride, precision),
    )


_conv.defvjp(_conv_fwd, _conv_bwd)
