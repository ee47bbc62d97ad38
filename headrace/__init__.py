"""headrace: one asynchronous actor-learner system for deep reinforcement learning on JAX.

config = headrace.config("cartpole", **{"seed": 1, "env.num_envs": 64})
summary = headrace.train(config)
headrace.evaluate(summary["run"], episodes=20)
policy = headrace.load(summary["run"])
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.runtime.policy import Policy, evaluate, load
    from headrace.runtime.run import Stopped, train
    from headrace.settings.config import Config
    from headrace.settings.presets import config

__version__ = "0.1.0"
__all__ = ["Config", "Policy", "Stopped", "config", "evaluate", "load", "train"]

_WHERE = {
    "Config": "headrace.settings.config",
    "config": "headrace.settings.presets",
    "Policy": "headrace.runtime.policy",
    "Stopped": "headrace.runtime.run",
    "evaluate": "headrace.runtime.policy",
    "load": "headrace.runtime.policy",
    "train": "headrace.runtime.run",
}


def __getattr__(name: str) -> Any:
    # On demand, so that an environment worker that imports headrace.types does not import JAX.
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
