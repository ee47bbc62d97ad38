"""Video files: one frame after the other through FFmpeg, under another name until they are whole.

imageio-ffmpeg brings the program. It is started here, as imageio's own writer calls ``fork`` to do so, which JAX's threads
do not survive.
"""

import importlib.util
import os
import re
import select
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from headrace.errors import ConfigError, RunDirectoryError, WaitTimeoutError

GIF_MOST_FPS = 50.0
"""A GIF's clock ticks in 1/100 s and viewers slow down what changes at each tick; more frames a second play slower."""
WAIT_S = 120.0
"""How long FFmpeg may take for one frame, and for the end of a file."""
_PALETTES = "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1"  # one a frame: nothing is held back
_ENCODE = {
    ".mp4": ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "10", "-movflags", "+faststart"],
    ".gif": ["-vf", _PALETTES, "-loop", "0"],
}


class Sink(Protocol):
    """Takes the frames of one episode; a frame is uint8 ``[H, W, 3]`` and not kept."""

    def add(self, frame: np.ndarray) -> None:
        """The next frame."""
        ...

    def finish(self) -> None:
        """The episode is complete."""
        ...

    def discard(self) -> None:
        """The episode is not going to be complete; leave nothing behind. Safe after ``finish`` and twice."""
        ...


class Together:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def add(self, frame: np.ndarray) -> None:
        """The next frame, to each."""
        for sink in self._sinks:
            sink.add(frame)

    def finish(self) -> None:
        """Complete for each."""
        for sink in self._sinks:
            sink.finish()

    def discard(self) -> None:
        """Over for each."""
        for sink in self._sinks:
            sink.discard()


def check_path(path: Path) -> None:
    """Whether ``path`` can be written as a video.

    Raises:
        ConfigError: its ending is none of a video, or there is no FFmpeg.
    """
    if path.suffix not in _ENCODE:
        raise ConfigError(f"{path}: expected a name that ends with {' or '.join(_ENCODE)}")
    ffmpeg()


def ffmpeg() -> str:
    """Where FFmpeg is.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        raise ConfigError(
            'video needs imageio-ffmpeg, which is not installed; run: pip install "headrace[video]"'
        )
    import imageio_ffmpeg

    try:
        return imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:  # installed without a program for this system
        raise ConfigError(f"video needs FFmpeg: {error}") from error


def partial_name(path: Path) -> Path:
    """The name of a file that is being written; its ending tells FFmpeg the format."""
    return path.with_name(f".partial-{path.name}")


class VideoFile:
    """One video. Nothing goes by its name before ``finish``; ``discard`` leaves nothing.

    MP4 is H.264 in 4:2:0, which every player shows and which halves the resolution of colours; a side of odd length is
    continued by one pixel, as it wants even ones. GIF has 256 colours a frame and all its pixels.
    """

    def __init__(self, path: Path, fps: float) -> None:
        """FFmpeg is started by the first frame, whose size is that of all."""
        self.path, self.frames, self.done = path, 0, False
        self._fps = min(fps, GIF_MOST_FPS) if path.suffix == ".gif" else fps
        self._shape: tuple[int, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None

    def add(self, frame: np.ndarray) -> None:
        """Write a frame.

        Raises:
            RunDirectoryError: the file cannot be written, or the frame is of another size.
            WaitTimeoutError: FFmpeg does not take it.
        """
        if self.path.suffix == ".mp4":
            height, width, _ = frame.shape
            frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        if self._process is None:
            self._open(frame.shape)
        if frame.shape != self._shape:
            raise RunDirectoryError(
                f"{self.path}: frame {self.frames} is {frame.shape}, expected {self._shape} as the first; "
                "draw all frames of an episode in one size"
            )
        self._write(memoryview(np.ascontiguousarray(frame).reshape(-1).data))
        self.frames += 1

    def finish(self) -> None:
        """Complete the file under its name, over one that is there.

        Raises:
            RunDirectoryError: FFmpeg failed.
            WaitTimeoutError: it does not come to an end.
        """
        if self._process is None:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            status = self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired as error:
            raise WaitTimeoutError(f"{self.path}: FFmpeg did not finish within {WAIT_S:g} s") from error
        except OSError as error:
            raise self._failed() from error
        if status:
            raise self._failed()
        os.replace(partial_name(self.path), self.path)
        self.done = True
        self._forget()

    def discard(self) -> None:
        """Stop FFmpeg and remove what it wrote."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait(WAIT_S)
        partial_name(self.path).unlink(missing_ok=True)
        self._forget()

    def _open(self, shape: tuple[int, ...]) -> None:
        height, width, _ = self._shape = shape
        given = [
            "-f",
            "rawvideo",
            "-pix_fmt",
            "rgb24",
            "-s",
            f"{width}x{height}",
            "-r",
            f"{self._fps:g}",
            "-i",
            "-",
        ]
        target = [*_ENCODE[self.path.suffix], f"file:{partial_name(self.path)}"]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process, in _forget)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A session of its own: Ctrl-C is for us, who then decide what becomes of the file.
            self._process = subprocess.Popen(
                [ffmpeg(), "-y", "-v", "error", *given, *target],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                bufsize=0,
                start_new_session=True,
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), os.name != "posix")
        except OSError as error:
            self._said.close()
            raise RunDirectoryError(f"{self.path} cannot be written: {error}") from error

    def _write(self, data: memoryview) -> None:
        assert self._process is not None and self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        while data:
            # On Windows select knows no pipes; there the wait is without a bound.
            if os.name == "posix" and not select.select([], [pipe], [], WAIT_S)[1]:
                raise WaitTimeoutError(
                    f"{self.path}: FFmpeg did not take frame {self.frames} within {WAIT_S:g} s"
                )
            try:
                data = data[os.write(pipe, data) :]
            except OSError as error:
                raise self._failed() from error

    def _failed(self) -> RunDirectoryError:
        """FFmpeg's own words."""
        assert self._process is not None and self._said is not None
        self._process.kill()
        self._process.wait(WAIT_S)
        self._said.seek(0)
        said = " ".join(self._said.read().decode(errors="replace").split())
        # Its messages begin with the name and address of the part that speaks.
        said = re.sub(r"\[\S+ @ 0x\w+\] ?", "", said)
        return RunDirectoryError(f"{self.path} cannot be written: FFmpeg said: {said or 'nothing'}")

    def _forget(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()  # unbuffered: nothing is left to be written
        if self._said is not None:
            self._said.close()
        self._process = self._said = None
