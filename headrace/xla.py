"""The compiler options of the outermost ``jit``.

On the CPU, XLA's own convolutions and large matrix products use few threads; handing them one by one to its
library kernels makes a convolutional network several times faster (``bench/conv.py``) and leaves small
networks as they were. The option is experimental, so it is tried on a trivial function before it is used.

Nothing here runs at import: the first call of ``compile_options`` or ``jit`` starts JAX's backend.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

CPU_OPTIONS: Mapping[str, str] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
}
"""``LIBRARY_FUSION_TYPE_DOT`` is a fifth faster forward at 640 images, half as fast at 32 (acting)."""


def accepted(options: Mapping[str, str]) -> bool:
    """Whether the installed XLA compiles with ``options``; tries them on a trivial function."""
    try:
        jax.jit(jnp.negative, compiler_options=dict(options)).lower(
            jax.ShapeDtypeStruct((), jnp.float32)
        ).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


@functools.cache
def _cpu_options() -> Mapping[str, str] | None:
    return CPU_OPTIONS if accepted(CPU_OPTIONS) else None


def compile_options() -> dict[str, str] | None:
    """Options for the default backend: ``CPU_OPTIONS`` on a CPU whose XLA accepts them, else None."""
    if jax.default_backend() != "cpu":
        return None
    options = _cpu_options()
    return None if options is None else dict(options)


def jit(
    fun: Callable[..., Any],
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    **options: Any,
) -> Any:
    """``jax.jit`` with ``compile_options``, for the outermost function only.

    Call it where the program is put together, not at import. JAX refuses compiler options on a nested
    ``jit``: a function made here cannot be called, differentiated or mapped inside another transformation;
    use the plain function there.

    Args:
        fun: a pure function.
        donate_argnums: arguments whose buffers the result may take over.
        static_argnums: arguments compiled in.
        **options: other keywords of ``jax.jit``, such as ``in_shardings``; ``compiler_options`` join ours.

    Returns:
        The function ``jax.jit`` returns.
    """
    compiler = {**(compile_options() or {}), **(options.pop("compiler_options", None) or {})}
    return jax.jit(
        fun,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        compiler_options=compiler or None,
        **options,
    )
