"""Episodes on environments that never feed the learner."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from headrace.agents.agent import Agent
from headrace.envs.contract import EnvGroup
from headrace.inference.actor import ActorInference, Published, Request, compile_inference
from headrace.metrics.episodes import Episode, EpisodeTracker
from headrace.runtime.parts import make_envs
from headrace.runtime.recorder import See
from headrace.runtime.survey import Survey
from headrace.runtime.watchdog import overdue, step_limit
from headrace.seeds import Role
from headrace.settings.config import Config


@dataclass(frozen=True)
class Evaluation:
    """Returns (raw reward) and lengths (steps) of episodes, in the order of their slots."""

    returns: list[float]
    lengths: list[int]

    def summary(self) -> dict[str, float]:
        """Count, and mean, standard deviation, least and greatest return, and mean length."""
        returns = np.array(self.returns)
        return {
            "episodes": len(self.returns),
            "return_mean": float(returns.mean()),
            "return_std": float(returns.std()),
            "return_min": float(returns.min()),
            "return_max": float(returns.max()),
            "length_mean": float(np.mean(self.lengths)),
        }


class Cancelled(Exception):
    """An evaluation was asked to end before it was done; ``so_far`` has the episodes that were."""

    def __init__(self, so_far: Evaluation) -> None:
        self.so_far = so_far
        super().__init__("cancelled")


class Evaluator:
    """Evaluates params of one agent; compiled once. Another thread may ``cancel`` it, and see whether it is ``overdue``."""

    def __init__(
        self,
        config: Config,
        agent: Agent,
        survey: Survey,
        *,
        explore: bool = False,
        watch: Callable[[EnvGroup], See] | None = None,
        first_slot: int = 0,
    ) -> None:
        """Compile.

        Args:
            config: gives the environments, their number and the seed.
            agent: whose params are evaluated.
            survey: of the environments.
            explore: act as in training, in place of greedily.
            watch: given the group of each evaluation, made to draw; what it returns sees every message.
            first_slot: of the streams of random numbers; other slots meet other episodes.
        """
        self._config, self._agent, self._survey = config, agent, survey
        self._watch, self._first_slot = watch, first_slot
        self._compiled = compile_inference(agent, training=explore)
        self._group: EnvGroup | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """End ``run`` before its next step."""
        self._cancelled = True

    def overdue(self) -> str | None:
        """What to say of an environment that has been in one step for too long, or None."""
        return overdue([(self._group, self._first_slot)], self._config.env.step_timeout_s)

    def run(self, published: Published, episodes: int, number: int = 0) -> Evaluation:
        """Play ``episodes`` episodes.

        Each environment plays its even share, the first ones an episode more where they do not divide: counting the
        episodes that end first would favour short ones.

        Args:
            published: whose params.
            episodes: how many.
            number: of the evaluation; each has environment streams of its own.

        Raises:
            Cancelled: see ``cancel``.
            WaitTimeoutError: an environment hangs (on the main thread; on others ``overdue`` tells of it).
        """
        num_envs = min(self._config.eval.num_envs, episodes)
        quota = np.full(num_envs, episodes // num_envs)
        quota[: episodes % num_envs] += 1
        with self._envs(num_envs, number) as group:
            inference = ActorInference(
                self._agent, self._survey.spec, np.arange(num_envs) + self._first_slot, self._compiled,
                lambda: published, self._config.seed, Role.EVAL_ACTION,
            )  # fmt: skip
            see = self._watch(group) if self._watch is not None else None
            tracker = EpisodeTracker(num_envs)
            done: list[list[Episode]] = [[] for _ in range(num_envs)]
            while any(len(d) < q for d, q in zip(done, quota, strict=True)):
                if self._cancelled:
                    raise Cancelled(_evaluation(done, quota))
                timestep, ids = group.recv(self._config.env.step_timeout_s)
                if see is not None:
                    see(timestep, ids)
                tracker.update(timestep, ids)
                for episode in tracker.take():
                    done[episode.slot_id].append(episode)
                pending = inference.submit(Request(timestep, ids, group.run_ids()[ids]))
                answer = inference.answer(pending, with_carry=False)
                group.send(self._agent.to_env(answer.action), ids)
        return _evaluation(done, quota)

    @contextmanager
    def _envs(self, num_envs: int, number: int) -> Iterator[EnvGroup]:
        draws = self._watch is not None
        group = make_envs(
            self._config, self._survey, num_envs, Role.EVAL_ENV, self._first_slot, number, draws
        )
        self._group = group
        try:
            with step_limit([(group, self._first_slot)], self._config.env.step_timeout_s):
                yield group
        finally:
            self._group = None
            group.close()


def _evaluation(done: list[list[Episode]], quota: np.ndarray) -> Evaluation:
    kept = [e for d, q in zip(done, quota, strict=True) for e in d[:q]]
    return Evaluation([e.raw_return for e in kept], [e.length for e in kept])
