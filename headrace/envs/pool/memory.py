"""Memory that a pool shares with its workers: it has no name, so nothing can be left behind, whoever dies.

A block is handed on as a file descriptor. The kernel frees it with the last process that holds one.
"""

import mmap
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.errors import ConfigError

_ALIGNED = 64


class Field(NamedTuple):
    """An array of a block."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Bytes, rounded up so that the next array is aligned."""
        size = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        return -(-max(size, 1) // _ALIGNED) * _ALIGNED


def size_of(fields: list[Field]) -> int:
    """Bytes of a block."""
    return sum(field.size for field in fields)


def allocate(fields: list[Field], what: str) -> int:
    """A new block of zeros; returns its file descriptor.

    Args:
        fields: its arrays.
        what: for messages.

    Raises:
        ConfigError: it needs more memory than is free.
    """
    need, free = size_of(fields), free_memory()
    if free is not None and need > free:
        raise ConfigError(
            f"{what} needs {need} bytes of shared memory, of which {free} are free; lower env.num_envs "
            "or the size of observations"
        )
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("headrace")
    else:
        with tempfile.TemporaryFile() as file:  # it has no name either
            fd = os.dup(file.fileno())
    os.ftruncate(fd, need)
    return fd


def arrays(fd: int, fields: list[Field]) -> dict[str, np.ndarray]:
    """The arrays of a block; they keep it mapped while they live."""
    block = mmap.mmap(fd, size_of(fields))
    found, offset = {}, 0
    for field in fields:
        count = int(np.prod(field.shape, dtype=np.int64))
        found[field.name] = np.frombuffer(block, field.dtype, count, offset).reshape(field.shape)
        offset += field.size
    return found


def free_memory() -> int | None:
    """Bytes that may still be used, by this machine's and this process group's limits; None where it cannot be known."""
    free = [x for x in (_machine(), _control_group()) if x is not None]
    return min(free) if free else None


def _machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def _control_group() -> int | None:
    try:
        name = Path("/proc/self/cgroup").read_text().split("0::/", 1)[1].splitlines()[0]
        folder = Path("/sys/fs/cgroup") / name
        limit, used = (folder / f"memory.{x}" for x in ("max", "current"))
        return int(limit.read_text()) - int(used.read_text())
    except (OSError, ValueError, IndexError):  # no such limit
        return None
