"""A trained policy, for one unbatched observation at a time, and the evaluation of a run."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from headrace import spaces
from headrace.agents.agent import ActInput, Agent, Params
from headrace.agents.registry import build_agent
from headrace.checkpoint.tree import unflatten
from headrace.envs.agree import check_agreement
from headrace.envs.contract import EnvSpec
from headrace.envs.masks import Masks
from headrace.errors import ConfigError
from headrace.inference.actor import Published
from headrace.inference.slots import Slots, fresh_slots
from headrace.networks.context import stack_step
from headrace.runtime.evaluate import Evaluator
from headrace.runtime.snapshot import open_checkpoints
from headrace.runtime.survey import env_spec
from headrace.runtime.targets import elsewhere, of_group, survey_targets
from headrace.settings.config import Config
from headrace.settings.fields import replace_fields
from headrace.types import Progress, PyTree, TimeStep


class PolicyCarry(NamedTuple):
    """What a policy remembers between two steps of one environment.

    Attributes:
        slots: memory of one slot, the previous action included.
        fresh: nothing was seen yet, so the next observation is an episode's first.
    """

    slots: Slots
    fresh: bool


class Policy:
    """A policy of a run: observations and actions are the environment's own."""

    def __init__(self, config: Config, agent: Agent, spec: EnvSpec, params: Params, step: int = 0) -> None:
        """Made by ``headrace.load``; ``step`` names the checkpoint."""
        self.config, self.agent, self.spec, self.params, self.step = config, agent, spec, params, step
        self._masks = Masks(config.env.action_mask, spec.observation, spec.action, name=config.env.id)
        self._act = jax.jit(self._act_one)
        self._value = jax.jit(self._value_one)

    def published(self) -> Published:
        """The params as inference takes them, at the end of their run."""
        return Published(self.params, 0, Progress(np.float32(1), np.int32(0)))

    def initial_carry(self) -> PolicyCarry:
        """The carry before an episode."""
        return PolicyCarry(fresh_slots(self.agent, self.spec, np.zeros(1, np.uint32)), True)

    def act(
        self,
        observation: PyTree,
        carry: PolicyCarry,
        *,
        reward: float = 0.0,
        action_mask: PyTree = None,
        first: bool | None = None,
        explore: bool = False,
        key: Any = None,
    ) -> tuple[PyTree, PolicyCarry]:
        """The action for one observation.

        Args:
            observation: of the environment, without a leading axis.
            carry: from ``initial_carry`` or the last call.
            reward: received on arriving here.
            action_mask: as the environment's info has it (see ``envs.masks``), where that is where masks come from.
            first: whether the observation is of a reset; None: where the carry is fresh.
            explore: sample, in place of the most probable action.
            key: JAX key of the sample; needed with ``explore``.

        Returns:
            An action for ``env.step``, and the next carry.

        Raises:
            ValueError: ``explore`` without a key, an observation that is not one of the environment's, or a mask that
                is missing, wrong or not asked for.
        """
        if explore and key is None:
            raise ValueError(
                "explore=True samples an action and needs key=jax.random.key(…), another one each step"
            )
        first = carry.fresh if first is None else first
        timestep = self._timestep(observation, reward, first, action_mask)
        key = jax.random.key(0) if key is None else key
        action, slots = self._act(self.params, carry.slots, timestep, jnp.full(1, float(explore)), key)
        env_action = jax.tree.map(
            lambda x: np.asarray(x)[0], self.agent.to_env(jax.tree.map(np.asarray, action))
        )
        return env_action, PolicyCarry(slots, False)

    def value(self, observation: PyTree, carry: PolicyCarry, *, action_mask: PyTree = None) -> float:
        """The value of one observation, where the agent has one; ``action_mask`` as of ``act``.

        Raises:
            ConfigError: it has none.
        """
        if self.agent.value is None:
            raise ConfigError("this agent has no state value")
        timestep = self._timestep(observation, 0.0, carry.fresh, action_mask)
        return float(self._value(self.params, carry.slots, timestep)[0])

    def _timestep(self, observation: PyTree, reward: float, first: bool, action_mask: PyTree) -> TimeStep:
        try:
            one = spaces.map_leaves(_row, self.spec.observation, observation)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"the observation does not fit {self.spec.observation}: {type(error).__name__}: {error}"
            ) from error
        no = np.zeros(1, bool)
        reward = 0.0 if first else reward
        seen = spaces.to_agent(self.spec.observation, one)
        extra = self._extra(seen, action_mask)
        return TimeStep(seen, np.full(1, reward, np.float32), np.full(1, first), no, no, extra)

    def _extra(self, seen: PyTree, action_mask: PyTree) -> PyTree:
        source, extra = self.config.env.action_mask, self._masks.blank(1)
        if self._masks.in_info:
            if action_mask is None:
                raise ValueError(f"the policy was trained with masks from {source}; expected action_mask=")
            self._masks.put(extra, 0, action_mask)
        elif action_mask is not None:
            raise ValueError(f"got action_mask=, but env.action_mask is {source}; leave it out")
        return self._masks.of_observation(extra, seen, np.zeros(1, bool))

    def _seen(self, slots: Slots, timestep: TimeStep, explore: Any) -> tuple[ActInput, PyTree]:
        recent, observation = slots.recent, timestep.observation
        if self.agent.experience.context:
            observation, recent = stack_step(slots.recent, observation, timestep.first)
        return ActInput(timestep._replace(observation=observation), slots.prev_action, explore), recent

    def _act_one(
        self, params: Params, slots: Slots, timestep: TimeStep, explore: Any, key: Any
    ) -> tuple[PyTree, Slots]:
        x, recent = self._seen(slots, timestep, explore)
        (action, _), carry = self.agent.act(params, slots.carry, x, key[None])
        return action, slots._replace(carry=carry, recent=recent, prev_action=action)

    def _value_one(self, params: Params, slots: Slots, timestep: TimeStep) -> Any:
        assert self.agent.value is not None
        return self.agent.value(params, slots.carry, self._seen(slots, timestep, jnp.zeros(1))[0])


def _row(leaf: spaces.Leaf, value: Any) -> np.ndarray:
    value, shape = np.asarray(value), getattr(leaf, "env_shape", leaf.shape)
    if value.shape != shape:
        raise ValueError(f"got shape {value.shape}, expected {shape} without a leading axis")
    return value[None]


def load(run: str | Path, step: int | None = None) -> Policy:
    """The policy of a run.

    Args:
        run: directory of the run.
        step: of one of its checkpoints; None: the newest.

    Raises:
        RunDirectoryError: it is not a run, or has no such checkpoint.
    """
    with open_checkpoints(Path(run)) as (config, checkpointer):
        restored = checkpointer.restore(step)
    spec = env_spec(of_group(config, 0))
    agent = build_agent(config.agent, spec, config.build_agent)
    like = jax.eval_shape(lambda: agent.policy_params(agent.init(jax.random.key(0))))
    params = jax.tree.map(jnp.asarray, unflatten(like, restored.arrays["params"]))
    return Policy(config, agent, spec, params, restored.step)


def evaluate(
    run: str | Path,
    episodes: int = 20,
    seed: int | None = None,
    env_id: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Greedy episodes of a run's newest policy, on environments of their own.

    Args:
        run: directory of the run.
        episodes: how many on each of the run's ids and of ``eval.envs``, shared evenly among ``eval.num_envs``
            environments.
        seed: of the environments; None: the run's.
        env_id: of another environment to play on instead, whose spaces are those of the run's, with its own time limit.
        env_kwargs: its arguments; without ``env_id`` other arguments of the run's environment.

    Returns:
        episodes, return_mean, return_std, return_min, return_max, length_mean (raw rewards, steps), and
        ``episode/<name>``, the means of the numbers in the infos of last steps; likewise ``<name>/…`` of each id where the
        run has several, and of each of ``eval.envs``.

    Raises:
        ConfigError: another environment has other spaces, or ``env_kwargs`` could be of several.
    """
    if episodes < 1:
        raise ConfigError(f"episodes {episodes}; expected at least 1")
    policy = load(run)
    config = policy.config if seed is None else replace_fields(policy.config, {"seed": seed})
    spec = policy.spec
    if env_id is not None or env_kwargs is not None:
        config = _on_another(config, env_id, env_kwargs or {})
        spec = env_spec(config)
        check_agreement(policy.spec, spec, policy.config.env.ids[0], config.env.id)
    evaluator = Evaluator(config, policy.agent, survey_targets(config, spec))
    return evaluator.figures(policy.published(), episodes)


def _on_another(config: Config, env_id: str | None, kwargs: Mapping[str, Any]) -> Config:
    """``config`` with another environment, or with the run's own under other arguments, and no further evaluations."""
    if env_id is not None and "," in env_id:
        raise ConfigError(f"got the id {env_id!r} to evaluate on; expected one id")
    if env_id is None and len(config.env.ids) > 1:
        raise ConfigError(f"got arguments for one of {', '.join(config.env.ids)}; give the id as well")
    env = (
        replace(config.env, kwargs=dict(kwargs)) if env_id is None else elsewhere(config.env, env_id, kwargs)
    )
    return replace(config, eval=replace(config.eval, envs={}), env=env)
