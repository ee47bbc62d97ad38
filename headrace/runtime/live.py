"""Frames as they come: in a window where there is a display, else in a terminal."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.segment import Segment
from rich.style import Style

from headrace.envs.render import DEFAULT_FPS, has_display, quieten_sdl
from headrace.errors import ConfigError

_WINDOW = 480
"""Pixels that a window's longer side has at most through magnifying."""


class Pace:
    """Waits so that calls are ``1 / fps`` seconds apart, and catches up with nothing."""

    def __init__(self, fps: float) -> None:
        self._interval_s, self._due = 1.0 / fps, time.monotonic()

    def wait(self) -> None:
        """Until the next frame is due."""
        time.sleep(max(self._due - time.monotonic(), 0.0))
        self._due = time.monotonic() + self._interval_s


class Terminal:
    """Frames as half blocks in true colour, two pixels a character, as large as the terminal allows."""

    def __init__(self, console: Console) -> None:
        """``console`` is drawn on from the first frame until ``close``."""
        self._console, self.pace = console, Pace(DEFAULT_FPS)
        self._live: Live | None = None

    def add(self, frame: np.ndarray) -> None:
        """Draw a frame when it is due."""
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
        self.pace.wait()
        height, width = self._console.height - 1, self._console.width
        self._live.update(HalfBlocks(fit(frame, 2 * height, width)), refresh=True)

    def finish(self) -> None:
        """The next episode is drawn in the same place."""

    def discard(self) -> None:
        """Nothing is kept of a frame."""

    def close(self) -> None:
        """Leave the last frame, with the cursor below it."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class HalfBlocks:
    """A frame of even height as text: the upper pixel in the foreground, the lower one in the background."""

    def __init__(self, frame: np.ndarray) -> None:
        self._frame = frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Neighbours of one colour are one piece of text."""
        pairs = self._frame.reshape(-1, 2, *self._frame.shape[1:])
        for upper, lower in pairs.tolist():
            begin = 0
            for end in range(1, len(upper) + 1):
                if end == len(upper) or (upper[end], lower[end]) != (upper[begin], lower[begin]):
                    style = Style(color=_rgb(upper[begin]), bgcolor=_rgb(lower[begin]))
                    yield Segment("▀" * (end - begin), style)
                    begin = end
            yield Segment.line()


def _rgb(pixel: list[int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*pixel)


def fit(frame: np.ndarray, most_height: int, most_width: int) -> np.ndarray:
    """``frame`` in its own proportions, as large as fits, of even height: means where it shrinks, repeats where it grows."""
    height, width = frame.shape[:2]
    scale = min(most_height / height, most_width / width)
    rows, columns = max(int(height * scale) // 2 * 2, 2), max(int(width * scale), 1)
    for axis, size in ((0, rows), (1, columns)):
        frame = _resize(frame, axis, size)
    return frame


def _resize(frame: np.ndarray, axis: int, size: int) -> np.ndarray:
    length = frame.shape[axis]
    starts = np.arange(size) * length // size
    if size >= length:
        return np.take(frame, starts, axis=axis)
    sums = np.add.reduceat(frame.astype(np.uint32), starts, axis=axis)
    counts = np.diff(starts, append=length).reshape([-1 if a == axis else 1 for a in range(frame.ndim)])
    return (sums // counts).astype(np.uint8)


class Window:
    """Frames in a window; closing it calls ``closed``."""

    def __init__(self, closed: Callable[[], None]) -> None:
        """Open the display.

        Raises:
            ImportError: pygame is not installed.
            RuntimeError: there is no display.
        """
        quieten_sdl()
        import pygame

        self._pygame, self.pace, self._closed = pygame, Pace(DEFAULT_FPS), closed
        self._screen: Any = None
        self._scale = 1
        pygame.display.init()

    def add(self, frame: np.ndarray) -> None:
        """Draw a frame when it is due; the window takes the size of the first, a small one magnified."""
        pygame = self._pygame
        if self._screen is None:
            self._scale = max(_WINDOW // max(frame.shape), 1)
            height, width, _ = frame.shape
            self._screen = pygame.display.set_mode((width * self._scale, height * self._scale))
            pygame.display.set_caption("headrace play")
        self.pace.wait()
        frame = frame.repeat(self._scale, axis=0).repeat(self._scale, axis=1)
        image = pygame.image.frombuffer(frame.tobytes(), frame.shape[1::-1], "RGB")
        self._screen.blit(image, (0, 0))
        pygame.display.flip()
        if any(event.type == pygame.QUIT for event in pygame.event.get()):
            self._closed()

    def finish(self) -> None:
        """The next episode is drawn in the same window."""

    def discard(self) -> None:
        """Nothing is kept of a frame."""

    def close(self) -> None:
        """Close the window."""
        self._pygame.display.quit()


View: TypeAlias = Window | Terminal


def view(closed: Callable[[], None], console: Console, environ: Mapping[str, str] = os.environ) -> View:
    """A window where there is a display (and pygame), else the terminal behind ``console``; its ``pace`` may be set.

    Raises:
        ConfigError: there is neither.
    """
    why = "there is no display (neither DISPLAY nor WAYLAND_DISPLAY is set)"
    if has_display(environ):
        try:
            return Window(closed)
        except ImportError:
            why = 'the display needs pygame (pip install "headrace[video]")'
        except RuntimeError as error:  # pygame.error is one
            why = f"the display cannot be opened ({error})"
    if console.is_terminal:
        return Terminal(console)
    raise ConfigError(f"--live: {why}, and standard error is no terminal to draw in; use --video FILE.mp4")
