"""Checkpoints: see ``checkpointer``."""

from headrace.checkpoint.checkpointer import Checkpointer, Restored
from headrace.checkpoint.marks import kept
from headrace.checkpoint.tree import flatten, join, split, unflatten

__all__ = ["Checkpointer", "Restored", "flatten", "join", "kept", "split", "unflatten"]
