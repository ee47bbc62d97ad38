"""The convolution's values and gradients, and the compiler options it is run with."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from headrace import xla
from headrace.networks import NatureCNN
from headrace.networks.conv import conv_general_dilated, space_to_depth

NUMBERS = ("NHWC", "HWIO", "NHWC")
SHAPES = [  # image, kernel, stride
    ((2, 84, 84, 4), (8, 8, 4, 32), 4),
    ((2, 20, 20, 32), (4, 4, 32, 64), 2),
    ((2, 9, 9, 64), (3, 3, 64, 64), 1),
    ((3, 11, 14, 2), (3, 5, 2, 3), 2),  # kernel no multiple of the stride, rows left over
    ((1, 10, 9, 3), (2, 2, 3, 4), 3),  # kernel smaller than the stride
    ((2, 7, 5, 1), (7, 5, 1, 2), 3),  # one output
]


def _lax(x, w, stride):
    return lax.conv_general_dilated(x, w, (stride, stride), "VALID", dimension_numbers=NUMBERS)


def _case(image, kernel, seed=0):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.normal(size=s) / np.sqrt(np.prod(s[1:])), jnp.float32) for s in (image, kernel))


@pytest.mark.parametrize(("image", "kernel", "stride"), SHAPES)
def test_value_and_gradients_equal_the_plain_form(image, kernel, stride):
    x, w = _case(image, kernel)
    expected, plain_vjp = jax.vjp(lambda x, w: _lax(x, w, stride), x, w)
    got, vjp = jax.vjp(lambda x, w: conv_general_dilated(x, w, (stride, stride), "VALID"), x, w)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    dy = jnp.asarray(np.random.default_rng(1).normal(size=expected.shape), jnp.float32)
    scale = 1e-5 * max(1.0, float(jnp.abs(dy).sum(axis=(1, 2)).max()))
    for ours, theirs in zip(jax.jit(vjp)(dy), plain_vjp(dy), strict=True):
        assert ours.shape == theirs.shape and float(jnp.abs(theirs).max()) > 1e-3
        np.testing.assert_allclose(ours, theirs, atol=scale * float(jnp.abs(theirs).max()))


def test_gradient_by_hand():
    """x = [1 2 3 4], w = [10 20], stride 2: dy = [1 3] gives dw = [1 + 9, 2 + 12]."""
    x, w = jnp.array([1.0, 2, 3, 4]).reshape(1, 1, 4, 1), jnp.array([10.0, 20]).reshape(1, 2, 1, 1)
    y, vjp = jax.vjp(lambda x, w: conv_general_dilated(x, w, (2, 2), "VALID"), x, w)
    dx, dw = vjp(jnp.array([1.0, 3]).reshape(1, 1, 2, 1))
    assert y.ravel().tolist() == [50, 110]
    assert dw.ravel().tolist() == [10, 14]
    assert dx.ravel().tolist() == [10, 20, 30, 60]


@pytest.mark.parametrize(("image", "kernel", "stride"), SHAPES)
def test_space_to_depth_is_the_same_layer_at_stride_one(image, kernel, stride):
    x, w = _case(image, kernel)
    np.testing.assert_allclose(_lax(*space_to_depth(x, w, stride), 1), _lax(x, w, stride), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"padding": "SAME"}, "padding"),
        ({"window_strides": (1, 2)}, "strides"),
        ({"rhs_dilation": (2, 2)}, "rhs_dilation"),
        ({"lhs_dilation": (1, 2)}, "lhs_dilation"),
        ({"feature_group_count": 2}, "feature_group_count"),
        ({"dimension_numbers": ("NCHW", "OIHW", "NCHW")}, "dimension_numbers"),
    ],
)
def test_refuses_what_it_cannot_do(change, word):
    x, w = _case((1, 8, 8, 2), (3, 3, 2, 2))
    with pytest.raises(ValueError, match=word):
        conv_general_dilated(x, w, **{"window_strides": (1, 1), "padding": "VALID", **change})


@pytest.fixture(scope="module")
def cnn_gradient():
    module = NatureCNN((44, 44, 4), nnx.Rngs(0), 32)
    graphdef, params = nnx.split(module)

    def loss(params, frames):
        return jnp.sum(nnx.merge(graphdef, params)(frames) ** 2)

    frames = np.random.default_rng(0).integers(0, 256, (4, 44, 44, 4), dtype=np.uint8)
    return jax.grad(loss), params, frames


def test_cnn_gradient_equals_the_one_with_flax_convolutions(cnn_gradient):
    gradient, params, frames = cnn_gradient
    module = NatureCNN((44, 44, 4), nnx.Rngs(0), 32)
    for conv in module.convs:
        conv.conv_general_dilated = lax.conv_general_dilated
    plain = jax.jit(jax.grad(lambda p: jnp.sum(nnx.merge(nnx.split(module)[0], p)(frames) ** 2)))(params)
    for ours, theirs in zip(
        jax.tree.leaves(jax.jit(gradient)(params, frames)), jax.tree.leaves(plain), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5 * float(jnp.abs(theirs).max()))


def test_the_frames_gradient_is_not_computed(cnn_gradient):
    """Three layers: three forward, three weight gradients and two input gradients make eight convolutions."""
    text = jax.jit(cnn_gradient[0]).lower(*cnn_gradient[1:]).compile().as_text()
    assert text.count(" convolution(") == 8
    assert " conditional(" not in text


def test_options_are_used_where_xla_accepts_them():
    assert xla.accepted({})
    options = xla.compile_options()
    assert options == (dict(xla.CPU_OPTIONS) if xla.accepted(xla.CPU_OPTIONS) else None)
    assert xla.jit(lambda x: x + 1)(jnp.int32(1)) == 2


@pytest.mark.parametrize(
    "unknown", [{"xla_no_such_option": "1"}, {"xla_cpu_experimental_ynn_fusion_type": "NO_SUCH_VALUE"}]
)
def test_an_unknown_option_is_left_out(monkeypatch, unknown):
    xla._cpu_options.cache_clear()
    monkeypatch.setattr(xla, "CPU_OPTIONS", unknown)
    try:
        assert not xla.accepted(unknown)
        assert xla.compile_options() is None
        assert xla.jit(lambda x: x + 1)(jnp.int32(1)) == 2
    finally:
        xla._cpu_options.cache_clear()


def test_another_backend_gets_no_cpu_options(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert xla.compile_options() is None


def test_jit_passes_its_arguments_on():
    x = jnp.arange(4.0)
    doubled = xla.jit(lambda x, n: x * n, donate_argnums=0, static_argnums=1)(x, 2)
    assert doubled.tolist() == [0, 2, 4, 6]
    assert x.is_deleted()


def test_import_starts_no_backend():
    code = (
        "import headrace.xla, headrace.networks; from jax._src import xla_bridge as x; assert not x._backends"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
