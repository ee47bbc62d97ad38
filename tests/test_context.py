"""Frame stacks: the sequence form, the acting form and a slow twin are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.networks import stack_sequence, stack_step, zero_recent
from headrace.spaces import BoxSpec, DiscreteSpec
from headrace.types import Context


def _twin(frames, first, n):
    """``[n+T, B, ...]`` with the context in front to ``[T, B, n+1, ...]``, one element at a time."""
    length, batch = first.shape[0] - n, first.shape[1]
    out = np.zeros((length, batch, n + 1, *frames.shape[2:]), frames.dtype)
    for t in range(length):
        for b in range(batch):
            for j in range(n + 1):
                if not first[n + t - j + 1 : n + t + 1, b].any():
                    out[t, b, n - j] = frames[n + t - j, b]
    return out


def test_by_hand():
    first = np.array([[0], [0], [1], [0]], bool)
    frames = np.array([[1], [2], [3], [4]], np.uint8)
    got = stack_sequence(Context(frames[:2], first[:2]), frames[2:], first[2:])
    assert got.dtype == np.uint8
    assert got[:, 0].tolist() == [[0, 0, 3], [0, 3, 4]]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(0, 3), (1, 4), (3, 2), (3, 5)]), st.floats(0, 0.6), st.integers(0, 2**16))
def test_three_forms_agree(n_and_length, p_first, seed):
    (n, length), batch = n_and_length, 2
    rng = np.random.default_rng(seed)
    first = rng.random((n + length, batch)) < p_first
    first[0] = True  # the acting form starts with a life
    frames = {
        "image": rng.integers(1, 256, (n + length, batch, 2, 3), dtype=np.uint8),
        "vector": rng.normal(size=(n + length, batch, 2)).astype(np.float32),
    }
    context = Context({k: v[:n] for k, v in frames.items()}, first[:n])
    got = stack_sequence(context, {k: v[n:] for k, v in frames.items()}, first[n:])
    spec = {
        k: BoxSpec(v.shape[2:], v.dtype, v.dtype, np.zeros(v.shape[2:]), np.ones(v.shape[2:]))
        for k, v in frames.items()
    }
    recent, acted = zero_recent(spec, n, batch), []
    for t in range(n + length):
        stacked, recent = stack_step(recent, {k: v[t] for k, v in frames.items()}, first[t])
        acted.append(stacked)
    for name, values in frames.items():
        expected = _twin(values, first, n)
        assert got[name].dtype == values.dtype and got[name].shape == expected.shape
        np.testing.assert_array_equal(got[name], expected)
        np.testing.assert_array_equal(np.stack([a[name] for a in acted])[n:], expected)


def test_garbage_before_a_life_has_no_influence():
    n, first = 2, np.array([[1], [0], [0]], bool)
    frames = np.array([[1.0], [2], [3]], np.float32)

    def loss(garbage, scale):
        stacked = stack_sequence(Context(garbage, jnp.zeros((n, 1), bool)), frames * scale, first)
        return stacked.sum(), stacked

    nan = jnp.full((n, 1), jnp.nan, jnp.float32)
    (gradient, slope), stacked = jax.grad(loss, argnums=(0, 1), has_aux=True)(nan, 1.0)
    assert stacked[:, 0].tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 3]]
    assert gradient.tolist() == [[0], [0]]
    assert slope == 10.0
    stacked, recent = stack_step(nan.reshape(1, n), frames[0], first[0])
    assert stacked.tolist() == [[0, 0, 1]] and recent.tolist() == [[0, 1]]


def test_types_are_kept():
    recent = zero_recent((DiscreteSpec(5, 0, np.dtype(np.int64)),), 3, 2)
    assert recent[0].shape == (2, 3) and recent[0].dtype == np.int32
    stacked, recent = stack_step(recent, (np.array([1, 2], np.int32),), np.array([False, False]))
    assert stacked[0].dtype == np.int32 and stacked[0].tolist() == [[0, 0, 0, 1], [0, 0, 0, 2]]
    assert recent[0].dtype == np.int32


def test_refuses_a_context_of_another_length_or_type():
    first, frames = np.zeros((3, 1), bool), np.zeros((3, 1), np.float32)
    with pytest.raises(ValueError, match="expected float32"):
        stack_sequence(Context(frames[:2].astype(np.uint8), first[:2]), frames, first)
    with pytest.raises(ValueError, match="n as in context"):
        stack_sequence(Context(frames[:1], first[:2]), frames, first)
