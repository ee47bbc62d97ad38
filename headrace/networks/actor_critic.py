"""The actor–critic network: a torso chosen from the spec, perhaps a recurrent core, and two heads."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from headrace.errors import ConfigError
from headrace.networks.cores import GRU, LSTM, Core
from headrace.networks.encoders import Encoders, loaded
from headrace.networks.network import Input, MakeModule, Network, feed_forward, pair, recurrent
from headrace.networks.torsos import Activation, Init, Pixels, Torso, TorsoConfig, kernel_init
from headrace.settings.primitives import JSON_OBJECT
from headrace.spaces import Spec

POLICY_GAIN = 0.01
"""A fresh policy is near uniform, whatever it sees."""
VALUE_GAIN = 1.0


class ActorCriticOutput(NamedTuple):
    """Parameters of the policy's distribution f32 ``[..., P]`` and state values f32 ``[...]``."""

    policy: Float[Array, "... P"]
    value: Float[Array, "..."]


@dataclass(frozen=True)
class NetworkConfig:
    """Shape of a network."""

    hidden: tuple[int, ...] = (64, 64)
    """Layers of the perceptron over everything that is not an image; empty for none."""
    activation: Activation = "tanh"
    """Activation of the perceptron; the image encoder always rectifies."""
    init: Init = "orthogonal"
    """Initial weights: orthogonal (gain √2), or LeCun normal."""
    core: Literal["none", "lstm", "gru"] = "none"
    """Recurrent memory between torso and heads."""
    core_size: int = 128
    """Units of the recurrent memory, where there is one."""
    frame_stack: int = 1
    """Observations the network sees at once, the present one included."""
    prev_action_reward: bool = False
    """Append the previous action and tanh of the reward to the torso's features."""
    separate_value: bool = False
    """Give the value a torso (and core) of its own instead of sharing the policy's."""
    cnn_dense: int = 512
    """Features that the image encoder gives for each image."""
    pixels: Pixels = "unit"
    """What the image encoder sees: pixels ÷ 255, or each image (or stack of frames) less its mean, ÷ its deviation."""

    encoders: Annotated[dict[str, str], JSON_OBJECT] = field(default_factory=dict, hash=False)
    """Encoders of your own for parts of the observation, as a JSON object: '{"image": "my_module:MyCNN"}'."""

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        for name, reference in self.encoders.items():
            if not isinstance(reference, str) or ":" not in reference:
                raise ConfigError(
                    f"network.encoders[{name!r}] is {reference!r}; expected my_module:MakeEncoder as text"
                )
        for name, kind in (
            ("activation", Activation),
            ("init", Init),
            ("pixels", Pixels),
            ("core", Literal["none", "lstm", "gru"]),
        ):
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed:
                raise ConfigError(f"network.{name} is {value!r}; expected one of {', '.join(allowed)}")
        for name in ("core_size", "frame_stack", "cnn_dense"):
            if getattr(self, name) < 1:
                raise ConfigError(f"network.{name} is {getattr(self, name)}; expected at least 1")
        if any(size < 1 for size in self.hidden):
            raise ConfigError(
                f"network.hidden is {self.hidden}; expected sizes of at least 1, or () for no layers"
            )

    @property
    def context(self) -> int:
        """Rows before the present one that are needed."""
        return self.frame_stack - 1

    def torso(
        self, observation_spec: Spec, action_spec: Spec, encoders: Encoders = MappingProxyType({})
    ) -> MakeModule:
        """Maker of the torso for these specs; any agent may put its own head on it with ``build``.

        ``encoders`` go before those of the settings.
        """
        own = {**loaded(self.encoders), **encoders}
        config = TorsoConfig(
            self.hidden,
            self.activation,
            self.init,
            self.cnn_dense,
            self.pixels,
            self.context,
            self.prev_action_reward,
        )
        return lambda rngs: Torso(config, observation_spec, action_spec, rngs, own)


class _WithHead(nnx.Module):
    def __init__(self, torso: Any, make_head: Callable[[int, nnx.Rngs], nnx.Module], rngs: nnx.Rngs) -> None:
        self.torso = torso
        self.head: Any = make_head(torso.out_features, rngs)

    def __call__(self, x: Input) -> Any:
        return self.head(self.torso(x))


def build(
    config: NetworkConfig,
    observation_spec: Spec,
    action_spec: Spec,
    make_head: Callable[[int, nnx.Rngs], nnx.Module],
    encoders: Encoders = MappingProxyType({}),
) -> Network:
    """Torso and core of ``config`` with a head of the caller's.

    Args:
        config: ``separate_value`` is the caller's to honour.
        observation_spec: what is seen.
        action_spec: the agent's actions, for ``prev_action_reward``.
        make_head: ``(in_features, rngs) -> module`` from features ``[rows, in_features]`` to the output.
        encoders: of one's own for parts of the observation, see ``encoders``.

    Raises:
        ConfigError: an encoder is for nothing that is seen, or does not fit it.
    """
    torso = config.torso(observation_spec, action_spec, encoders)
    if config.core == "none":
        return feed_forward(lambda rngs: _WithHead(torso(rngs), make_head, rngs), config.context)
    core: Core = LSTM(config.core_size) if config.core == "lstm" else GRU(config.core_size)
    return recurrent(torso, core, lambda rngs: make_head(core.size, rngs), config.context)


def linear_head(size: int, gain: float, init: Init = "orthogonal") -> Callable[[int, nnx.Rngs], nnx.Module]:
    """Maker of a linear head of ``size`` outputs with small or large initial weights."""
    return lambda features, rngs: nnx.Linear(features, size, kernel_init=kernel_init(init, gain), rngs=rngs)


class _ActorCriticHead(nnx.Module):
    def __init__(self, features: int, policy_size: int, init: Init, rngs: nnx.Rngs) -> None:
        self.policy: Any = linear_head(policy_size, POLICY_GAIN, init)(features, rngs)
        self.value: Any = linear_head(1, VALUE_GAIN, init)(features, rngs)

    def __call__(self, features: Array) -> ActorCriticOutput:
        return ActorCriticOutput(self.policy(features), jnp.squeeze(self.value(features), -1))


def actor_critic(
    config: NetworkConfig,
    observation_spec: Spec,
    action_spec: Spec,
    policy_size: int,
    encoders: Encoders = MappingProxyType({}),
) -> Network:
    """Policy and value of an observation.

    Args:
        config: shape of the network.
        observation_spec: what is seen.
        action_spec: the agent's actions.
        policy_size: P, the number of parameters of the policy's distribution.
        encoders: of one's own for parts of the observation, as of ``build``.

    Returns:
        A network whose output is ``ActorCriticOutput``; its carry is ``()`` without a core.

    Raises:
        ValueError: ``policy_size`` below 1.
    """
    if policy_size < 1:
        raise ValueError(
            f"policy_size is {policy_size}; expected the distribution's number of parameters, at least 1"
        )
    if not config.separate_value:
        return build(
            config,
            observation_spec,
            action_spec,
            lambda features, rngs: _ActorCriticHead(features, policy_size, config.init, rngs),
            encoders,
        )
    policy, value = (
        build(config, observation_spec, action_spec, linear_head(size, gain, config.init), encoders)
        for size, gain in ((policy_size, POLICY_GAIN), (1, VALUE_GAIN))
    )
    joined = pair(policy, value, lambda p, v: ActorCriticOutput(p, jnp.squeeze(v, -1)))
    if config.core != "none":
        return joined
    return _memoryless(joined)


def _memoryless(network: Network) -> Network:
    """A pair without memory carries ``()``, as other networks without memory do."""

    def forget(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, x, carry: (f(params, x, ((), ()))[0], carry)

    return Network(network.init, lambda b: (), forget(network.step), forget(network.unroll), network.context)
