"""Pictures of environments: of a group that draws, or of image observations where it does not.

A group that was made with ``render`` and can draw has

- ``renders`` True;
- ``render(slot)``: the picture of what the slot said last, to be called between ``recv`` and ``send``;
- ``render_fps``: frames a second that the environment asks for, or None.

Between ``recv`` and ``send`` an environment stands where its received row has it: at a last row it was not reset yet. So
one picture a row makes exactly the pictures of an episode.
"""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from headrace import spaces
from headrace.envs.contract import EnvGroup
from headrace.errors import ConfigError, EnvironmentFailure
from headrace.spaces import BoxSpec, Leaf, Spec
from headrace.types import PyTree, TimeStep

Draw: TypeAlias = Callable[[TimeStep, int, int], np.ndarray]
"""``draw(timestep [b, ...], k, slot) -> frame``: the picture of row k, which ``slot`` of the group said."""

DEFAULT_FPS = 30.0
_SMALLEST = 8
"""Pixels a side; a smaller uint8 array is a board or a code, not a picture."""


def drawer(group: EnvGroup) -> Draw:
    """What draws the rows of ``group``; frames are uint8 ``[H, W, 3]`` and may be written again later.

    Raises:
        ConfigError: it can neither draw nor has an image in its observation.
    """
    name, spec = group.spec.name, group.spec.observation
    if getattr(group, "renders", False):
        render: Callable[[int], Any] = group.render  # type: ignore[attr-defined]
        return lambda timestep, k, slot: as_rgb(render(slot), name)
    images = [leaf for _, leaf in spaces.leaves(spec) if is_image(leaf)]
    if len(images) == 1:
        return lambda timestep, k, slot: _image(spec, timestep.observation, k)
    raise ConfigError(
        f"env {name} cannot be drawn; expected one that Gymnasium or EnvPool makes with render_mode='rgb_array' (a "
        f"make_env of your own takes render_mode and hands it on; see docs/runs.md), or one uint8 image in the "
        f"observation, got {len(images)}"
    )


def has_display(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a window could be opened."""
    return sys.platform in ("darwin", "win32") or bool(
        environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY")
    )


def quieten_sdl() -> None:
    """Keep SDL, which draws Gymnasium's classic environments, from greeting, from our signals, from devices not there."""
    settings = {"PYGAME_HIDE_SUPPORT_PROMPT": "1", "SDL_NO_SIGNAL_HANDLERS": "1", "SDL_AUDIODRIVER": "dummy"}
    if not has_display():
        settings["SDL_VIDEODRIVER"] = "dummy"
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def fps_of(group: EnvGroup) -> float:
    """Frames a second that the environment asks for, or ``DEFAULT_FPS``."""
    return float(getattr(group, "render_fps", None) or DEFAULT_FPS)


def as_rgb(frame: Any, name: str) -> np.ndarray:
    """A picture in grey, RGB or RGBA as uint8 ``[H, W, 3]``.

    Raises:
        EnvironmentFailure: it is none.
    """
    array = np.asarray(frame) if frame is not None else np.empty(())
    shape = (*array.shape, 1) if array.ndim == 2 else array.shape
    if array.dtype != np.uint8 or len(shape) != 3 or shape[2] not in (1, 3, 4) or 0 in shape:
        got = "None" if frame is None else f"{array.dtype} of shape {array.shape}"
        raise EnvironmentFailure(f"env {name}: render() gave {got}; expected uint8 of shape [H, W, 3]")
    array = array.reshape(shape)
    return np.repeat(array, 3, axis=2) if shape[2] == 1 else array[..., :3]


def is_image(leaf: Leaf) -> bool:
    """Whether the leaf is a picture: uint8 ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]``, at least 8 pixels a side."""
    if not isinstance(leaf, BoxSpec) or leaf.dtype != np.uint8 or len(leaf.shape) not in (2, 3):
        return False
    sides = leaf.shape if len(leaf.shape) == 2 else sorted(leaf.shape)[1:]
    return min(sides) >= _SMALLEST


def _image(spec: Spec, observation: PyTree, k: int) -> np.ndarray:
    """The picture in row k: three channels are colours, others a stack whose newest comes last."""
    found: list[np.ndarray] = []

    def look(leaf: Leaf, value: np.ndarray) -> None:
        if is_image(leaf):
            found.append(np.asarray(value[k]))

    spaces.map_leaves(look, spec, observation)
    image = found[0] if found[0].ndim == 3 else found[0][..., None]
    channels = int(np.argmin(image.shape))
    image = np.moveaxis(image, channels, 2)
    return image if image.shape[2] == 3 else np.repeat(image[..., -1:], 3, axis=2)
