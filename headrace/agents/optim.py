"""Optimisers that agents share: gradient sums to a step, with a learning rate that is a function of progress."""

from dataclasses import dataclass
from typing import Literal

import jax
import optax

from headrace.errors import ConfigError
from headrace.types import Array, Progress, PyTree


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser of a set of params."""

    name: Literal["adam", "rmsprop"] = "adam"
    """Adam (Kingma & Ba 2015) or RMSProp without centring."""
    learning_rate: float = 4.8e-4
    """Learning rate at the start of the run."""
    final_fraction: float = 0.0
    """The rate falls linearly to this fraction of itself at the end of the run; 1 keeps it constant."""
    b1: float = 0.9
    """Adam: decay of the first moment."""
    b2: float = 0.999
    """Adam: decay of the second moment."""
    rms_decay: float = 0.99
    """RMSProp: decay of the squared gradient."""
    momentum: float = 0.0
    """RMSProp: momentum; 0 is none."""
    eps: float = 1e-8
    """Added to the denominator (outside the root for Adam, inside it for RMSProp)."""
    max_grad_norm: float | None = None
    """Clip the gradient to this global norm; None does not clip."""

    def __post_init__(self) -> None:
        """Refuse rates and norms that cannot be meant."""
        if self.learning_rate <= 0 or not 0 <= self.final_fraction <= 1:
            raise ConfigError(
                f"learning_rate {self.learning_rate} with final_fraction {self.final_fraction}; expected a positive "
                f"rate and a fraction within 0 … 1"
            )
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ConfigError(
                f"max_grad_norm {self.max_grad_norm}; expected a positive norm, or None for no clipping"
            )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping and scaling of gradients, without the learning rate (see ``learning_rate``)."""
    if config.name == "adam":
        scale = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    else:
        scale = optax.scale_by_rms(decay=config.rms_decay, eps=config.eps, eps_in_sqrt=True)
        if config.momentum:
            scale = optax.chain(scale, optax.trace(decay=config.momentum))
    if config.max_grad_norm is None:
        return scale
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), scale)


def learning_rate(config: OptimizerConfig, progress: Progress) -> Array:
    """Rate at ``progress``: linear from ``learning_rate`` to ``final_fraction`` of it."""
    return config.learning_rate * (1.0 + (config.final_fraction - 1.0) * progress.fraction)


def step(
    config: OptimizerConfig, params: PyTree, gradient: PyTree, state: optax.OptState, progress: Progress
) -> tuple[PyTree, optax.OptState, dict[str, Array]]:
    """One step of gradient descent; returns params, optimiser state and the metrics of the step."""
    updates, state = make_optimizer(config).update(gradient, state, params)
    rate = learning_rate(config, progress)
    params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
    return params, state, {"grad_norm": optax.tree.norm(gradient), "learning_rate": rate}
