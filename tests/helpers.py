"""Small systems to test with: asynchronous and scripted env groups, a policy that is a counter, short configs."""

import atexit
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from headrace.agents.agent import Agent, ExperienceSpec, Phase, Report
from headrace.envs.contract import EnvSpec
from headrace.envs.gym import GymGroup
from headrace.errors import WaitTimeoutError
from headrace.experience.room import NoGuard
from headrace.runtime.driver import Driver
from headrace.runtime.parts import Parts, build
from headrace.seeds import Role, stream_seed
from headrace.settings.config import Config
from headrace.settings.presets import config as make_config
from headrace.spaces import BoxSpec
from headrace.types import TimeStep

# Many tests build the same few programs.
_CACHE = tempfile.mkdtemp(prefix="headrace-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

TINY: dict[str, Any] = {
    "total_steps": 256,
    "runtime": "sync",
    "env.num_envs": 4,
    "env.groups": 2,
    "agent.batch_size": 4,
    "agent.unroll_length": 4,
    "agent.network.hidden": (8,),
    "agent.network.core_size": 4,
    "log.tensorboard": False,
    "log.panel": False,
    "env.workers": 0,
    "log.every_steps": 32,
}


def tiny(run: Any = None, preset: str = "cartpole", **changes: Any) -> Config:
    """A config that trains in about a second; names with ``__`` for dots."""
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    return make_config(preset, **{**TINY, "run": None if run is None else str(run), **dotted})


def parts_of(config: Config, guard: Any = None) -> Parts:
    """Parts of a run whose params are far from the near-uniform policy they start with."""
    parts = build(config, NoGuard() if guard is None else guard)
    rng = np.random.default_rng(0)
    spread = jax.tree.map(
        lambda x: jnp.asarray(x + rng.normal(0, 0.5, x.shape), x.dtype), parts.learner.state.params
    )
    parts.learner.state = parts.learner.state._replace(params=spread)
    parts.newest.value = parts.learner.publish()
    return parts


def collect(parts: Parts, batches: int, driver: Driver | None = None) -> list[Any]:
    """Batches of a policy that stays as it is."""
    driver = driver or Driver(parts.lanes)
    got: list[Any] = []
    while len(got) < batches:
        assert driver.turn(), "collecting waits though every batch was given back"
        while items := parts.experience.take(0):
            got.append(parts.experience.collate(items, 0))
            parts.experience.finished(items)
    return got[:batches]


class AsyncGroup:
    """Slots that speak when they please: each message is a random subset in random order."""

    def __init__(self, make: Callable[[int], GymGroup], num_slots: int, seed: int, least: int = 1) -> None:
        self._make, self._least = make, least
        self._envs = [make(slot) for slot in range(num_slots)]
        self.num_slots, self.spec = num_slots, self._envs[0].spec
        self.stepping = None
        self._rng = np.random.default_rng(seed)
        self._ready = np.ones(num_slots, bool)
        self._lives = np.zeros(num_slots, np.int64)

    def recv(self, timeout_s: float) -> tuple[TimeStep, np.ndarray]:
        ready = np.flatnonzero(self._ready)
        if not len(ready):
            raise WaitTimeoutError("no slot was answered")
        size = int(self._rng.integers(min(self._least, len(ready)), len(ready) + 1))
        ids = self._rng.permutation(ready)[:size].astype(np.int32)
        self._ready[ids] = False
        parts = [self._envs[i].recv(timeout_s)[0] for i in ids]
        return jax.tree.map(lambda *x: np.concatenate(x), *parts), ids

    def send(self, action: Any, slot_ids: np.ndarray) -> None:
        assert not self._ready[slot_ids].any(), "answered twice"
        for k, slot in enumerate(slot_ids):
            self._envs[slot].send(jax.tree.map(lambda x, k=k: x[k : k + 1], action), np.zeros(1, np.int32))
        self._ready[slot_ids] = True

    def restart(self, slot: int) -> None:
        """End the slot's life without a last row."""
        assert self._ready[slot]
        self._envs[slot].close()
        self._envs[slot] = self._make(slot)
        self._lives[slot] += 1

    def ready(self) -> np.ndarray:
        return np.flatnonzero(self._ready)

    def run_ids(self) -> np.ndarray:
        return self._lives.copy()

    def get_state(self) -> dict[str, Any] | None:
        return None

    def set_state(self, state: dict[str, Any]) -> bool:
        raise AssertionError("no state was given")

    def close(self) -> None:
        for env in self._envs:
            env.close()


def make_async(config: Config, parts: Parts, seed: int = 0, least: int = 1) -> list[AsyncGroup]:
    """Give every lane of ``parts`` an asynchronous group of the same environments with the same seeds."""
    groups = []
    for lane in parts.lanes:
        lane.group.close()

        def make(slot: int, first: int = lane.first_slot) -> GymGroup:
            from headrace.envs.registry import make_group

            return make_group(  # type: ignore[return-value]
                config.env.id,
                1,
                lambda _, life: stream_seed(config.seed, Role.TRAIN_ENV, first + slot, life),
                kwargs=config.env.kwargs,
                max_episode_steps=config.env.max_episode_steps,
            )

        lane.group = AsyncGroup(make, len(lane.group.run_ids()), seed + lane.first_slot, least)
        groups.append(lane.group)
    return groups


class ScriptedEnv(gym.Env):
    """Counts its steps in its observation; rewards 1; every ``length``-th step ends the episode."""

    def __init__(self, length: int = 5, truncate: bool = False, step_s: float = 0.0) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gym.spaces.Box(-np.inf, np.inf, (), np.float32)
        self._length, self._truncate, self._step_s = length, truncate, step_s
        self._episode, self._t = -1, 0

    def _observation(self) -> np.ndarray:
        return np.array([self._episode, self._t], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._episode, self._t = self._episode + 1, 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        time.sleep(self._step_s)
        self._t += 1
        end = self._t >= self._length
        return self._observation(), 1.0, end and not self._truncate, end and self._truncate, {}


def make_scripted(length: int = 5, truncate: bool = False, step_s: float = 0.0) -> gym.Env:
    return ScriptedEnv(length, truncate, step_s)


class WithoutState(gym.Env):
    """Bit of CartPole whose state cannot be had: its noise comes from outside of its generator."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        return self._observation(), float(action), self._t >= 9, False, {}

    def _observation(self) -> np.ndarray:
        return np.random.default_rng().uniform(-1, 1, 3).astype(np.float32)


def make_without_state() -> gym.Env:
    return WithoutState()


def counter_agent(config: Any, spec: EnvSpec) -> Agent:
    """H13: one scalar parameter, which each update sets to the number of updates; the action is that scalar."""

    def grads(state: Any, batch: Any, key: Any) -> Any:
        weight = jnp.sum(batch.weight)
        return {"w": jnp.zeros(())}, weight, Report({"loss/total": jnp.zeros(())}, {})

    def apply(state: Any, grad: Any, weight: Any, progress: Any) -> Any:
        return {"w": (progress.updates + 1).astype(jnp.float32)}, {}

    def act(params: Any, carry: Any, x: Any, keys: Any) -> Any:
        return (jnp.broadcast_to(params["w"], x.timestep.reward.shape), ()), carry

    assert isinstance(spec.action, BoxSpec)
    return Agent(
        init=lambda key: {"w": jnp.zeros(())},
        policy_params=lambda state: state,
        initial_carry=lambda b: (),
        act=act,
        phases=(Phase(grads, apply),),
        experience=ExperienceSpec(length=config.unroll_length, batch_size=config.batch_size),
        action=np.zeros((), np.float32),
    )


class Uneven(ScriptedEnv):
    """Every second one made has episodes of one step, the others of nine."""

    made = 0

    def __init__(self) -> None:
        super().__init__(9 if Uneven.made % 2 else 1)
        Uneven.made += 1


def make_uneven() -> gym.Env:
    return Uneven()
