"""Encoders chosen from the observation's spec: images to convolutions, everything else to a perceptron.

| leaf | features |
|---|---|
| uint8 ``Box`` ``[H, W]``, ``[H, W, C]``, ``[C, H, W]`` with H, W >= 36, C <= 16 | Nature CNN |
| any other ``Box`` | its numbers as float32, flattened, not scaled |
| ``Discrete``, ``MultiDiscrete`` | one-hot |
| ``MultiBinary`` | zeros and ones |

Each image leaf has a CNN of its own; the other leaves are concatenated into one perceptron. A leaf that was given an
encoder of the user's own (``encoders``) goes to that alone. The results are concatenated, followed by the previous action
and reward where asked for. With context, frames of an image are stacked into channels, and other leaves are flattened over
the stack.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from headrace.networks.conv import conv_general_dilated
from headrace.networks.encoders import Encoders, assign, make_checked
from headrace.spaces import BoxSpec, DiscreteSpec, Leaf, MultiDiscreteSpec, Spec, leaves, map_leaves, names
from headrace.types import PyTree

Activation: TypeAlias = Literal["tanh", "relu", "elu", "gelu", "silu"]
Init: TypeAlias = Literal["orthogonal", "lecun"]
Pixels: TypeAlias = Literal["unit", "standard"]
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
}
SMALLEST_IMAGE = 36
"""Pixels a side: with fewer, the Nature CNN's last layer has nothing to see."""
_MOST_CHANNELS_IN_FRONT = 16
_HIDDEN_GAIN = float(np.sqrt(2.0))
_LEAST_DEVIATION = 1.0
"""Grey levels: a blank image is divided by this."""


def kernel_init(init: Init, gain: float) -> Any:
    """Orthogonal with ``gain``, or LeCun normal whose deviation is multiplied by ``gain``."""
    if init == "orthogonal":
        return jax.nn.initializers.orthogonal(gain)
    return jax.nn.initializers.variance_scaling(gain**2, "fan_in", "truncated_normal")


class MLP(nnx.Module):
    """Layers with an activation after each, ``[rows, in] -> [rows, layers[-1]]``; the identity without."""

    def __init__(
        self,
        in_features: int,
        layers: Sequence[int],
        rngs: nnx.Rngs,
        activation: Activation = "tanh",
        init: Init = "orthogonal",
    ) -> None:
        sizes = [in_features, *layers]
        # Orthogonal with gain √2 as in PPO's public code; LeCun takes gain 1.
        make = kernel_init(init, _HIDDEN_GAIN if init == "orthogonal" else 1.0)
        self.layers = nnx.List(
            [nnx.Linear(i, o, kernel_init=make, rngs=rngs) for i, o in itertools.pairwise(sizes)]
        )
        self.activation = activation
        self.out_features = sizes[-1]

    def __call__(self, x: Float[Array, "R F"]) -> Float[Array, "R G"]:
        """Rows to features."""
        for layer in self.layers:
            x = ACTIVATIONS[self.activation](layer(x))
        return x


def scale_pixels(x: Array, pixels: Pixels) -> Float[Array, "R H W C"]:
    """Images ``[rows, H, W, C]`` of 0 … 255 as floats of order one.

    ``unit`` is x ÷ 255. ``standard`` is (x − m) ÷ max(s, 1) with mean m and deviation s of each row, all its channels
    together: of the whole stack, where frames are stacked, also the blank ones before an episode's first. A uniform
    background becomes small, and what stands out from it large.
    """
    x = x.astype(jnp.float32)
    if pixels == "unit":
        return x / 255.0
    mean, deviation = (f(x, axis=(1, 2, 3), keepdims=True) for f in (jnp.mean, jnp.std))
    return (x - mean) / jnp.maximum(deviation, _LEAST_DEVIATION)


class NatureCNN(nnx.Module):
    """The convolutions of Mnih 2015 (Nature 518, Methods): 32 8×8/4, 64 4×4/2, 64 3×3/1, dense; all rectify.

    Images ``[rows, H, W, C]`` of 0 … 255 to ``[rows, dense]``.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        rngs: nnx.Rngs,
        dense: int = 512,
        init: Init = "orthogonal",
        pixels: Pixels = "unit",
    ) -> None:
        make = kernel_init(init, _HIDDEN_GAIN)
        (height, width, channels), convs = shape, []
        for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            convs.append(
                nnx.Conv(
                    channels,
                    features,
                    (size, size),
                    stride,
                    padding="VALID",
                    kernel_init=make,
                    conv_general_dilated=conv_general_dilated,
                    rngs=rngs,
                )
            )
            height, width, channels = (height - size) // stride + 1, (width - size) // stride + 1, features
        self.convs = nnx.List(convs)
        self.dense = nnx.Linear(height * width * channels, dense, kernel_init=make, rngs=rngs)
        self.pixels = pixels
        self.out_features = dense

    def __call__(self, x: Array) -> Float[Array, "R D"]:
        """Rows of images to features."""
        x = scale_pixels(x, self.pixels)
        for conv in self.convs:
            x = jax.nn.relu(conv(x))
        return jax.nn.relu(self.dense(x.reshape(x.shape[0], -1)))


@dataclass(frozen=True)
class TorsoConfig:
    """Sizes of a torso; see ``NetworkConfig`` for their meaning."""

    hidden: tuple[int, ...] = (64, 64)
    activation: Activation = "tanh"
    init: Init = "orthogonal"
    cnn_dense: int = 512
    pixels: Pixels = "unit"
    context: int = 0
    prev_action_reward: bool = False


class Torso(nnx.Module):
    """Rows of ``Input`` to features ``[rows, out_features]``, chosen from the specs (see the module).

    The previous action (one-hot, bits, or tanh of a raw sample) and tanh of the reward are appended after the
    torso, as in Espeholt 2018 (Fig. 3); both are zero where ``first``.
    """

    def __init__(
        self,
        config: TorsoConfig,
        observation: Spec,
        action: Spec,
        rngs: nnx.Rngs,
        encoders: Encoders = MappingProxyType({}),
    ) -> None:
        self.context, self.observation = config.context, observation
        self.action = action if config.prev_action_reward else None
        named, chosen = names(observation), assign(observation, encoders)
        self.own = tuple(name in chosen for name, _ in named)
        self.encoders = nnx.List(
            [
                make_checked(chosen[name], name, leaf, config.context, rngs)
                for name, leaf in named
                if name in chosen
            ]
        )
        specs = [leaf for name, leaf in named if name not in chosen]
        images = [image_shape(leaf, config.context) for leaf in specs]
        self.cnns = nnx.List(
            [
                NatureCNN(shape, rngs, config.cnn_dense, config.init, config.pixels)
                for shape in images
                if shape is not None
            ]
        )
        flat = sum(width(leaf) for leaf, shape in zip(specs, images, strict=True) if shape is None)
        flat *= config.context + 1
        self.mlp = MLP(flat, config.hidden, rngs, config.activation, config.init) if flat else None
        self.out_features = sum(module.out_features for module in self.encoders)
        self.out_features += len(self.cnns) * config.cnn_dense + (self.mlp.out_features if self.mlp else 0)
        if config.prev_action_reward:
            self.out_features += sum(width(leaf) for _, leaf in leaves(action)) + 1

    def __call__(self, x: Any) -> Float[Array, "R F"]:
        """Rows of ``Input`` to features."""
        cnns, encoders, parts, flat = iter(self.cnns), iter(self.encoders), [], []
        for own, (leaf, value) in zip(self.own, _with_leaves(self.observation, x.observation), strict=True):
            if own:
                parts.append(next(encoders)(value))
            elif image_shape(leaf, self.context) is None:
                flat.append(encode(leaf, value).reshape(value.shape[0], -1))
            else:
                parts.append(next(cnns)(to_image(leaf, value, self.context)))
        if self.mlp is not None:
            parts.append(self.mlp(jnp.concatenate(flat, axis=-1)))
        if self.action is not None:
            parts.append(encode_previous(self.action, x.prev_action, x.reward, x.first))
        return jnp.concatenate(parts, axis=-1)


def encode_previous(
    action_spec: Spec, prev_action: PyTree, reward: Array, first: Array
) -> Float[Array, "R P"]:
    """The previous action and reward as bounded features, zero where ``first``."""
    parts = [
        jnp.tanh(encode(leaf, value)) if isinstance(leaf, BoxSpec) else encode(leaf, value)
        for leaf, value in _with_leaves(action_spec, prev_action)
    ]
    features = jnp.concatenate([*parts, jnp.tanh(reward.astype(jnp.float32))[:, None]], axis=-1)
    return jnp.where(first[:, None], 0.0, features)


def encode(leaf: Leaf, value: Array) -> Float[Array, "..."]:
    """Values ``[rows, (n+1,) *shape]`` of a leaf as floats ``[rows, (n+1,) width]``, own axes merged."""
    if isinstance(leaf, DiscreteSpec):
        return jax.nn.one_hot(value, leaf.n)
    if isinstance(leaf, MultiDiscreteSpec):
        return jnp.concatenate([jax.nn.one_hot(value[..., i], n) for i, n in enumerate(leaf.nvec)], axis=-1)
    return value.astype(jnp.float32).reshape(*value.shape[: value.ndim - len(leaf.shape)], -1)


def width(leaf: Leaf) -> int:
    """Number of features of ``encode``."""
    if isinstance(leaf, DiscreteSpec):
        return leaf.n
    return sum(leaf.nvec) if isinstance(leaf, MultiDiscreteSpec) else int(np.prod(leaf.shape))


def image_shape(leaf: Leaf, context: int = 0) -> tuple[int, int, int] | None:
    """``(H, W, channels)`` of the stacked image that ``leaf`` is, or None if it is no image."""
    if not isinstance(leaf, BoxSpec) or leaf.dtype != np.uint8 or len(leaf.shape) not in (2, 3):
        return None
    shape = leaf.shape if len(leaf.shape) == 3 else (*leaf.shape, 1)
    if min(shape[:2]) < SMALLEST_IMAGE:
        shape = (shape[1], shape[2], shape[0])
        if shape[2] > _MOST_CHANNELS_IN_FRONT or min(shape[:2]) < SMALLEST_IMAGE:
            return None
    return shape[0], shape[1], shape[2] * (context + 1)


def to_image(leaf: Leaf, value: Array, context: int = 0) -> Array:
    """Values ``[rows, (n+1,) *shape]`` of an image leaf as ``[rows, H, W, channels]``, oldest first."""
    shape = image_shape(leaf, context)
    assert shape is not None
    rows = value.shape[0]
    if len(leaf.shape) == 2 or leaf.shape[:2] != shape[:2]:
        return jnp.moveaxis(value.reshape(rows, -1, *shape[:2]), 1, -1)
    stacked = value.reshape(rows, context + 1, *leaf.shape)
    return jnp.moveaxis(stacked, 1, -2).reshape(rows, *shape)


def _with_leaves(spec: Spec, value: PyTree) -> list[tuple[Leaf, Array]]:
    """Pairs of leaf and its value, in the order of ``spaces.leaves``."""
    paired: list[tuple[str, Any]] = leaves(map_leaves(lambda leaf, v: _Pair(leaf, v), spec, value))
    return [(pair.leaf, pair.value) for _, pair in paired]


@dataclass(frozen=True)
class _Pair:
    """Not a tuple, which ``leaves`` would take apart."""

    leaf: Leaf
    value: Any
