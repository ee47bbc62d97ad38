"""One environment played by Gymnasium's rules."""

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from headrace.envs import gym_state
from headrace.envs.check.calls import Calls, Stop
from headrace.envs.check.report import breach
from headrace.envs.conformance import sample
from headrace.spaces import Spec
from headrace.types import PyTree


class Row(NamedTuple):
    """What one call said, as the environment gave it; after a reset reward and flags are 0 and False."""

    observation: Any
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False
    first: bool = False


class Player:
    """An environment that is reset in the call after its last row.

    Attributes:
        env: the environment.
        episode: counts from 1.
        step: steps of this episode so far.
        ended: the next ``advance`` resets.
    """

    def __init__(self, env: gym.Env, calls: Calls, label: str = "") -> None:
        """``label`` says in messages which environment it is, such as " of the second environment"."""
        self.env, self._calls, self._label = env, calls, label
        self.episode, self.step, self.ended = 0, 0, True

    @property
    def at(self) -> str:
        """Where in its episodes it stands, for messages."""
        return f"{f'step {self.step}' if self.step else 'the reset'} of episode {self.episode}"

    @property
    def when(self) -> str:
        """``at``, and which environment it is."""
        return self.at + self._label

    def advance(self, action: Any) -> Row:
        """Step, or reset after a last row.

        Raises:
            Stop: it raised, or did not return what Gymnasium's ``step`` and ``reset`` return.
        """
        if self.ended:
            return self.reset()
        self.step += 1
        result = self._calls(f"step() at {self.when}", self.env.step, action)
        if not isinstance(result, tuple) or len(result) != 5:
            raise Stop(breach("step-result", f"step() returned {_form(result)} at {self.when}"))
        if not isinstance(result[4], dict):
            raise Stop(breach("step-result", f"info is of type {type(result[4]).__name__} at {self.when}"))
        row = Row(*result[:4])
        self.ended = _is_set(row.terminated) or _is_set(row.truncated)
        return row

    def reset(self, seed: int | None = None) -> Row:
        """Begin an episode, with a seed or without; raises as ``advance``."""
        within = "" if self.ended else ", in the middle of the one before,"
        self.episode, self.step, self.ended = self.episode + 1, 0, False
        text = (
            f"reset({'' if seed is None else f'seed={seed}'}) of episode {self.episode}{self._label}{within}"
        )
        try:
            result = self._calls(text, self.env.reset, seed=seed)
        except Stop as stop:
            if isinstance(stop.__cause__, TypeError) and "unexpected keyword argument 'seed'" in str(stop):
                raise Stop(breach("reset-result", stop.finding.got)) from stop.__cause__
            raise
        if not isinstance(result, tuple) or len(result) != 2:
            raise Stop(breach("reset-result", f"reset() returned {_form(result)}, not (observation, info)"))
        if not isinstance(result[1], dict):
            raise Stop(breach("reset-result", f"info is of type {type(result[1]).__name__} at {self.when}"))
        return Row(result[0], first=True)


class Actions:
    """Random actions as the adapters give them to ``env.step``."""

    def __init__(self, spec: Spec, seed: int) -> None:
        self._spec, self._rng = spec, np.random.default_rng(seed)

    def __call__(self) -> PyTree:
        """One sampled action."""
        return sample(self._spec, self._rng)

    def given(self, action: PyTree) -> Any:
        """A copy of ``action``, in the form ``env.step`` gets."""
        return gym_state.one(self._spec, action)


def time_limit(env: gym.Env) -> int | None:
    """The steps after which a ``TimeLimit`` around ``env`` truncates."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.TimeLimit):
            return int(env._max_episode_steps)
        env = env.env
    return None


def _is_set(flag: Any) -> bool:
    try:
        return bool(flag)
    except Exception:  # an array, or what a user's class raises; the rule on flags names it
        return False


def _form(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else f"one {type(result).__name__}"
