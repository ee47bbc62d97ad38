"""A network as a record of pure functions, made from ``flax.nnx`` modules.

A module is built abstractly once for its structure; at trace time it is put together from a plain nested
dict of arrays. No nnx transform runs in a compiled step.

Axes: ``b`` slots or trajectories, ``T`` time, ``n`` rows of context. *Rows* are T·b rows under one axis,
which is what convolutions want.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from headrace.networks.cores import Core
from headrace.types import Array, PyTree

Params: TypeAlias = PyTree
"""Nested dict of arrays."""
MakeModule: TypeAlias = Callable[[nnx.Rngs], nnx.Module]


class Input(NamedTuple):
    """What a network sees; leading axes ``[b]`` in ``step``, ``[T, b]`` in ``unroll``, rows in a module.

    Attributes:
        observation: leaves ``[..., *shape]``; with context n > 0 ``[..., n+1, *shape]``, oldest first, zero
            before the episode's first row (``context.py``).
        prev_action: the previous row's action in the agent's coordinates. Where ``first`` it may be
            anything: the network takes it as zero.
        reward: f32, received on arriving here; taken as zero where ``first``.
        first: bool, the observation is of a reset.
    """

    observation: PyTree
    prev_action: PyTree
    reward: Array
    first: Array


class Encoder(Protocol):
    """The module in front of a recurrent core."""

    out_features: int

    def __call__(self, x: Input) -> Array:
        """Rows of ``Input`` to features ``[rows, out_features]``."""
        ...


@dataclass(frozen=True)
class Network:
    """Pure functions over params.

    Attributes:
        init: ``key -> params``, a nested dict of arrays.
        initial_carry: ``b -> carry``, zeros ``[b, ...]``; ``()`` without memory.
        step: ``(params, Input [b], carry) -> (output [b, ...], carry)``.
        unroll: ``(params, Input [T, b], carry) -> (output [T, b, ...], carry)``, the same as T steps. The
            carry is reset where ``first`` before it is used.
        context: rows before the present one in each observation stack.
    """

    init: Callable[[Array], Params]
    initial_carry: Callable[[int], PyTree]
    step: Callable[[Params, Input, PyTree], tuple[PyTree, PyTree]]
    unroll: Callable[[Params, Input, PyTree], tuple[PyTree, PyTree]]
    context: int = 0


def feed_forward(make_module: MakeModule, context: int = 0) -> Network:
    """A network without memory from any module with ``__call__(Input) -> output`` over rows.

    Args:
        make_module: makes the module; called abstractly here, and once in each ``init``.
        context: rows before the present one that the module's observations hold.

    Raises:
        ValueError: the module has state besides ``nnx.Param``.
    """
    init, apply = _pure(make_module)

    def step(params: Params, x: Input, carry: PyTree) -> tuple[PyTree, PyTree]:
        return apply(params)(x), carry

    def unroll(params: Params, x: Input, carry: PyTree) -> tuple[PyTree, PyTree]:
        return _split_rows(apply(params)(_merge_rows(x)), x.first.shape), carry

    return Network(init, lambda b: (), step, unroll, context)


class _Recurrent(nnx.Module):
    def __init__(self, make_encoder: MakeModule, core: Core, make_head: MakeModule, rngs: nnx.Rngs) -> None:
        self.encoder: Any = make_encoder(rngs)
        size = getattr(self.encoder, "out_features", None)
        if not isinstance(size, int):
            raise ValueError(
                f"the encoder {type(self.encoder).__name__} has out_features = {size!r}; expected the int "
                f"size of its features, from which the core's input weights are made"
            )
        self.core: Any = core.make(size, rngs)
        self.head: Any = make_head(rngs)


def recurrent(make_encoder: MakeModule, core: Core, make_head: MakeModule, context: int = 0) -> Network:
    """Encoder over all rows at once, the core over time, the head over all rows at once.

    Only the core is in the scan: convolutions inside a loop are slow on every backend, on the CPU many times.

    Args:
        make_encoder: makes an ``Encoder``.
        core: ``LSTM(size)`` or ``GRU(size)``, or another ``Core``.
        make_head: makes a module from the core's features ``[rows, core.size]`` to the output.
        context: rows before the present one that the encoder's observations hold.

    Raises:
        ValueError: the encoder has no ``out_features``, or a module has state besides ``nnx.Param``.
    """
    init, apply = _pure(lambda rngs: _Recurrent(make_encoder, core, make_head, rngs))

    def advance(cell: Any, carry: PyTree, projected: Array, first: Array) -> tuple[PyTree, Array]:
        return cell(_reset(carry, first), projected)

    def step(params: Params, x: Input, carry: PyTree) -> tuple[PyTree, PyTree]:
        module = apply(params)
        carry, features = advance(module.core, carry, module.core.project(module.encoder(x)), x.first)
        return module.head(features), carry

    def unroll(params: Params, x: Input, carry: PyTree) -> tuple[PyTree, PyTree]:
        module = apply(params)
        projected = _split_rows(module.core.project(module.encoder(_merge_rows(x))), x.first.shape)
        carry, features = jax.lax.scan(
            lambda c, row: advance(module.core, c, *row), carry, (projected, x.first)
        )
        return _split_rows(module.head(_merge_rows(features)), x.first.shape), carry

    return Network(init, core.initial_carry, step, unroll, context)


def pair(first: Network, second: Network, combine: Callable[[PyTree, PyTree], PyTree]) -> Network:
    """Two networks on the same input that share no weights, such as a policy and a value.

    Args:
        first: its params and carry come first.
        second: of the same context.
        combine: ``(output of first, output of second) -> output``.

    Raises:
        ValueError: their contexts differ.
    """
    if first.context != second.context:
        raise ValueError(
            f"contexts {first.context} and {second.context} differ; both see the same observations"
        )

    def both(f: Callable[..., Any], g: Callable[..., Any]) -> Callable[..., tuple[PyTree, PyTree]]:
        def run(params: Params, x: Input, carry: PyTree) -> tuple[PyTree, PyTree]:
            a, carry_a = f(params["first"], x, carry[0])
            b, carry_b = g(params["second"], x, carry[1])
            return combine(a, b), (carry_a, carry_b)

        return run

    def init(key: Array) -> Params:
        keys = jax.random.split(key)
        return {"first": first.init(keys[0]), "second": second.init(keys[1])}

    return Network(
        init,
        lambda b: (first.initial_carry(b), second.initial_carry(b)),
        both(first.step, second.step),
        both(first.unroll, second.unroll),
        first.context,
    )


def _pure(make_module: MakeModule) -> tuple[Callable[[Array], Params], Callable[[Params], Any]]:
    """``key -> params`` and ``params -> module``. List items have string keys, which any store can name."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make_module(nnx.Rngs(0))))
    flat = nnx.to_flat_state(state)
    if other := [
        f"{'.'.join(map(str, path))} ({type(v).__name__})" for path, v in flat if not isinstance(v, nnx.Param)
    ]:
        raise ValueError(
            f"the module keeps state besides nnx.Param: {', '.join(other)}; a network is a pure "
            f"function of its params. Use layers without running statistics or random streams (LayerNorm "
            f"for BatchNorm, no Dropout)"
        )
    paths = [path for path, _ in flat]

    def init(key: Array) -> Params:
        params: dict[str, Any] = {}
        for path, variable in nnx.to_flat_state(nnx.split(make_module(nnx.Rngs(key)))[1]):
            node = params
            for part in path[:-1]:
                node = node.setdefault(str(part), {})
            node[str(path[-1])] = variable[...]
        return params

    def apply(params: Params) -> Any:
        return nnx.merge(
            graphdef, nnx.from_flat_state([(path, nnx.Param(_at(params, path))) for path in paths])
        )

    return init, apply


def _at(params: Params, path: tuple[Any, ...]) -> Array:
    for part in path:
        params = params[str(part)]
    return params


def _reset(carry: PyTree, first: Array) -> PyTree:
    """``carry`` ``[b, ...]`` with zeros where ``first`` ``[b]``."""
    return jax.tree.map(
        lambda c: jnp.where(first.reshape(-1, *(1,) * (c.ndim - 1)), jnp.zeros_like(c), c), carry
    )


def _merge_rows(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)


def _split_rows(tree: PyTree, leading: tuple[int, ...]) -> PyTree:
    return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), tree)
