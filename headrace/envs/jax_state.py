"""A pytree of device arrays as plain NumPy arrays and back, exactly: for checkpoints, nothing pickled."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from headrace.envs.jax_step import is_key
from headrace.types import Array, PyTree


def to_arrays(tree: PyTree) -> dict[str, np.ndarray]:
    """The leaves of ``tree`` under the keys "0", "1", …, copied.

    PRNG keys are given as their key data, dtypes that NumPy does not know (bfloat16) as integers of their bits.
    """
    return {str(i): _plain(x) for i, x in enumerate(jax.tree.leaves(tree))}


def from_arrays(like: PyTree, arrays: Mapping[str, np.ndarray]) -> PyTree | None:
    """Inverse of ``to_arrays``; None where the arrays do not fit the shapes and dtypes of ``like``."""
    leaves, treedef = jax.tree.flatten(like)
    if set(arrays) != {str(i) for i in range(len(leaves))}:
        return None
    restored = [_restored(x, np.asarray(arrays[str(i)])) for i, x in enumerate(leaves)]
    return None if any(x is None for x in restored) else jax.tree.unflatten(treedef, restored)


def _plain(x: Array) -> np.ndarray:
    array = np.array(jax.random.key_data(x) if is_key(x) else x)
    return array if array.dtype.kind in "biuf" else array.view(f"u{array.dtype.itemsize}")


def _restored(like: Array, saved: np.ndarray) -> Array | None:
    form = _plain(like)
    if (saved.shape, saved.dtype) != (form.shape, form.dtype):
        return None
    if is_key(like):
        return jax.random.wrap_key_data(jnp.array(saved, copy=True), impl=jax.random.key_impl(like))
    return jnp.array(saved.view(np.dtype(like.dtype)), copy=True)
