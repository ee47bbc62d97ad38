"""What a measurement was made on."""

import os
import platform
from importlib import metadata
from pathlib import Path

import jax


def cores() -> int:
    """Processor cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def machine() -> dict[str, str]:
    """Operating system, processor and JAX's device, in words."""
    return {"system": platform.platform(), "cpu": _cpu_name(), "device": jax.devices()[0].device_kind}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def versions() -> dict[str, str]:
    """Versions of Python, of headrace and of the libraries that the rooms are made of."""
    found = {"python": platform.python_version()}
    for name in ("headrace", "jax", "jaxlib", "flax", "numpy", "gymnasium", "envpool"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed
    return found
