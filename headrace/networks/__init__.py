"""Networks: flax.nnx modules behind pure functions. Start with ``network.py``."""

from headrace.networks.actor_critic import ActorCriticOutput, NetworkConfig, actor_critic, build, linear_head
from headrace.networks.context import stack_sequence, stack_step, zero_recent
from headrace.networks.cores import GRU, LSTM, Core
from headrace.networks.encoders import Encoders, MakeEncoder
from headrace.networks.network import Encoder, Input, Network, Params, feed_forward, pair, recurrent
from headrace.networks.torsos import MLP, NatureCNN, Torso, TorsoConfig

__all__ = [
    "GRU",
    "LSTM",
    "MLP",
    "ActorCriticOutput",
    "Core",
    "Encoder",
    "Encoders",
    "Input",
    "MakeEncoder",
    "NatureCNN",
    "Network",
    "NetworkConfig",
    "Params",
    "Torso",
    "TorsoConfig",
    "actor_critic",
    "build",
    "feed_forward",
    "linear_head",
    "pair",
    "recurrent",
    "stack_sequence",
    "stack_step",
    "zero_recent",
]
