"""IMPALA: actor-critic on trajectories of a policy some updates old, corrected by V-trace.

Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures",
section 4. With behaviour policy μ, policy π, value V, V-trace target vs and advantage A (``ops.vtrace``), summed over valid
transitions k:

    loss = Σ −log π(a_k|x_k) · A_k + c_v · ½ (vs_k − V(x_k))² − c_H · H[π(x_k)] + c_KL · KL(μ_k ‖ π(x_k))

divided by the number of valid transitions where ``reduction = mean``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from headrace.agents import optim
from headrace.agents.agent import ActInput, Agent, ExperienceSpec, Phase, Report
from headrace.agents.optim import OptimizerConfig
from headrace.envs.contract import EnvSpec
from headrace.errors import ConfigError
from headrace.networks.actor_critic import ActorCriticOutput, NetworkConfig, actor_critic
from headrace.networks.encoders import Encoders
from headrace.networks.network import Input, Network
from headrace.networks.trajectory import input_of_trajectory, unroll_after_burn_in
from headrace.ops.distributions import Distribution, distribution, masked
from headrace.ops.rewards import reward_transform
from headrace.ops.vtrace import VTrace, vtrace
from headrace.types import Array, Progress, PyTree, Trajectory, transition_masks


@dataclass(frozen=True)
class ImpalaConfig:
    """IMPALA's settings. The defaults are SEED RL's V-trace agent's where it has them."""

    discount: float = 0.99
    """γ, per agent step."""
    unroll_length: int = 20
    """New rows of a trajectory."""
    batch_size: int = 32
    """Trajectories of a batch."""
    burn_in: int = 0
    """Rows before the new ones that only warm the recurrent state, without gradient."""
    micro_batches: int = 1
    """Parts of a batch whose gradients are computed one after another and added."""
    vtrace_lambda: float = 1.0
    """λ of V-trace: multiplies the trace coefficients c."""
    clip_rho: float | None = 1.0
    """ρ̄: bound of the importance ratio in the temporal difference; None does not clip."""
    clip_pg_rho: float | None = 1.0
    """ρ̄_pg: bound of the importance ratio in the policy gradient; None does not clip."""
    clip_c: float | None = 1.0
    """c̄: bound of the trace coefficients; None does not clip."""
    baseline_cost: float = 0.5
    """Weight of the value loss."""
    entropy_cost: float = 0.00025
    """Weight of the entropy bonus; with a target, where the weight starts."""
    target_entropy: float | None = None
    """Adapt the entropy weight so that the mean entropy (nats) nears this: a Lagrange multiplier. None: fixed."""
    entropy_speed: float = 10.0
    """How fast the logarithm of the adapted entropy weight moves."""
    kl_cost: float = 0.0
    """Weight of KL(μ‖π), which keeps the policy near the one that acted."""
    reduction: Literal["mean", "sum"] = "mean"
    """Whether gradients are divided by the number of valid transitions."""
    reward_clip: Literal["none", "abs_one", "soft_asymmetric", "max_abs"] = "none"
    """Transform of the trained reward: clip to ±1, tanh(r/5)·5 with negatives ×0.3, or clip to ±max_abs_reward."""
    max_abs_reward: float | None = None
    """Bound of the trained reward; belongs to reward_clip max_abs alone."""
    box_policy: Literal["clipped_normal", "tanh_normal"] = "clipped_normal"
    """Policy over Box actions: a normal clipped to the box, or one squashed into it by tanh."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(b1=0.0, eps=3.1e-7))
    """The optimiser."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """The network."""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained on."""
        if not 0 <= self.discount <= 1 or not 0 <= self.vtrace_lambda <= 1:
            raise ConfigError(
                f"discount {self.discount}, vtrace_lambda {self.vtrace_lambda}; expected both within 0 … 1"
            )
        if min(self.unroll_length, self.batch_size, self.micro_batches) < 1 or self.burn_in < 0:
            raise ConfigError(
                f"unroll_length {self.unroll_length}, batch_size {self.batch_size}, micro_batches {self.micro_batches}, "
                f"burn_in {self.burn_in}; expected at least 1, 1, 1 and 0"
            )
        if self.batch_size % self.micro_batches:
            raise ConfigError(
                f"batch_size {self.batch_size} is not a multiple of micro_batches {self.micro_batches}; change one of them"
            )
        if min(self.entropy_cost, self.kl_cost, self.baseline_cost) < 0:
            raise ConfigError("entropy_cost, kl_cost and baseline_cost must not be negative")
        clips = (self.clip_rho, self.clip_pg_rho, self.clip_c)
        if any(clip is not None and clip <= 0 for clip in clips) or self.entropy_speed <= 0:
            raise ConfigError(
                f"clip_rho {self.clip_rho}, clip_pg_rho {self.clip_pg_rho}, clip_c {self.clip_c}, entropy_speed "
                f"{self.entropy_speed}; expected each above 0 (or None for no clip)"
            )
        if self.target_entropy is not None and self.entropy_cost <= 0:
            raise ConfigError(
                "target_entropy adapts entropy_cost from where it starts; give entropy_cost > 0"
            )


class ImpalaState(NamedTuple):
    """Learner state.

    Attributes:
        params: of the network.
        log_entropy_cost: the logarithm of an adapted entropy weight ÷ its speed.
        opt_state: of the params' optimiser.
        entropy_opt_state: of the entropy weight's, Adam with its usual settings.
    """

    params: PyTree
    log_entropy_cost: Array
    opt_state: Any
    entropy_opt_state: Any


class Terms(NamedTuple):
    """What a loss is made from, rows of transitions ``[T, B]`` after burn-in.

    Attributes:
        policy: distribution parameters of π ``[T, B, P]``, under the rows' action masks where there are any.
        behaviour: of μ ``[T, B, P]``.
        action: ``[T, B, ...]``.
        value: V(x_k) ``[T, B]``.
        log_rho: log π − log μ of the action ``[T, B]``, without gradient.
        vtrace: targets and advantages ``[T, B]``, without gradient.
        weight: f32 ``[T, B]``, 0 for transitions that join two episodes.
        entropy_cost: f32 scalar.
    """

    policy: Array
    behaviour: Array
    action: PyTree
    value: Array
    log_rho: Array
    vtrace: VTrace
    weight: Array
    entropy_cost: Array


Loss: TypeAlias = Callable[[ImpalaConfig, Distribution, Terms], tuple[Array, dict[str, Array]]]
"""``(config, distribution, terms) -> (loss sum, metric sums)``; pass another to ``impala`` to change what is minimised."""


def impala_loss(config: ImpalaConfig, dist: Distribution, terms: Terms) -> tuple[Array, dict[str, Array]]:
    """The loss of the module docstring as a sum over transitions, and named sums to report."""
    log_prob = dist.log_prob(terms.policy, terms.action)
    entropy = dist.entropy(terms.policy)
    kl = dist.kl(terms.behaviour, terms.policy)
    policy_loss = -log_prob * terms.vtrace.pg_advantages
    value_loss = 0.5 * jnp.square(terms.vtrace.vs_tm1 - terms.value)
    rows = (
        policy_loss
        + config.baseline_cost * value_loss
        - jax.lax.stop_gradient(terms.entropy_cost) * entropy
        + config.kl_cost * kl
    )
    named = {
        "loss/total": rows,
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "entropy": entropy,
        "kl": kl,
        "value_mean": terms.value,
        "rho_clipped": jnp.exp(jnp.minimum(jnp.where(terms.weight > 0, terms.log_rho, 0.0), 0.0)),
    }
    sums = {name: jnp.sum(terms.weight * x) for name, x in named.items()}
    return sums["loss/total"], sums


def impala(
    config: ImpalaConfig,
    spec: EnvSpec,
    *,
    network: Network | None = None,
    encoders: Encoders | None = None,
    loss: Loss = impala_loss,
) -> Agent:
    """The IMPALA agent.

    Args:
        config: settings.
        spec: of the environment.
        network: gives ``ActorCriticOutput`` with ``distribution(spec.action, box=config.box_policy).size`` policy
            parameters, in place of the one that ``config.network`` describes.
        encoders: of one's own for parts of the observation (``networks.encoders``), beside ``config.network.encoders``.
        loss: what is minimised.

    Raises:
        ConfigError: burn-in with a network without recurrence, encoders beside a network, or encoders that do not fit.
    """
    dist = distribution(spec.action, box=config.box_policy)
    if network is None:
        network = actor_critic(config.network, spec.observation, spec.action, dist.size, encoders or {})
    elif encoders:
        raise ConfigError(
            "impala: got a network and encoders; encoders belong to the built-in network, pass one of them"
        )
    if config.burn_in and not jax.tree.leaves(jax.eval_shape(lambda: network.initial_carry(1))):
        raise ConfigError(
            f"burn_in {config.burn_in} with a network without recurrence; set network.core or burn_in 0"
        )
    transform = reward_transform(config.reward_clip, config.max_abs_reward)

    def init(key: Array) -> ImpalaState:
        params = network.init(key)
        log_cost = (
            np.log(config.entropy_cost) / config.entropy_speed if config.target_entropy is not None else 0.0
        )
        log_cost = jnp.asarray(log_cost, jnp.float32)
        opt_state = optim.make_optimizer(config.optimizer).init(params)
        return ImpalaState(params, log_cost, opt_state, optax.scale_by_adam().init(log_cost))

    return Agent(
        init=init,
        policy_params=lambda state: state.params,
        initial_carry=network.initial_carry,
        act=_act(network, dist),
        action=dist.zeros(),
        extras=np.zeros(dist.size, np.float32),
        phases=(Phase(_grads(config, network, dist, loss, transform), _apply(config)),),
        to_env=dist.to_env,
        value=lambda params, carry, x: network.step(params, _input(x), carry)[0].value,
        experience=ExperienceSpec(
            length=config.burn_in + config.unroll_length,
            batch_size=config.batch_size,
            overlap=config.burn_in,
            burn_in=config.burn_in,
            context=network.context,
            micro_batches=config.micro_batches,
            reward_transform=transform,
        ),
    )


def _input(x: ActInput) -> Input:
    return Input(x.timestep.observation, x.prev_action, x.timestep.reward, x.timestep.first)


def _act(network: Network, dist: Distribution) -> Callable[..., tuple[tuple[PyTree, PyTree], PyTree]]:
    """Sample where ``explore`` is above 0, else the mode; extras are the behaviour distribution's parameters, masked."""

    def act(params: PyTree, carry: PyTree, x: ActInput, keys: Array) -> tuple[tuple[PyTree, PyTree], PyTree]:
        out, carry = network.step(params, _input(x), carry)
        policy = masked(dist, out.policy, x.timestep.extra)
        sampled = jax.vmap(dist.sample)(policy, keys)
        greedy = dist.mode(policy)
        action = jax.tree.map(
            lambda s, g: jnp.where(x.explore.reshape(-1, *[1] * (s.ndim - 1)) > 0, s, g), sampled, greedy
        )
        return (action, policy), carry

    return act


def _grads(
    config: ImpalaConfig,
    network: Network,
    dist: Distribution,
    loss: Loss,
    transform: Callable[[Array], Array],
) -> Callable[[ImpalaState, Trajectory, Array], tuple[PyTree, Array, Report]]:
    def loss_of(
        params: PyTree, state: ImpalaState, batch: Trajectory
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        out: ActorCriticOutput = unroll_after_burn_in(
            network, params, input_of_trajectory(batch), batch.carry, config.burn_in
        )
        rows = jax.tree.map(lambda x: x[config.burn_in :], batch.rows)
        terms = _terms(config, dist, transform, out, rows, batch.weight, _entropy_cost(config, state))
        total, sums = loss(config, dist, terms)
        return total, (jnp.sum(terms.weight), sums)

    def grads(state: ImpalaState, batch: Trajectory, key: Array) -> tuple[PyTree, Array, Report]:
        del key
        gradient, (weight_sum, sums) = jax.grad(loss_of, has_aux=True)(state.params, state, batch)
        return {"params": gradient, "entropy": sums["entropy"]}, weight_sum, Report(sums, {})

    return grads


def _terms(
    config: ImpalaConfig,
    dist: Distribution,
    transform: Callable[[Array], Array],
    out: ActorCriticOutput,
    rows: Any,
    weight: Array,
    entropy_cost: Array,
) -> Terms:
    """Rows and outputs ``[T+1, B]`` as the terms of transitions ``[T, B]``."""
    action, behaviour = jax.tree.map(lambda x: x[:-1], (rows.action, rows.extras))
    discount_t, valid = transition_masks(rows.timestep, config.discount)
    extra = jax.tree.map(lambda x: x[:-1], rows.timestep.extra)
    policy, value = masked(dist, out.policy[:-1], extra), out.value[:-1]
    log_rho = dist.log_prob(policy, action) - dist.log_prob(behaviour, action)

    def one_stream(*x: Array) -> VTrace:
        return vtrace(
            *x,
            lambda_=config.vtrace_lambda,
            clip_rho=config.clip_rho,
            clip_pg_rho=config.clip_pg_rho,
            clip_c=config.clip_c,
        )

    targets = jax.vmap(one_stream, in_axes=1, out_axes=1)(
        *jax.lax.stop_gradient(
            (value, out.value[1:], transform(rows.timestep.reward[1:]), discount_t, log_rho, valid)
        )
    )
    return Terms(
        policy,
        behaviour,
        action,
        value,
        jax.lax.stop_gradient(log_rho),
        targets,
        valid * weight,
        entropy_cost,
    )


def _entropy_cost(config: ImpalaConfig, state: ImpalaState) -> Array:
    if config.target_entropy is None:
        return jnp.float32(config.entropy_cost)
    return jnp.exp(state.log_entropy_cost * config.entropy_speed)


def _apply(
    config: ImpalaConfig,
) -> Callable[[ImpalaState, PyTree, Array, Progress], tuple[ImpalaState, dict[str, Array]]]:
    def apply(
        state: ImpalaState, grad_sum: PyTree, weight_sum: Array, progress: Progress
    ) -> tuple[ImpalaState, dict[str, Array]]:
        count = jnp.maximum(weight_sum, 1.0)
        divisor = count if config.reduction == "mean" else 1.0
        gradient = jax.tree.map(lambda g: g / divisor, grad_sum["params"])
        params, opt_state, metrics = optim.step(
            config.optimizer, state.params, gradient, state.opt_state, progress
        )
        cost = _entropy_cost(config, state)
        log_cost, dual_state = state.log_entropy_cost, state.entropy_opt_state
        if config.target_entropy is not None:
            # d/dp of exp(p · speed) · (H − target): the weight grows while the entropy is below its target.
            excess = grad_sum["entropy"] / count - config.target_entropy
            slope = config.entropy_speed * cost * excess
            direction, dual_state = optax.scale_by_adam().update(slope, dual_state)
            log_cost -= optim.learning_rate(config.optimizer, progress) * direction
        state = ImpalaState(params, log_cost, opt_state, dual_state)
        return state, {**metrics, "entropy_cost": cost}

    return apply
