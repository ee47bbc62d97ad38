"""Recurrent cores: what to make, and the module that is stepped.

A core's input weights do not depend on its state, so ``project`` is applied to all rows at once, outside the
scan, and only the recurrent product is left inside.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from headrace.types import PyTree


class Core(Protocol):
    """What ``recurrent`` needs of a core; ``size`` is that of its features."""

    @property
    def size(self) -> int:
        """Size of the features."""
        ...

    def make(self, in_features: int, rngs: nnx.Rngs) -> Any:
        """A module of ``project(x [rows, in])`` and ``__call__(carry, projected) -> carry, features``."""
        ...

    def initial_carry(self, batch: int) -> PyTree:
        """Zeros ``[batch, ...]``."""
        ...


@dataclass(frozen=True)
class LSTM:
    """Long short-term memory of ``size`` units; the carry is ``(cell, hidden)``, each f32 ``[b, size]``."""

    size: int

    def make(self, in_features: int, rngs: nnx.Rngs) -> "LSTMCell":
        """The cell, with fresh weights."""
        return LSTMCell(in_features, self.size, rngs)

    def initial_carry(self, batch: int) -> tuple[Array, Array]:
        """Zeros."""
        return jnp.zeros((batch, self.size)), jnp.zeros((batch, self.size))


@dataclass(frozen=True)
class GRU:
    """Gated recurrent unit of ``size`` units; the carry is the hidden state, f32 ``[b, size]``."""

    size: int

    def make(self, in_features: int, rngs: nnx.Rngs) -> "GRUCell":
        """The cell, with fresh weights."""
        return GRUCell(in_features, self.size, rngs)

    def initial_carry(self, batch: int) -> Array:
        """Zeros."""
        return jnp.zeros((batch, self.size))


class LSTMCell(nnx.Module):
    """Hochreiter and Schmidhuber 1997 with forget gates (Gers 2000).

        i, f, o = σ(W x_t + U h_tm1 + b),    g = tanh(W x_t + U h_tm1 + b)
        c_t = f · c_tm1 + i · g
        h_t = o · tanh(c_t)

    The forget gate's bias starts at 1, so that a fresh cell remembers (Jozefowicz 2015, §4.2).
    """

    def __init__(self, in_features: int, size: int, rngs: nnx.Rngs) -> None:
        bias = jnp.zeros(4 * size).at[size : 2 * size].set(1.0)
        self.input = nnx.Linear(in_features, 4 * size, bias_init=lambda *_: bias, rngs=rngs)
        self.recurrent = nnx.Linear(
            size, 4 * size, use_bias=False, kernel_init=_orthogonal_gates(4), rngs=rngs
        )

    def project(self, x: Float[Array, "R F"]) -> Float[Array, "R 4S"]:
        """W x + b, gates in the order i, f, g, o."""
        return self.input(x)

    def __call__(self, carry: tuple[Array, Array], projected: Array) -> tuple[tuple[Array, Array], Array]:
        """One step for each of ``b`` rows."""
        cell, hidden = carry
        i, f, g, o = jnp.split(projected + self.recurrent(hidden), 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (cell, hidden), hidden


class GRUCell(nnx.Module):
    """Cho 2014, with the reset gate after the recurrent product so that one product serves all gates.

    r, z = σ(W x_t + U h_tm1 + b),    n = tanh(W x_t + b + r · (U h_tm1))
    h_t = (1 − z) · n + z · h_tm1
    """

    def __init__(self, in_features: int, size: int, rngs: nnx.Rngs) -> None:
        self.input = nnx.Linear(in_features, 3 * size, rngs=rngs)
        self.recurrent = nnx.Linear(
            size, 3 * size, use_bias=False, kernel_init=_orthogonal_gates(3), rngs=rngs
        )

    def project(self, x: Float[Array, "R F"]) -> Float[Array, "R 3S"]:
        """W x + b, in the order r, z, n."""
        return self.input(x)

    def __call__(self, carry: Array, projected: Array) -> tuple[Array, Array]:
        """One step for each of ``b`` rows."""
        x_r, x_z, x_n = jnp.split(projected, 3, axis=-1)
        h_r, h_z, h_n = jnp.split(self.recurrent(carry), 3, axis=-1)
        r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
        hidden = (1.0 - z) * jnp.tanh(x_n + r * h_n) + z * carry
        return hidden, hidden


def _orthogonal_gates(gates: int) -> Any:
    """Initialiser of a ``[size, gates · size]`` kernel: each gate's square block is orthogonal on its own."""
    orthogonal = jax.nn.initializers.orthogonal()

    def init(key: Array, shape: tuple[int, int], dtype: Any = jnp.float32, **_: Any) -> Array:
        size = shape[0]
        return jnp.concatenate(
            [orthogonal(k, (size, size), dtype) for k in jax.random.split(key, gates)], axis=1
        )

    return init
