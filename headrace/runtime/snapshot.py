"""What a checkpoint of a run holds, and how a run continues from it."""

import hashlib
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.checkpoint.checkpointer import Checkpointer, Restored
from headrace.checkpoint.tree import flatten, join, split, unflatten
from headrace.errors import ConfigError, RunDirectoryError
from headrace.runtime.directory import checkpoints, read_config
from headrace.runtime.parts import Parts
from headrace.settings.config import Config
from headrace.types import PyTree


def take(parts: Parts, next_lanes: list[int], book: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Everything that influences the run, as arrays and JSON; called while a runner is paused.

    Args:
        parts: of the run.
        next_lanes: whose turn is next.
        book: state of the run's book-keeping.
    """
    learner = parts.learner.get_state()
    rest, document = split(
        _plain(
            {
                "learner": {k: v for k, v in learner.items() if k != "state"},
                "experience": parts.experience.get_state(),
                "lanes": [lane.get_state() for lane in parts.lanes],
                "next_lanes": next_lanes,
                "book": book,
            }
        )
    )
    arrays = {
        "params": flatten(parts.agent.policy_params(learner["state"])),
        "learner": flatten(learner["state"]),
        "rest": rest,
    }
    return arrays, {"document": document, "steps": parts.steps}


def _plain(value: Any) -> Any:
    """NumPy scalars as Python's."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def state_of(restored: Restored) -> dict[str, Any]:
    """The part of a checkpoint that ``take`` made from dicts, besides the learner's state."""
    return join(restored.arrays.get("rest", {}), restored.meta["document"])


def continue_parts(parts: Parts, restored: Restored, state: dict[str, Any]) -> bool:
    """Put the parts of a run where the checkpoint has them; False where environments had to be reset."""
    learner = {"state": unflatten(parts.learner.state, restored.arrays["learner"]), **state["learner"]}
    parts.learner.set_state(learner)
    parts.experience.set_state(state["experience"])
    parts.newest.value = parts.learner.publish()
    return all([lane.set_state(s) for lane, s in zip(parts.lanes, state["lanes"], strict=True)])


def init_params_from(parts: Parts, reference: str) -> None:
    """Start from the params of another run, ``RUN[@STEP]``; optimisers and counters start anew.

    Raises:
        RunDirectoryError: no such run or step.
        ConfigError: its params do not fit; names the leaves.
    """
    path, _, step = reference.partition("@")
    if step and not step.isdecimal():
        raise ConfigError(f"init_from {reference!r}: expected RUN or RUN@STEP with a whole number of steps")
    with open_checkpoints(Path(path)) as (_, checkpointer):
        saved = checkpointer.restore(int(step) if step else None).arrays["learner"]
    own = flatten(parts.learner.state)
    theirs = {name: x for name, x in saved.items() if name.startswith(".params")}
    if not theirs:
        raise ConfigError(f"init_from {reference!r}: its learner state has no params")
    others = {name: x for name, x in own.items() if not name.startswith(".params")}
    state = unflatten(parts.learner.state, {**others, **theirs})
    parts.learner.state = jax.tree.map(lambda x: jnp.array(x, copy=True), state)
    parts.newest.value = parts.learner.publish()


def _tell(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr, flush=True)


class open_checkpoints:  # a context manager, used like a function
    """``with open_checkpoints(run) as (config, checkpointer)``: another run's, for reading only."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> tuple[Config, Checkpointer]:
        if not self._path.is_dir():
            raise RunDirectoryError(
                f"there is no run {self._path}; give a directory that `headrace train` made"
            )
        config = read_config(self._path)
        self._checkpointer = checkpoints(self._path, config, read_only=True, warn=_tell)
        return config, self._checkpointer

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()


def digest(params: PyTree) -> str:
    """SHA-256 over the bytes of the params' leaves in tree order."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        total.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
    return total.hexdigest()
