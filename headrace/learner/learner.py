"""The learner: one batch after another through the compiled update, params published with a version."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from headrace.agents.agent import Agent, Update
from headrace.errors import ConfigError, NonFiniteError
from headrace.experience.room import Batch
from headrace.inference.actor import Published
from headrace.learner.stages import compile_update, copy_params
from headrace.seeds import Role, stream_seed
from headrace.types import Progress


@dataclass(frozen=True)
class LearnerConfig:
    """The learner's settings."""

    staging: int = 1
    """Batches collated and put on the device ahead of the one trained on (threads; the sync runner stages none)."""
    max_nonfinite: int = 10
    """Updates in a row with a non-finite loss or gradient, each skipped, after which the run stops with an error."""

    def __post_init__(self) -> None:
        """Refuse negative depths."""
        if self.staging < 0 or self.max_nonfinite < 1:
            raise ConfigError(
                f"staging {self.staging}, max_nonfinite {self.max_nonfinite}; expected staging >= 0 and max_nonfinite >= 1"
            )


class Learned(NamedTuple):
    """An update on its way: device metrics, and what the host knew of the batch.

    Attributes:
        update: its result; the metrics are read when they are needed.
        published: a copy of the params after it.
        batch: ranges and lags.
        learned_steps: steps learned from since the start, this batch included.
    """

    update: Update
    published: Published
    batch: Batch
    learned_steps: int


class Learner:
    """Owns the learner state. ``dispatch`` starts an update and returns at once; ``read`` waits for its metrics."""

    def __init__(self, agent: Agent, seed: int, total_steps: int, config: LearnerConfig) -> None:
        """Initialise the state from the run's seed."""
        self._update = compile_update(agent)
        self._agent, self._total_steps, self._config = agent, total_steps, config
        self._key = jax.random.key(stream_seed(seed, Role.LEARNER))
        # Compiled, because a library's initialiser may dispatch hundreds of small programs.
        self.state = jax.jit(agent.init)(jax.random.key(stream_seed(seed, Role.INIT)))
        self.updates = 0
        self.learned_steps = 0
        self._nonfinite_in_a_row = 0

    def progress(self) -> Progress:
        """Where the run stands now."""
        fraction = min(self.learned_steps / self._total_steps, 1.0)
        return Progress(np.float32(fraction), np.int32(self.updates))

    def publish(self) -> Published:
        """A copy of the params that the next update does not donate, with its version."""
        return Published(copy_params(self._agent.policy_params(self.state)), self.updates, self.progress())

    def dispatch(self, batch: Batch) -> Learned:
        """Start the update on ``batch`` and the copy of its params."""
        key = jax.random.fold_in(self._key, self.updates)
        update = self._update(self.state, batch.trajectory, self.progress(), key)
        self.state = update.state
        self.updates += 1
        self.learned_steps += batch.steps
        return Learned(update._replace(state=None), self.publish(), batch, self.learned_steps)

    def read(self, learned: Learned) -> dict[str, float]:
        """Wait for the metrics of an update.

        Raises:
            NonFiniteError: the loss or gradient was not finite, ``max_nonfinite`` times in a row.
        """
        metrics = {k: float(v) for k, v in jax.device_get(learned.update.metrics).items()}
        skipped = metrics.get("skipped_updates", 0.0) > 0
        self._nonfinite_in_a_row = self._nonfinite_in_a_row + 1 if skipped else 0
        if self._nonfinite_in_a_row >= self._config.max_nonfinite:
            raise NonFiniteError(
                f"the loss or gradient of {self._nonfinite_in_a_row} updates in a row was not finite (last: update "
                f"{learned.published.version}, {metrics}); lower the learning rate, clip gradients "
                f"(agent.optimizer.max_grad_norm) or look for extreme rewards and observations. The params are those "
                f"before these updates."
            )
        return metrics

    def get_state(self) -> dict[str, Any]:
        """State and counters; the state's leaves stay on the device."""
        return {
            "state": self.state,
            "updates": self.updates,
            "learned_steps": self.learned_steps,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``get_state`` (leaves may be NumPy)."""
        self.state = jax.tree.map(lambda x: jax.numpy.array(x, copy=True), state["state"])
        self.updates, self.learned_steps = int(state["updates"]), int(state["learned_steps"])
        self._nonfinite_in_a_row = int(state["nonfinite_in_a_row"])
