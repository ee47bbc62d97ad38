"""Videos and `headrace play`: which frames they have, where they go, and that nothing is left behind."""

import io
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import AsyncGroup, ScriptedEnv, tiny
from painter import STEP, Painter
from rich.console import Console
from test_runtime_sync import metrics

from headrace.cli.main import run as command
from headrace.envs import make_group
from headrace.envs.render import as_rgb, drawer, fps_of
from headrace.errors import ConfigError, EnvironmentFailure, EnvironmentIdError, RunDirectoryError
from headrace.runtime import video
from headrace.runtime.live import Terminal, Window, fit, view
from headrace.runtime.play import play
from headrace.runtime.recorder import Recorder
from headrace.runtime.run import train
from headrace.runtime.video import VideoFile, partial_name

pytest.importorskip("imageio_ffmpeg")
ADD = VideoFile.add


def make_blind():
    """Takes no render_mode."""
    return ScriptedEnv(3)


class Asserting(ScriptedEnv):
    """Knows its render modes as Gymnasium's template does."""

    def __init__(self, render_mode=None):
        super().__init__(3)
        assert render_mode is None or render_mode in self.metadata["render_modes"]


class Imaging(ScriptedEnv):
    """Cannot draw, but sees pictures: a stack of two, the newest last."""

    def __init__(self):
        super().__init__(5)
        image = gym.spaces.Box(0, 255, (2, 10, 14), np.uint8)
        self.observation_space = gym.spaces.Dict({"see": image, "count": gym.spaces.Discrete(9)})

    def _observation(self):
        now = np.full((10, 14), STEP * self._t, np.uint8)
        return {"see": np.stack([np.zeros_like(now), now]), "count": self._t}


class Fault(Painter):
    """Its picture is none."""

    def render(self):
        return None if self._t == 2 else super().render()


def make_fault(render_mode=None):
    return Fault(render_mode=render_mode)


def decode(path):
    """Frames ``[n, H, W, 3]`` and frames a second of a file."""
    words = [
        video.ffmpeg(),
        "-i",
        str(path),
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-fps_mode",
        "passthrough",
        "-",
    ]
    done = subprocess.run(words, capture_output=True, check=True, timeout=60)
    said = done.stderr.decode()
    width, height = map(int, re.search(r"Video:.* (\d+)x(\d+)", said).groups())
    frames = np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)
    return frames, float(re.search(r"([\d.]+) fps", said)[1])


def steps_shown(frames):
    """The step of the episode that each frame of a ``Painter`` shows; each is one grey."""
    assert np.ptp(frames.reshape(len(frames), -1), axis=1).max() <= 4
    return np.rint(frames.reshape(len(frames), -1).mean(1) / STEP).astype(int).tolist()


def begun(film):
    """Add frames until FFmpeg has begun to write."""
    for _ in range(2000):
        if partial_name(film.path).exists():
            return
        ADD(film, np.zeros(film._shape, np.uint8))
        time.sleep(0.005)
    raise AssertionError("FFmpeg writes nothing")


def children():
    return [p.name() for p in psutil.Process().children() if "ffmpeg" in p.name()]


def files(path):
    return sorted(p.name for p in Path(path).iterdir())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of painters: whose episodes terminate, and whose are truncated."""
    base = tmp_path_factory.mktemp("runs")
    for name, kwargs in {"ends": {"length": 5}, "limit": {"length": 5, "truncate": True}}.items():
        train(tiny(base / name, env__id="painter:make_painter", env__kwargs=kwargs, total_steps=64))
    return base


@pytest.fixture
def handed(monkeypatch):
    """The frames handed to each file, by its name."""
    frames = {}

    def tapped(self, frame):
        frames.setdefault(self.path.name, []).append(frame.copy())
        ADD(self, frame)

    monkeypatch.setattr(VideoFile, "add", tapped)
    return frames


# Which frames.


@pytest.mark.parametrize("name", ["ends", "limit"])
@pytest.mark.parametrize("ending", ["mp4", "gif"])
def test_h15b_a_video_has_the_frames_of_its_episode_and_no_other(runs, tmp_path, handed, name, ending):
    result = play(runs / name, video=tmp_path / f"film.{ending}", episodes=2)
    paths = [tmp_path / f"film-{k}.{ending}" for k in (0, 1)]
    assert result["videos"] == [str(p) for p in paths] and files(tmp_path) == [p.name for p in paths]
    assert result["lengths"] == [5, 5] and result["step"] > 0
    for path in paths:
        exact = [frame[0, 0].tolist() for frame in handed[path.name]]
        assert exact == [[STEP * t] * 3 for t in range(6)]
        assert all(f.shape == (12, 16, 3) and (f == f[0, 0]).all() for f in handed[path.name])
        assert steps_shown(decode(path)[0]) == [0, 1, 2, 3, 4, 5]


def test_one_episode_goes_by_the_name_itself_over_what_was_there(runs, tmp_path):
    path = tmp_path / "new" / "film.gif"
    for fps in (None, 25.0):
        assert play(runs / "ends", video=path, fps=fps)["videos"] == [str(path)]
        assert decode(path)[1] == (fps or 10.0)
    assert files(path.parent) == ["film.gif"]


@pytest.mark.parametrize("ending, size", [("mp4", (14, 18)), ("gif", (13, 17))])
def test_sizes_are_never_scaled(tmp_path, ending, size):
    frame = np.zeros((13, 17, 3), np.uint8)
    frame[:, 8:], frame[-1] = 120, 240
    film = VideoFile(tmp_path / f"odd.{ending}", 10)
    film.add(frame)
    film.finish()
    (got,) = decode(film.path)[0]
    assert got.shape[:2] == size
    wanted = np.pad(frame, ((0, size[0] - 13), (0, size[1] - 17), (0, 0)), mode="edge")
    assert np.abs(got.astype(int) - wanted).max() < 12


@pytest.mark.parametrize("fps, plays", [(20, 20.0), (125, 50.0)])
def test_a_gif_has_all_frames_whatever_its_clock(tmp_path, fps, plays):
    film = VideoFile(tmp_path / "quick.gif", fps)
    for value in (0, 40, 40, 40, 80):
        film.add(np.full((8, 8, 3), value, np.uint8))
    film.finish()
    assert steps_shown(decode(film.path)[0]) == [0, 1, 1, 1, 2]
    assert decode(film.path)[1] == plays


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self, log):
        self.frames, self.log = [], log
        log.append(self)
        self.end = None

    def add(self, frame):
        self.frames.append(int(frame[0, 0, 0]) // STEP)

    def finish(self):
        self.end = "finished"

    def discard(self):
        self.end = "discarded"


def make_painters(num_envs, mode=AutoresetMode.NEXT_STEP, render_mode=None):
    return SyncVectorEnv([lambda: Painter(3, render_mode=render_mode)] * num_envs, autoreset_mode=mode)


def make_painters_reset_by_mask(num_envs, render_mode=None):
    return make_painters(num_envs, AutoresetMode.DISABLED, render_mode)


def make_painters_at_once(num_envs, render_mode=None):
    return make_painters(num_envs, AutoresetMode.SAME_STEP, render_mode)


def seed_of(slot, life):
    return slot


def painters(name, slots=2, **options):
    module = "painter" if name == "make_painter" else "test_play"
    return make_group(f"{module}:{name}", slots, seed_of, render=True, **options)


def drive(group, recorder, messages):
    see = recorder.attach(group)
    for _ in range(messages):
        timestep, ids = group.recv(10.0)
        see(timestep, ids)
        group.send(np.zeros(len(ids), np.float32), ids)


@pytest.mark.parametrize(
    "name", ["make_painter", "make_painters", "make_painters_reset_by_mask", "asynchronous", "workers"]
)
def test_every_kind_of_group_gives_the_frames_of_whole_episodes(name):
    if name == "asynchronous":
        group = AsyncGroup(lambda slot: painters("make_painter", 1), 2, seed=0)
        group.renders, group.render = True, lambda slot: group._envs[slot].render(0)
    elif name == "workers":
        group = painters("make_painter", 3, workers=2, batch_size=1)
        assert fps_of(group) == 10.0
    else:
        group = painters(name)
    log = []
    recorder = Recorder(lambda slot, fps: Kept(log) if slot == 1 else None, slots=(0, 1))
    drive(group, recorder, 60)
    recorder.close()
    group.close()
    length = 5 if name in ("make_painter", "asynchronous", "workers") else 3
    assert len(log) >= 3 and {k.end for k in log[:-1]} == {"finished"}
    assert all(k.frames == list(range(length + 1)) for k in log[:-1])
    assert log[-1].end == "discarded" or len(log[-1].frames) == length + 1


def test_same_step_autoreset_cannot_be_drawn():
    group = painters("make_painters_at_once")
    with pytest.raises(ConfigError, match="cannot be drawn"):
        drawer(group)
    group.close()


def test_a_cut_episode_is_discarded_and_the_next_begins_with_its_own_frame():
    made, log = [], []

    def make(slot):
        made.append(painters("make_painter", 1))
        return made[-1]

    group = AsyncGroup(make, 1, seed=0)
    group.renders, group.render = True, lambda slot: group._envs[slot].render(0)
    recorder = Recorder(lambda slot, fps: Kept(log))
    drive(group, recorder, 3)
    group.restart(0)
    drive(group, recorder, 6)
    group.close()
    assert [(k.frames, k.end) for k in log] == [([0, 1, 2], "discarded"), ([0, 1, 2, 3, 4, 5], "finished")]


def test_an_image_that_is_observed_is_drawn_where_nothing_else_can_be():
    group = make_group("test_play:Imaging", 1, lambda slot, life: 0, render=True)
    assert not group.renders and fps_of(group) == 30.0
    log = []
    drive(group, Recorder(lambda slot, fps: Kept(log)), 6)
    assert log[0].frames == [0, 1, 2, 3, 4, 5]
    timestep, _ = group.recv(10.0)
    assert drawer(group)(timestep, 0, 0).shape == (10, 14, 3)
    group.close()


@pytest.mark.parametrize(
    "env_id", ["envpool:CartPole-v1", "envpool:Pong-v5", "CartPole-v1", "vector:CartPole-v1"]
)
def test_real_environments_are_drawn_without_being_changed(env_id):
    pytest.importorskip("envpool" if env_id.startswith("envpool") else "pygame")
    rng, groups = np.random.default_rng(0), []
    for render in (True, False):
        groups.append(make_group(env_id, 2, lambda slot, life: slot, max_episode_steps=8, render=render))
    draw, drawn = drawer(groups[0]), []
    for _ in range(20):
        (watched, ids), (plain, _) = (group.recv(10.0) for group in groups)
        drawn.append([draw(watched, k, slot).copy() for k, slot in enumerate(ids)])
        for a, b in zip(watched[:5], plain[:5], strict=True):
            np.testing.assert_array_equal(a, b)
        action = rng.integers(0, 2, 2)
        for group in groups:
            group.send(action, ids)
    for group in groups:
        group.close()
    assert drawn[0][0].dtype == np.uint8 and drawn[0][0].shape[2] == 3
    assert len({frame.tobytes() for frames in drawn for frame in frames}) > (1 if "Pong" in env_id else 10)


def test_pictures_in_grey_and_with_alpha():
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3)
    for given in (grey, grey[..., None]):
        np.testing.assert_array_equal(as_rgb(given, "env"), np.stack([grey] * 3, -1))
    rgba = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    np.testing.assert_array_equal(as_rgb(rgba, "env"), rgba[..., :3])
    for wrong in (
        None,
        grey.astype(np.float32),
        np.zeros((2, 3, 2), np.uint8),
        [grey, None][1],
        np.zeros((0, 3, 3)),
    ):
        with pytest.raises(EnvironmentFailure, match=r"env env: render\(\) gave .*; expected uint8"):
            as_rgb(wrong, "env")


# During training.


VIDEO = {"video__every": 32, "video__episodes": 2, "video__actors": 3, "checkpoint__every_steps": 48}
PAINT: dict[str, Any] = {
    "env__id": "painter:make_painter",
    "env__kwargs": {"length": 6},
    "total_steps": 160,
}


def test_h15a_videos_change_no_training(tmp_path, handed):
    evaluated = PAINT | {"eval__every_steps": 48, "eval__num_envs": 2, "eval__episodes": 2}
    plain = train(tiny(tmp_path / "plain", **evaluated))
    Painter.seeds.clear()
    filmed = train(tiny(tmp_path / "filmed", **evaluated, **VIDEO))
    assert filmed["params_sha256"] == plain["params_sha256"]
    assert metrics(tmp_path / "filmed") == metrics(tmp_path / "plain")
    log = (tmp_path / "filmed" / "log.txt").read_text()
    names = files(tmp_path / "filmed" / "videos")
    steps = sorted({int(name.split("-")[1]) for name in names})
    assert len(steps) >= 4 and all(b - a <= 48 for a, b in itertools.pairwise(steps)) and 32 <= steps[0] < 64
    for step in steps:
        assert {f"step-{step}-0.mp4", f"step-{step}-1.mp4"} <= set(names)
    actors = [name for name in names if "actor" in name]
    assert {name.split("-")[3] for name in actors} == {"0.mp4", "1.mp4", "2.mp4"}  # three of the four slots
    assert all(f"videos/{name}" in log for name in names)
    for name in names:
        shown = [int(frame[0, 0, 0]) // STEP for frame in handed[name]]
        assert shown == [0, 1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "plain" / "videos").exists()
    seeds = [seed for seed in Painter.seeds if seed]  # 0 is that of a look at the spaces
    assert len(set(seeds)) == len(seeds) > 10  # what is filmed, measured and trained on is never the same


def test_videos_of_a_run_on_threads(tmp_path):
    paint = PAINT | {"total_steps": 256}
    train(tiny(tmp_path / "run", runtime="threads", **paint, **VIDEO))
    names = files(tmp_path / "run" / "videos")
    assert len([n for n in names if "actor" in n]) >= 3 and len([n for n in names if "actor" not in n]) >= 2
    assert not [n for n in names if n.startswith(".")] and children() == []


def test_environments_in_worker_processes_are_filmed(tmp_path, handed):
    paint = PAINT | {"total_steps": 128, "env__workers": 2}
    run = tmp_path / "run"
    train(tiny(run, **paint, **VIDEO | {"video__episodes": 1}))
    names = files(run / "videos")
    assert [n for n in names if "actor" in n] and [n for n in names if "actor" not in n]
    result = play(run, video=tmp_path / "film.gif")
    for name in [*names, Path(result["videos"][0]).name]:
        assert [int(frame[0, 0, 0]) // STEP for frame in handed[name]] == [0, 1, 2, 3, 4, 5, 6]


def test_a_run_that_fails_leaves_no_half_video(tmp_path, monkeypatch):
    def broken(self, frame):
        ADD(self, frame)
        if self.frames == 4 and "actor" not in self.path.name:
            begun(self)
            raise RuntimeError("no more film")

    monkeypatch.setattr(VideoFile, "add", broken)
    with pytest.raises(RuntimeError, match="no more film"):
        train(tiny(tmp_path / "run", **PAINT, **VIDEO))
    assert files(tmp_path / "run" / "videos") == [] and children() == []
    left = tmp_path / "run" / "videos" / ".partial-step-9-0.mp4"  # as a killed process leaves it
    left.write_text("")
    monkeypatch.setattr(VideoFile, "add", ADD)
    train(tiny(tmp_path / "run", **PAINT, **VIDEO))
    assert not left.exists()


def test_settings_of_videos_that_contradict_each_other():
    for wrong, message in {
        "needs video.every": {"video__actors": 1},
        "records nothing": {"video__every": 10, "video__episodes": 0},
        "more than env.num_envs": {"video__every": 10, "video__actors": 5},
        "expected at least 0": {"video__every": -1},
    }.items():
        with pytest.raises(ConfigError, match=wrong):
            tiny(**message)


# What cannot be.


@pytest.mark.parametrize("env", ["make_blind", "Asserting"])
def test_an_environment_without_pictures_is_refused_at_the_start(tmp_path, env):
    config = tiny(tmp_path / "run", env__id=f"test_play:{env}", video__every=100)
    with pytest.raises(ConfigError, match=rf"test_play:{env} cannot be drawn; expected .* render_mode"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_what_is_missing_is_named_at_the_start(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(
        EnvironmentIdError, match=r'CartPole-v1 cannot draw: .* pip install "headrace\[video\]"'
    ):
        train(tiny(tmp_path / "run", video__every=100))
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    line = 'headrace: error: video needs imageio-ffmpeg, which is not installed; run: pip install "headrace[video]"\n'
    with pytest.raises(ConfigError, match=r"headrace\[video\]"):
        train(tiny(tmp_path / "run", **PAINT, **VIDEO))
    assert not (tmp_path / "run").exists()
    assert command(["play", str(runs / "ends"), "--video", str(tmp_path / "x.mp4")]) == 2
    assert capsys.readouterr().err == line and files(tmp_path) == []


def test_bad_frames_and_bad_files_are_one_line_and_leave_nothing(runs, tmp_path):
    for path, message in {"film.avi": r"film.avi: expected a name that ends with .mp4 or .gif"}.items():
        with pytest.raises(ConfigError, match=message):
            play(runs / "ends", video=tmp_path / path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"film\.mp4 cannot be written"):
        play(runs / "ends", video=tmp_path / "file" / "film.mp4")
    train(tiny(tmp_path / "fault", env__id="test_play:make_fault", total_steps=32))
    with pytest.raises(EnvironmentFailure, match=r"make_fault: render\(\) gave None; expected uint8"):
        play(tmp_path / "fault", video=tmp_path / "new" / "film.mp4")
    assert files(tmp_path / "new") == [] and children() == []
    with pytest.raises(RunDirectoryError, match="no run"):
        play(tmp_path / "nowhere", video=tmp_path / "film.mp4")
    with pytest.raises(RunDirectoryError, match="step 3"):
        play(runs / "ends", video=tmp_path / "film.mp4", step=3)
    with pytest.raises(ConfigError, match="episodes 0"):
        play(runs / "ends", episodes=0)


def test_a_picture_of_another_size_and_a_dead_ffmpeg(tmp_path):
    film = VideoFile(tmp_path / "a.mp4", 10)
    film.add(np.zeros((8, 8, 3), np.uint8))
    begun(film)
    with pytest.raises(RunDirectoryError, match=r"frame \d+ is \(8, 10, 3\), expected \(8, 8, 3\)"):
        film.add(np.zeros((8, 10, 3), np.uint8))
    assert files(tmp_path) == [".partial-a.mp4"]
    film.discard()
    film.discard()
    assert files(tmp_path) == [] and children() == []
    film = VideoFile(tmp_path / "b.mp4", 10)
    film.add(np.zeros((8, 8, 3), np.uint8))
    film._process.kill()
    film._process.wait(10)
    with pytest.raises(RunDirectoryError, match=r"b\.mp4 cannot be written: FFmpeg said"):
        for _ in range(1000):
            film.add(np.zeros((8, 8, 3), np.uint8))
        film.finish()
    film.discard()
    assert files(tmp_path) == []


def test_an_ffmpeg_that_takes_nothing_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "WAIT_S", 0.3)
    film = VideoFile(tmp_path / "a.mp4", 10)
    film.add(np.zeros((8, 8, 3), np.uint8))
    film._process.send_signal(signal.SIGSTOP)
    with pytest.raises(TimeoutError, match="FFmpeg did not"):
        for _ in range(1000):
            film.add(np.zeros((64, 64, 3), np.uint8)[:8, :8])
        film.finish()
    monkeypatch.setattr(video, "WAIT_S", 20.0)
    film.discard()
    assert files(tmp_path) == [] and children() == []


# As it is played.


def test_ctrl_c_keeps_what_is_whole_and_nothing_else(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Painter, "interrupt_at", 3)  # of the second episode
    before = signal.getsignal(signal.SIGINT)
    words = ["play", str(runs / "ends"), "--video", str(tmp_path / "a.mp4"), "--episodes", "3", "--json"]
    assert command(words) == 130
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["episodes"] == 1 and told["videos"] == [str(tmp_path / "a-0.mp4")]
    assert files(tmp_path) == ["a-0.mp4"] and children() == []
    assert signal.getsignal(signal.SIGINT) is before


def test_the_command(runs, tmp_path, capsys):
    run = runs / "ends"
    assert command(["play", str(run), "--greedy"]) == 0
    said = capsys.readouterr()
    (name,) = [n for n in files(run / "videos") if n.startswith("play-")]
    assert f"videos       ['{run}/videos/{name}']" in said.out and said.err == ""
    step = int(name.removeprefix("play-").removesuffix(".mp4"))
    assert step in {int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdecimal()}
    words = [
        "play",
        str(run),
        "--step",
        str(step),
        "--video",
        str(tmp_path / "a.gif"),
        "--fps",
        "12.5",
        "--json",
    ]
    assert command(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {
        "run", "step", "episodes", "return_mean", "return_std", "return_min", "return_max", "length_mean", "returns",
        "lengths", "videos",
    }  # fmt: skip
    assert told["step"] == step and told["episodes"] == 1 and told["lengths"] == [5]
    assert command(["play", str(run), "--fps", "0"]) == 2
    assert command(["play", str(run), "--vidoe", "a.mp4"]) == 2 and "--video" in capsys.readouterr().err


def test_exploring_draws_actions_by_the_seed(runs, tmp_path):
    def returns(**options):
        return play(runs / "ends", video=tmp_path / "a.gif", **options)["returns"]

    assert returns(seed=1) == returns(seed=2)  # nothing random in the environment
    assert returns(seed=1, explore=True) == returns(seed=1, explore=True) != returns(seed=2, explore=True)


# Live.


def terminal(width=20, height=7):
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        width=width,
        height=height,
        _environ={},
    )


def test_live_in_a_terminal(runs, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    console = terminal()
    result = play(runs / "ends", live=True, fps=500, episodes=2, console=console)
    assert result["videos"] == [] and result["episodes"] == 2
    shown = console.file.getvalue()
    # 12 x 16 pixels on 20 x 7 characters: one line is left free, so 12 pixels high, 16 wide, in one colour.
    for t in range(6):
        grey = f"{STEP * t};{STEP * t};{STEP * t}"
        assert shown.count(f"\x1b[38;2;{grey};48;2;{grey}m{'▀' * 16}\x1b[0m") >= 2 * 6, t
    assert shown.endswith("\x1b[?25h")  # the cursor is there again


def test_live_and_video_show_the_same_episode(runs, tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    console = terminal()
    result = play(runs / "ends", live=True, video=tmp_path / "a.mp4", fps=500, console=console)
    assert (
        steps_shown(decode(result["videos"][0])[0]) == [0, 1, 2, 3, 4, 5] and "▀" in console.file.getvalue()
    )


def test_frames_are_fitted_in_their_proportions():
    frame = np.zeros((4, 8, 3), np.uint8)
    frame[:2, :4], frame[2:, 4:] = 100, 200
    half = fit(frame, 2, 100)  # 2 of 4 rows, so 4 of 8 columns
    assert half[..., 0].tolist() == [[100, 100, 0, 0], [0, 0, 200, 200]]
    # Of two rows in four lines: one above the other, of columns 0-1, 2-4 and 5-7.
    assert fit(frame, 2, 3)[..., 0].tolist() == [[100, 66, 0], [0, 66, 200]]
    twice = fit(frame, 8, 100)
    assert (
        twice.shape == (8, 16, 3) and (twice[::2, ::2] == frame).all() and (twice[1::2, 1::2] == frame).all()
    )
    assert fit(np.zeros((500, 1, 3), np.uint8), 10, 10).shape == (10, 1, 3)


def test_two_colours_are_the_halves_of_a_character():
    console = terminal(width=4, height=3)
    shown = Terminal(console)
    frame = np.zeros((4, 4, 3), np.uint8)
    frame[0, 0], frame[3, 3] = (1, 2, 3), (4, 5, 6)
    shown.add(frame)
    shown.close()
    text = console.file.getvalue()
    assert "\x1b[38;2;1;2;3;48;2;0;0;0m▀\x1b[0m\x1b[38;2;0;0;0;48;2;0;0;0m▀▀▀\x1b[0m" in text
    assert "\x1b[38;2;0;0;0;48;2;0;0;0m▀▀▀\x1b[0m\x1b[38;2;0;0;0;48;2;4;5;6m▀\x1b[0m" in text


def test_where_live_is_shown(runs, monkeypatch, capsys):
    pygame = pytest.importorskip("pygame")
    closed = []
    plain = Console(file=io.StringIO())
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    window = view(lambda: closed.append(1), terminal(), {"DISPLAY": ":0"})
    assert isinstance(window, Window)
    window.pace.wait()
    frame = np.zeros((12, 16, 3), np.uint8)
    frame[3, 5] = 10, 20, 30
    window.add(frame)
    assert window._screen.get_size() == (480, 360)  # thirty times as large
    assert tuple(window._screen.get_at((5 * 30 + 29, 3 * 30)))[:3] == (10, 20, 30)
    pygame.event.post(pygame.event.Event(pygame.QUIT))
    window.add(frame)
    assert closed == [1]
    window.close()
    monkeypatch.setenv("SDL_VIDEODRIVER", "none such")
    assert isinstance(view(print, terminal(), {"WAYLAND_DISPLAY": "w"}), Terminal)
    with pytest.raises(ConfigError, match=r"--live: the display cannot be opened .* use --video"):
        view(print, plain, {"DISPLAY": ":0"})
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(ConfigError, match=r"headrace\[video\]"):
        view(print, plain, {"DISPLAY": ":0"})
    with pytest.raises(ConfigError, match=r"--live: there is no display .* no terminal"):
        view(print, plain, {})
