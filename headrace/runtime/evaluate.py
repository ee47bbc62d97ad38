"""Episodes on environments that never feed the learner."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from headrace.agents.agent import Agent
from headrace.envs.contract import EnvGroup, infos_of
from headrace.inference.actor import ActorInference, Published, compile_inference
from headrace.inference.messages import Request
from headrace.metrics.episodes import Episode, EpisodeTracker
from headrace.metrics.infos import InfoNames, means
from headrace.runtime.parts import make_envs
from headrace.runtime.recorder import See
from headrace.runtime.survey import Survey
from headrace.runtime.targets import Target, targets
from headrace.runtime.watchdog import overdue, step_limit
from headrace.seeds import Role
from headrace.settings.config import Config


@dataclass(frozen=True)
class Evaluation:
    """Returns (raw reward), lengths (steps) and the last steps' infos of episodes, in the order of their slots."""

    returns: list[float]
    lengths: list[int]
    infos: list[Mapping[str, float]]

    def summary(self) -> dict[str, float]:
        """Count; mean, standard deviation, least and greatest return; mean length; ``episode/<name>``, means of infos."""
        names = InfoNames()
        returns = np.array(self.returns)
        return {
            "episodes": len(self.returns),
            "return_mean": float(returns.mean()),
            "return_std": float(returns.std()),
            "return_min": float(returns.min()),
            "return_max": float(returns.max()),
            "length_mean": float(np.mean(self.lengths)),
            **means([names.pick(info) for info in self.infos]),
        }


def together(evaluations: Iterable[Evaluation]) -> Evaluation:
    """The episodes of several as one."""
    parts = list(evaluations)
    return Evaluation(
        [x for part in parts for x in part.returns],
        [x for part in parts for x in part.lengths],
        [x for part in parts for x in part.infos],
    )


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
        surveys: Sequence[Survey],
        *,
        explore: bool = False,
        watch: Callable[[EnvGroup], See] | None = None,
        first_slot: int = 0,
    ) -> None:
        """Compile.

        Args:
            config: gives the environments (see ``targets``), their number and the seed.
            agent: whose params are evaluated.
            surveys: of the environments of each target.
            explore: act as in training, in place of greedily.
            watch: given the group of each evaluation, made to draw; what it returns sees every message.
            first_slot: of the streams of random numbers; other slots meet other episodes.
        """
        self._targets = list(zip(targets(config), surveys, strict=True))
        self._config, self._agent, self._spec = config, agent, surveys[0].spec
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

    def figures(self, published: Published, episodes: int, number: int = 0) -> dict[str, float]:
        """Evaluate on every id and every named environment in turn, ``episodes`` on each; see ``run``.

        Returns:
            The figures of ``Evaluation.summary`` over the ids that are trained on, and as ``<name>/…`` those of each id,
            where there are several, and of each of ``eval.envs``.
        """
        done = [
            (target, self.run(published, episodes, number, index))
            for index, (target, _) in enumerate(self._targets)
        ]
        trained = together(evaluation for target, evaluation in done if target.trained)
        return trained.summary() | {
            f"{target.name}/{figure}": value
            for target, evaluation in done
            if target.name
            for figure, value in evaluation.summary().items()
        }

    def run(self, published: Published, episodes: int, number: int = 0, index: int = 0) -> Evaluation:
        """Play ``episodes`` episodes.

        Each environment plays its even share, the first ones an episode more where they do not divide: counting the
        episodes that end first would favour short ones.

        Args:
            published: whose params.
            episodes: how many.
            number: of the evaluation; each has environment streams of its own.
            index: of the target whose environments are played on; 0: the run's first id.

        Raises:
            Cancelled: see ``cancel``.
            WaitTimeoutError: an environment hangs (on the main thread; on others ``overdue`` tells of it).
        """
        num_envs = min(self._config.eval.num_envs, episodes)
        quota = np.full(num_envs, episodes // num_envs)
        quota[: episodes % num_envs] += 1
        target, survey = self._targets[index]
        with self._envs(num_envs, number, target, survey) as group:
            inference = ActorInference(
                self._agent, self._spec, np.arange(num_envs) + self._first_slot, self._compiled,
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
                tracker.update(timestep, ids, infos_of(group))
                for episode in tracker.take():
                    done[episode.slot_id].append(episode)
                pending = inference.submit(Request(timestep, ids, group.run_ids()[ids]))
                answer = inference.answer(pending, with_carry=False)
                group.send(self._agent.to_env(answer.action), ids)
        return _evaluation(done, quota)

    @contextmanager
    def _envs(self, num_envs: int, number: int, target: Target, survey: Survey) -> Iterator[EnvGroup]:
        group = make_envs(
            target.config,
            survey,
            num_envs,
            Role.EVAL_ENV,
            self._first_slot,
            number,
            branch=target.branch,
            render=self._watch is not None,
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
    return Evaluation([e.raw_return for e in kept], [e.length for e in kept], [e.infos for e in kept])
