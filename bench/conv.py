"""Claim: on the CPU the Nature CNN's gradient is several times faster with our options, kernel and batches.

    python bench/conv.py [--json] [--repeats 5]

Rows of 84 × 84 × 4 uint8 frames per second. Forms are timed in turn, so that a busy machine slows all alike.
Shown are the best of the repeats and the ratio to JAX's defaults.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from headrace import xla
from headrace.networks import NatureCNN

ROWS, MICRO = 640, 64


def _network(ours: bool) -> tuple[Callable[..., Any], Any]:
    module = NatureCNN((84, 84, 4), nnx.Rngs(0))
    if not ours:
        for conv in module.convs:
            conv.conv_general_dilated = lax.conv_general_dilated
    graphdef, params = nnx.split(module)
    return lambda params, frames: nnx.merge(graphdef, params)(frames), nnx.to_pure_dict(params)


def _gradient(
    apply: Callable[..., Any], params: Any, frames: np.ndarray, micro: int, jit: Any
) -> Callable[[], Any]:
    def add(total: Any, params: Any, frames: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.grad(lambda p: jnp.sum(apply(p, frames) ** 2))(params))

    add = jit(add, donate_argnums=0)
    batches = np.split(frames, len(frames) // micro)

    def run() -> Any:
        total = jax.tree.map(jnp.zeros_like, params)
        for batch in batches:
            total = add(total, params, batch)
        return total

    return run


def _forms(frames: np.ndarray) -> dict[tuple[str, str], tuple[int, Callable[[], Any]]]:
    """``(what, form) -> (rows, function)``; the first form of each ``what`` is JAX's default."""
    forms: dict[tuple[str, str], tuple[int, Callable[[], Any]]] = {}
    kinds = {"defaults": (False, jax.jit), "options": (False, xla.jit), "options + kernel": (True, xla.jit)}
    for name, (ours, jit) in kinds.items():
        apply, params = _network(ours)
        if name != "options + kernel":  # the forward pass is the same
            forward = jit(apply)
            for rows in (32, 64, ROWS):
                forms[f"forward {rows}", name] = rows, lambda f=forward, p=params, n=rows: f(p, frames[:n])
        for micro in (ROWS, MICRO):
            label = name if micro == ROWS else f"{name}, {ROWS // micro} x {micro}"
            forms[f"gradient {ROWS}", label] = ROWS, _gradient(apply, params, frames, micro, jit)
    return forms


def measure(repeats: int) -> list[dict[str, Any]]:
    """Best rate of each form in rows per second, and its ratio to JAX's defaults."""
    frames = np.random.default_rng(0).integers(0, 256, (ROWS, 84, 84, 4), dtype=np.uint8)
    forms = _forms(frames)
    best = dict.fromkeys(forms, 0.0)
    for repeat in range(repeats + 1):
        for key, (rows, function) in forms.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            if repeat:  # the first round compiles
                best[key] = max(best[key], rows / (time.perf_counter() - start))
    return [
        {
            "what": what,
            "form": form,
            "rows_per_s": round(rate),
            "ratio": round(rate / best[what, "defaults"], 2),
        }
        for (what, form), rate in sorted(best.items(), key=lambda item: item[0][0])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    result = measure(arguments.repeats)
    if arguments.json:
        print(
            json.dumps({"backend": jax.default_backend(), "options": xla.compile_options(), "rows": result})
        )
        return
    print(f"backend {jax.default_backend()}, options {xla.compile_options()}")
    for row in result:
        print(f"{row['what']:14}{row['form']:32}{row['rows_per_s']:>8} rows/s{row['ratio']:>7.2f}x")


if __name__ == "__main__":
    main()
