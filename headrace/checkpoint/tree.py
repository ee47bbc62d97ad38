"""Pytrees as named host arrays, and back.

What a checkpoint can hold: any pytree JAX knows (dicts, lists, tuples, named tuples, optax and flax states)
whose leaves are NumPy or JAX arrays or Python numbers, of any bool, integer, float or complex dtype and
bfloat16, of any shape, empty and 0-d ones too. ``None`` and empty containers have no leaves: they come back
from ``like`` only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from headrace.errors import ConfigError
from headrace.types import PyTree

_SHOWN = 8


def flatten(tree: PyTree) -> dict[str, np.ndarray]:
    """Every leaf of ``tree`` by its path (``jax.tree_util.keystr``), copied to host memory.

    Transfers from devices are started together and then awaited: the caller may donate the arrays afterwards.

    Raises:
        ConfigError: a typed PRNG key, an array of text or objects, or one spread over hosts; names it.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    for path, leaf in leaves:
        if isinstance(leaf, jax.Array):
            _check_device_array(jax.tree_util.keystr(path), leaf)
            leaf.copy_to_host_async()
    return {name: _host_copy(name, leaf) for name, leaf in ((jax.tree_util.keystr(p), x) for p, x in leaves)}


def _check_device_array(name: str, leaf: jax.Array) -> None:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ConfigError(
            f"leaf {name} is a typed PRNG key; expected an array. Pass jax.random.key_data(key) and rebuild "
            "the key with jax.random.wrap_key_data after restoring."
        )
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise ConfigError(
            f"leaf {name} is spread over several hosts; expected an array this host holds whole. "
            "Replicate it (jax.device_put with an empty PartitionSpec) before saving."
        )


def _host_copy(name: str, leaf: Any) -> np.ndarray:
    array = np.array(leaf, copy=True, order="C")
    if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
        raise ConfigError(
            f"leaf {name} is a {type(leaf).__name__} of dtype {array.dtype}; expected numbers or booleans. "
            "Put text and other JSON values into `meta` (see headrace.checkpoint.split)."
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def unflatten(like: PyTree, flat: Mapping[str, np.ndarray]) -> PyTree:
    """``flat`` in the structure of ``like``.

    Args:
        like: a pytree of arrays, ``jax.ShapeDtypeStruct`` or numbers; structure, shapes and dtypes count.
        flat: arrays by path, as ``flatten`` names them.

    Returns:
        A pytree like ``like`` whose leaves are the arrays of ``flat``.

    Raises:
        ConfigError: leaves are missing, unexpected, or differ in shape or dtype; names them.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    expected = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    problems = [f"missing {name}" for name in expected if name not in flat]
    problems += [f"unexpected {name}" for name in flat if name not in expected]
    for name, leaf in expected.items():
        if name in flat and (difference := _difference(leaf, flat[name])):
            problems.append(f"{name} is {difference}")
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConfigError(
            f"the checkpoint does not fit: {'; '.join(problems[:_SHOWN])}{more}. "
            "Use the settings (agent, network, environment) it was made with, or start a new run."
        )
    return jax.tree_util.tree_unflatten(treedef, [flat[name] for name in expected])


def _difference(leaf: Any, got: np.ndarray) -> str:
    wanted = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)
    if tuple(wanted.shape) == got.shape and wanted.dtype == got.dtype:
        return ""
    return f"{got.dtype}{list(got.shape)}, expected {wanted.dtype}{list(wanted.shape)}"


def paths(tree: PyTree) -> list[list[list[Any]]]:
    """The path of each leaf, in ``flatten``'s order, as JSON: steps ``["key", name]`` or ``["index", i]``."""
    return [[_step(key) for key in path] for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _step(key: Any) -> list[Any]:
    match key:
        case jax.tree_util.DictKey(key=name):
            return ["key", name if isinstance(name, str | int) else str(name)]
        case jax.tree_util.GetAttrKey(name=name):
            return ["key", name]
        case jax.tree_util.SequenceKey(idx=index) | jax.tree_util.FlattenedIndexKey(key=index):
            return ["index", index]
    return ["key", str(key)]


def nest(leaf_paths: Sequence[Sequence[Sequence[Any]]], arrays: Sequence[np.ndarray]) -> PyTree:
    """The tree of ``arrays`` at ``leaf_paths`` without a structure to follow.

    Dicts and named fields come back as dicts, lists and tuples as lists; ``None`` amid a list stays ``None``.
    """
    if len(arrays) == 1 and not leaf_paths[0]:
        return arrays[0]
    root: dict[tuple[Any, ...], Any] = {}
    for path, array in zip(leaf_paths, arrays, strict=True):
        node = root
        for step in path[:-1]:
            node = node.setdefault(tuple(step), {})
        node[tuple(path[-1])] = array
    return _containers(root)


def _containers(node: Any) -> PyTree:
    if not isinstance(node, dict):
        return node
    if node and all(kind == "index" for kind, _ in node):
        items = {index: _containers(value) for (_, index), value in node.items()}
        return [items.get(i) for i in range(max(items) + 1)]
    return {name: _containers(value) for (_, name), value in node.items()}


def split(state: PyTree) -> tuple[dict[str, np.ndarray], Any]:
    """Parts a state of dicts, lists, arrays and JSON values into arrays and JSON, for ``Checkpointer.save``.

    Args:
        state: nested dicts (string keys) and lists over NumPy arrays and JSON scalars, such as
            ``EnvGroup.get_state`` gives.

    Returns:
        The arrays by number, and the state with ``{"array": number}`` for each, dicts as ``{"dict": …}``.
    """
    arrays: dict[str, np.ndarray] = {}

    def visit(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays[str(len(arrays))] = value
            return {"array": str(len(arrays) - 1)}
        if isinstance(value, dict):
            return {"dict": {key: visit(item) for key, item in value.items()}}
        return [visit(item) for item in value] if isinstance(value, list | tuple) else value

    document = visit(state)
    return arrays, document


def join(arrays: Mapping[str, np.ndarray], document: Any) -> PyTree:
    """The state that ``split`` parted; tuples come back as lists."""
    if isinstance(document, dict):
        if "array" in document:
            return arrays[document["array"]]
        return {key: join(arrays, item) for key, item in document["dict"].items()}
    return [join(arrays, item) for item in document] if isinstance(document, list) else document


def check_json(value: Any, path: str = "meta") -> None:
    """Raise a ConfigError, naming the path, where ``value`` would not come back from JSON as it is."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{path} has the key {key!r}; expected a string")
            check_json(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            check_json(item, f"{path}[{i}]")
    elif not (value is None or type(value) in (str, int, float, bool)):
        raise ConfigError(
            f"{path} is a {type(value).__name__}; expected a JSON value. Arrays go into `arrays`; "
            "NumPy scalars become numbers with .item()."
        )
