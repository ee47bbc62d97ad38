"""The environments alone, stepped with random actions by their library and nothing else.

The environments are those of a run: made by the same code, with the same settings and seeds, then taken out of
their group. Agent steps are counted, resets are not, but take their time.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from headrace.envs.conformance import sample
from headrace.envs.contract import EnvGroup
from headrace.envs.envpool import EnvPoolGroup
from headrace.envs.gym import GymGroup
from headrace.envs.gym_vector import VectorGroup
from headrace.envs.jax_group import JaxGroup
from headrace.errors import ConfigError
from headrace.runtime.parts import make_envs
from headrace.runtime.survey import Survey, env_spec
from headrace.seeds import Role
from headrace.settings.config import Config
from headrace.spaces import map_leaves

DRAWN = 256
"""Turns whose actions are drawn beforehand; then they come again."""


def env_loops(config: Config) -> dict[str, Callable[[], Generator[int, None, None]]]:
    """The loops by form: all environments in one group, and where the groups can overlap, in the run's groups."""
    counts = {1, config.env.groups} if config.env.id.startswith("envpool:") else {1}
    return {f"{n} group{'s' * (n > 1)}": partial(_loop, config, n) for n in sorted(counts)}


def _loop(config: Config, num_groups: int) -> Generator[int, None, None]:
    size, survey = config.env.num_envs // num_groups, Survey(env_spec(config), 0)
    groups: list[EnvGroup] = []
    try:
        for index in range(num_groups):
            groups.append(make_envs(config, survey, size, Role.TRAIN_ENV, index * size))
        yield from _turns(config.env.id, groups)
    finally:
        for group in groups:
            group.close()


def _turns(env_id: str, groups: Sequence[EnvGroup]) -> Generator[int, None, None]:
    # The groups' own environments are what is wanted, without what the groups add to them.
    if all(isinstance(group, EnvPoolGroup) for group in groups):
        return envpool_turns([group._pool for group in groups], groups[0].num_slots)  # type: ignore[attr-defined]
    if len(groups) == 1 and isinstance(groups[0], GymGroup):
        return gym_turns(groups[0]._envs)
    if len(groups) == 1 and isinstance(groups[0], VectorGroup):
        return vector_turns(groups[0]._env)
    if len(groups) == 1 and isinstance(groups[0], JaxGroup):
        return jax_turns(groups[0])
    raise ConfigError(
        f"env {env_id}: no bare loop is known for a {type(groups[0]).__name__}; expected a Gymnasium, vector:, envpool: or "
        "JAX environment"
    )


def _sampler(space: gym.Space) -> Callable[[], Any]:
    space.seed(0)
    return (lambda: int(space.sample())) if isinstance(space, gym.spaces.Discrete) else space.sample


def gym_turns(envs: Sequence[gym.Env]) -> Generator[int, None, None]:
    """Step single environments, which were reset, one after the other; an ended one is reset at once."""
    sample = _sampler(envs[0].action_space)
    table = [[sample() for _ in envs] for _ in range(DRAWN)]
    bound = [(env.step, env.reset) for env in envs]
    while True:
        for actions in table:
            for (step, reset), action in zip(bound, actions, strict=True):
                _, _, terminated, truncated, _ = step(action)
                if terminated or truncated:
                    reset()
            yield len(bound)


def vector_turns(env: gym.vector.VectorEnv) -> Generator[int, None, None]:
    """Step a vector environment, which was reset, in its own autoreset mode."""
    env.action_space.seed(0)
    table = [env.action_space.sample() for _ in range(DRAWN)]
    mode, resets = env.metadata["autoreset_mode"], 0
    while True:
        for actions in table:
            _, _, terminated, truncated, _ = env.step(actions)
            yield env.num_envs - resets
            ended = np.logical_or(terminated, truncated)
            if mode == AutoresetMode.DISABLED and ended.any():
                env.reset(options={"reset_mask": ended})
            resets = int(np.count_nonzero(ended)) if mode == AutoresetMode.NEXT_STEP else 0


def envpool_turns(pools: Sequence[Any], size: int) -> Generator[int, None, None]:
    """Receive from and send to pools of ``size``, whose resets are under way, in turn; each ends with a step under way."""
    sample = _sampler(pools[0].action_space)
    table = [np.array([sample() for _ in range(size)]) for _ in range(DRAWN)]
    ids, resets = np.arange(size, dtype=np.int32), [size] * len(pools)
    while True:
        for actions in table:
            for index, pool in enumerate(pools):
                _, _, terminated, truncated, info = pool.recv()
                pool.send(actions, info["env_id"])
                steps = len(ids) - resets[index]
                resets[index] = int(np.count_nonzero(terminated | truncated))
                yield steps


def jax_turns(group: JaxGroup) -> Generator[int, None, None]:
    """Run the compiled step of a group, which was reset; its rows stay on the device but for who was reset again."""
    rng, spec = np.random.default_rng(0), group.spec.action
    drawn = [[sample(spec, rng) for _ in range(group.num_slots)] for _ in range(DRAWN)]
    table = [map_leaves(lambda _, *x: np.stack(x), spec, *actions) for actions in drawn]
    slots, step = group._slots, group._programs.step
    while True:
        for actions in table:
            slots, timestep = step(slots, actions)
            yield group.num_slots - int(np.count_nonzero(timestep.first))
