"""Whether one policy can serve two environments: their spaces, leaf by leaf."""

import numpy as np

from headrace.envs.contract import EnvSpec
from headrace.errors import ConfigError
from headrace.spaces import BoxSpec, DiscreteSpec, Leaf, MultiDiscreteSpec, Spec, leaves


def check_agreement(expected: EnvSpec, got: EnvSpec, expected_id: str, got_id: str) -> None:
    """Refuse an environment that the policy of another cannot serve.

    Observations must look the same to the policy: an integer's start and a box's bounds may differ. Actions must be the
    same for the environment too, for they are made to the measure of ``expected``.

    Raises:
        ConfigError: names both ids, the leaf, what was got and what was expected.
    """
    for name, ours, theirs, acting in (
        ("observation", expected.observation, got.observation, False),
        ("action", expected.action, got.action, True),
    ):
        found = _difference(ours, theirs, acting)
        if found is not None:
            path, want, have = found
            raise ConfigError(
                f"{name} space{path} of {got_id}: got {have}, expected {want} as {expected_id} has it; environments of one "
                "run need the same spaces, so pad or convert it in a wrapper"
            )


def _difference(expected: Spec, got: Spec, acting: bool) -> tuple[str, str, str] | None:
    """Path of the first leaf that differs, what is expected there, and what was got."""
    ours, theirs = dict(leaves(expected)), dict(leaves(got))
    for path in sorted(ours.keys() | theirs.keys()):
        want, have = ours.get(path), theirs.get(path)
        if want is None or have is None or not _same(want, have, acting):
            return path, _spell(want, acting), _spell(have, acting)
    return None


def _same(a: Leaf, b: Leaf, acting: bool) -> bool:
    if not acting:
        return _spell(a, acting) == _spell(b, acting)
    bounds = not isinstance(a, BoxSpec) or not isinstance(b, BoxSpec) or _same_bounds(a, b)
    return a == b and bounds


def _same_bounds(a: BoxSpec, b: BoxSpec) -> bool:
    return np.array_equal(a.low, b.low) and np.array_equal(a.high, b.high)


def _spell(leaf: Leaf | None, acting: bool) -> str:
    """A leaf in words: as the policy sees it or, of an action, as the environment does."""
    if leaf is None:
        return "nothing"
    dtype = f" of {leaf.env_dtype}" if acting else ""
    match leaf:
        case BoxSpec():
            bounds = f" from {_short(leaf.low)} to {_short(leaf.high)}" if acting else ""
            return f"Box of {leaf.env_dtype if acting else leaf.dtype} {list(leaf.shape)}{bounds}"
        case DiscreteSpec():
            return f"Discrete({leaf.n}{f', start {leaf.start}' if acting and leaf.start else ''}){dtype}"
        case MultiDiscreteSpec():
            start = f", start {list(leaf.start)}" if acting and any(leaf.start) else ""
            return f"MultiDiscrete({list(leaf.nvec)}{start}){dtype}"
    return f"MultiBinary({list(leaf.shape)}){dtype}"


def _short(bound: np.ndarray) -> str:
    values = np.unique(bound)
    if len(values) == 1:
        return f"{values[0]:g}"
    return np.array2string(bound, precision=4, threshold=8, edgeitems=3).replace("\n", "")
