"""Environments for ``headrace envs check``: each of ``FAULTS`` has one fault, the healthy ones none."""

import ctypes
import itertools
import os
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Walk(gym.Env):
    """A healthy walk: a position that starts anywhere and drifts; ends at ±10."""

    observation_space: gym.Space = spaces.Box(-20.0, 20.0, (2,), np.float32)
    action_space: gym.Space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.x = 0, self.np_random.uniform(-5, 5)
        return self.see(), {}

    def step(self, action):
        self.t += 1
        self.x += float(action[0]) + self.np_random.normal()
        return self.see(), self.x, abs(self.x) > 10, False, {}

    def see(self):
        return np.array([self.x, min(self.t, 20)], np.float32).clip(-20, 20)


class Healthy(Walk):
    """Nested observation, hybrid action."""

    observation_space = spaces.Dict(
        {
            "eye": spaces.Box(0, 255, (6, 5), np.uint8),
            "place": spaces.Tuple(
                (spaces.Discrete(3, start=-1), spaces.Box(-np.inf, np.inf, (), np.float32))
            ),
            "keys": spaces.MultiBinary(3),
            "dials": spaces.MultiDiscrete([2, 5]),
            "far": spaces.Box(0, 2**31 - 1, (1,), np.int64),
        }
    )
    action_space = spaces.Dict(
        {"go": spaces.Discrete(3, start=5), "turn": spaces.Box(-1, 1, (2,), np.float64)}
    )

    def step(self, action):
        assert self.action_space.contains(action)
        return super().step(action["turn"] + action["go"] - 6)

    def see(self):
        return {
            "eye": np.full((6, 5), min(self.t, 255), np.uint8),
            "place": (np.int64(np.sign(self.x)), np.float32(self.x)),
            "keys": np.array([1, 0, self.t % 2], np.int8),
            "dials": np.array([1, self.t % 5]),
            "far": np.array([self.t]),
        }


class Start(Walk):
    """An observation that is a shifted category, given as a Python integer."""

    observation_space = spaces.Discrete(41, start=-20)

    def see(self):
        return int(np.clip(self.x, -20, 20))


class Grid(gym.Env):
    """A deterministic corridor; seeds change nothing, and need not."""

    observation_space = spaces.Discrete(5)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self.at, {}

    def step(self, action):
        self.at = max(self.at + 2 * int(action) - 1, 0)
        return self.at, -1.0, self.at == 4, False, {}


def limited():
    """Its episodes are cut at step 50, and say so."""
    return gym.wrappers.TimeLimit(NeverEnds(), 50)


# Faults of what is returned.


class WrongShape(Walk):
    def see(self):
        return super().see()[None]


class MissingPart(Healthy):
    def see(self):
        return {key: value for key, value in super().see().items() if key != "eye"}


class ExtraPart(Healthy):
    def see(self):
        return {**super().see(), "smell": 3}


class ListForTuple(Healthy):
    def see(self):
        seen = super().see()
        return {**seen, "place": seen["place"][:1]}


class WrongKind(Walk):
    observation_space = spaces.Box(-20, 20, (2,), np.int32)


class Text(Walk):
    def see(self):
        return np.array(["left", "right"])


class Float64(Walk):
    def see(self):
        return super().see().astype(np.float64)


class AsList(Walk):
    def see(self):
        return super().see().tolist()


class OutOfRange(Start):
    def see(self):
        return super().see() + (21 + 20 if self.t == 4 else 0)


class OutOfDial(Healthy):
    def see(self):
        return {**super().see(), "dials": np.array([2, 0])}


class NoBit(Healthy):
    def see(self):
        return {**super().see(), "keys": np.array([0, 2, 1], np.int8)}


class OutOfInt32(Healthy):
    def see(self):
        return {**super().see(), "far": np.array([2**40])}


class OutOfBounds(Walk):
    def see(self):
        return super().see() + np.array([0, 20 * (self.t == 3)], np.float32)


class NanObservation(Walk):
    def see(self):
        return super().see() + np.array([0, np.nan if self.t == 2 else 0], np.float32)


class BadReward(Walk):
    """A wrong reward at step 7 of each episode."""

    def __init__(self, reward):
        others = {"none": None, "array": np.ones(1), "word": "one"}
        self.reward = others[reward] if reward in others else float(reward)

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action * 0.01)
        return observation, self.reward if self.t == 7 else 1.0, terminated, truncated, info


class FourValues(Walk):
    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class NoInfo(Walk):
    def step(self, action):
        return *super().step(action)[:4], None


class ResetWithoutInfo(Walk):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class ResetWithoutSeed(Walk):
    def reset(self):
        return super().reset()


class IntegerFlags(Walk):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, int(terminated), truncated, info


# Faults of randomness.


class Unseeded(Walk):
    def step(self, action):
        observation, *others = super().step(action)
        return observation * np.float32([1, np.random.default_rng().uniform()]), *others


class GlobalRandom(Walk):
    """Equal when run alone; two in one process draw from one stream."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            np.random.seed(seed)
        return super().reset(seed=seed)

    def step(self, action):
        observation, _, *others = super().step(action)
        return observation, np.random.uniform(), *others


class UnseededLater(Walk):
    """Only from the second episode on, which comes late."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is None:
            self.x = np.random.default_rng().uniform(-5, 5)
        return self.see(), {}

    def step(self, action):
        self.t += 1
        return self.see(), 0.0, False, self.t == 300, {}


class Reseeding(Walk):
    """H3: all episodes of a life are alike."""

    def reset(self, *, seed=None, options=None):
        self.seed = seed if seed is not None else self.seed
        return super().reset(seed=self.seed)


class SeedIgnored(Walk):
    def __init__(self):
        self.rng = np.random.default_rng(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.rng.uniform(-5, 5)
        return self.see(), {}

    def step(self, action):
        self.t += 1
        self.x += float(action[0]) + self.rng.normal()
        return self.see(), self.x, abs(self.x) > 10, False, {}


class SeedIgnoredAtReset(Grid):
    """Every slot of a group begins alike, episode by episode."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.t = int(self.rng.integers(4)), 0
        return self.at, {}

    def step(self, action):
        self.t += 1
        observation, reward, *_ = super().step(0)
        return observation, reward, False, self.t == 3, {}


class OwnGenerator(gym.Env):
    """Well seeded, but not from ``np_random``: only the end of an episode shows what was drawn at its start."""

    observation_space = spaces.Discrete(6)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.prize, self.t = self.rng.normal(), 0
        return 0, {}

    def step(self, action):
        self.t += 1
        return self.t, self.prize if self.t == 5 else 0.0, self.t == 5, False, {}


class ZeroIsNone(Walk):
    """H3: seed 0 is taken for no seed."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed or None)


# Faults of conduct.


class Reused(Walk):
    def __init__(self):
        self.seen = np.zeros(2, np.float32)

    def see(self):
        self.seen[:] = super().see()
        return self.seen


class WritesAction(Walk):
    def step(self, action):
        action *= 0.5
        return super().step(action)


class NeverEnds(Walk):
    def step(self, action):
        observation, reward, *_, info = super().step(action)
        return observation, reward, False, False, info


class LimitTerminates(Walk):
    def step(self, action):
        observation, reward, *_, info = super().step(action)
        return observation, reward, self.t >= 50, False, info


class RaisesAt7(Walk):
    def step(self, action):
        if self.t == 6:
            raise ValueError("the rope tore")
        return super().step(action * 0.01)


class Leaves(Walk):
    def step(self, action):
        sys.exit(3)


class NoResetWithin(Walk):
    ended = True

    def reset(self, *, seed=None, options=None):
        assert self.ended, "reset before the end"
        self.ended = False
        return super().reset(seed=seed)

    def step(self, action):
        row = super().step(action)
        self.ended = row[2]
        return row


class NoResetTwice(Walk):
    t = 1

    def reset(self, *, seed=None, options=None):
        assert self.t, "nothing to reset"
        return super().reset(seed=seed)


class ClosesOnce(Walk):
    def __init__(self):
        self.pipe = os.pipe()

    def close(self):
        for end in self.pipe:
            os.close(end)


class OneOnly(Walk):
    count = itertools.count()

    def __init__(self):
        if next(self.count):
            raise RuntimeError("the port is taken")


class Unequal(Walk):
    count = itertools.count(2)

    def __init__(self):
        self.observation_space = spaces.Dict({"x": spaces.Discrete(next(self.count))})

    def see(self):
        return {"x": 0}


class TextSpace(Walk):
    observation_space = spaces.Dict({"words": spaces.Text(5), "x": Walk.observation_space})


class NoSpace(Walk):
    action_space = None


class FailsToStart(Walk):
    def __init__(self):
        raise OSError("no display")


# Hostile: these need a process of their own.


def start_a_child():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600 + 7)"])


class Hangs(Walk):
    """Says so in the file ``mark``; with ``child`` it has started a process."""

    def __init__(self, mark=os.devnull, child=False):
        self.mark = mark
        self.child = start_a_child() if child else None

    def step(self, action):
        if self.t == 2:
            with open(self.mark, "w") as file:
                file.write("hangs")
            time.sleep(3600)
        return super().step(action * 0.01)


class Exits(Walk):
    def step(self, action):
        print("out of fuel", flush=True)
        os._exit(9)


class Crashes(Walk):
    def step(self, action):
        return ctypes.string_at(0)


class CloseHangs(Walk):
    """H2b."""

    def close(self):
        time.sleep(3600)


class Noisy(Walk):
    """Healthy, but loud, and with a child that never ends."""

    def __init__(self):
        self.child = start_a_child()

    def step(self, action):
        print("{}" * 1000)
        return super().step(action)


# Class and the rule that names its fault.
FAULTS = {
    "WrongShape": "observation-form",
    "MissingPart": "observation-form",
    "ListForTuple": "observation-form",
    "ExtraPart": "observation-extra",
    "WrongKind": "observation-kind",
    "Text": "observation-kind",
    "Float64": "observation-precision",
    "AsList": "observation-precision",
    "OutOfRange": "observation-range",
    "OutOfDial": "observation-range",
    "NoBit": "observation-range",
    "OutOfInt32": "observation-range",
    "OutOfBounds": "observation-bounds",
    "NanObservation": "observation-finite",
    "FourValues": "step-result",
    "NoInfo": "step-result",
    "ResetWithoutInfo": "reset-result",
    "ResetWithoutSeed": "reset-result",
    "IntegerFlags": "end-flags",
    "Unseeded": "same-seed",
    "GlobalRandom": "same-seed",
    "UnseededLater": "same-seed",
    "Reseeding": "reset-reseeds",
    "SeedIgnored": "seed-ignored",
    "SeedIgnoredAtReset": "seed-ignored",
    "OwnGenerator": "resume",
    "ZeroIsNone": "seed-zero",
    "Reused": "observation-reused",
    "WritesAction": "action-written",
    "NeverEnds": "episode-ends",
    "LimitTerminates": "limit-terminates",
    "RaisesAt7": "raises",
    "Leaves": "raises",
    "NoResetWithin": "raises",
    "NoResetTwice": "raises",
    "ClosesOnce": "close",
    "OneOnly": "made",
    "FailsToStart": "made",
    "Unequal": "spaces",
    "TextSpace": "spaces",
    "NoSpace": "spaces",
}
