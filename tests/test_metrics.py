"""Meters, the schema, the sinks and the panel."""

import contextlib
import errno
import io
import itertools
import json
import math
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event, SessionLog

from headrace.errors import ConfigError, HeadraceError, RunDirectoryError
from headrace.metrics import meter as meter_module
from headrace.metrics import panel as panel_module
from headrace.metrics import sinks
from headrace.metrics.meter import ROOMS, Meter, Rates, Reading, merge, rates
from headrace.metrics.panel import Panel, Snapshot
from headrace.metrics.schema import SCHEMA, find, markdown
from headrace.metrics.sinks import MetricsWriter


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch, module, name):
        self.now = 100.0
        monkeypatch.setattr(module.time, name, lambda: self.now)


def test_meter_by_hand(monkeypatch):
    clock = Clock(monkeypatch, meter_module, "perf_counter")
    meter = Meter()
    before = meter.read()
    meter.count_in(30)
    meter.count_out(20)
    meter.count_out(20)
    with meter.wait_in():
        clock.now += 1.0
    with meter.wait_out():
        clock.now += 2.0
    clock.now += 1.0
    assert rates(before, meter.read()) == Rates(7.5, 10.0, 0.25, 0.5)
    assert rates(before, before) == Rates(0, 0, 0, 0)
    metrics = rates(before, meter.read()).metrics("envs")
    assert metrics["time/envs/wait_out"] == 0.5 and all(find(name) for name in metrics)


def test_a_wait_that_still_lasts_is_seen_and_counted_once(monkeypatch):
    clock = Clock(monkeypatch, meter_module, "perf_counter")
    meter = Meter()
    readings = [meter.read()]
    with meter.wait_in():
        for _ in range(2):
            clock.now += 3.0
            readings.append(meter.read())
    clock.now += 6.0
    readings.append(meter.read())
    waits = [rates(a, b).wait_in for a, b in itertools.pairwise(readings)]
    assert waits == [1.0, 1.0, 0.0]


def test_an_exception_in_a_wait_is_counted_and_passes(monkeypatch):
    clock = Clock(monkeypatch, meter_module, "perf_counter")
    meter = Meter()
    with pytest.raises(KeyError), meter.wait_out():
        clock.now += 2.0
        raise KeyError
    clock.now += 2.0
    assert meter.read().wait_out_s == 2.0


def test_threads_of_a_room_add_up(monkeypatch):
    clock = Clock(monkeypatch, meter_module, "perf_counter")
    meters = [Meter(), Meter()]
    before = merge(meters)
    for meter, rows in zip(meters, (10, 30), strict=True):
        meter.count_in(rows)
    with meters[0].wait_in():
        clock.now += 4.0
    assert merge(meters) == Reading(104.0, 40, 0, 4.0, 0.0, 2)
    assert rates(before, merge(meters)) == Rates(
        10.0, 0.0, 0.5, 0.0
    )  # one of two threads waited all the time
    assert merge([]) == Reading(104.0, 0, 0, 0, 0, 0) and rates(merge([]), merge([])) == Rates(0, 0, 0, 0)


def test_schema_knows_its_names_and_no_others():
    for name in (
        "steps",
        "loss/total",
        "loss/world_model",
        "dropped_ranges/lag",
        "eval/return_std",
        "time/wall_s",
    ):
        assert find(name).meaning
    for room in ROOMS:
        assert find(f"time/{room}/wait_in").unit == "1"
    assert find("loss/total").name == "loss/total" and find("loss/x").name == "loss/<name>"
    bad = (
        "",
        "loss/",
        "loss/Total",
        "loss/<name>",
        "loss/a/b",
        "time/attic/rate_in",
        "dropped_ranges/bored",
        "xsteps",
    )
    for name in bad:
        with pytest.raises(ConfigError, match="not in the schema"):
            find(name)
    with pytest.raises(ConfigError, match="did you mean 'return_mean'"):
        find("retrun_mean")


def test_schema_is_complete_and_writes_the_page():
    assert all(m.unit and m.source and m.meaning.endswith(".") for m in SCHEMA.values())
    assert len({m.meaning for m in SCHEMA.values()}) == len(SCHEMA)
    page = Path(__file__).parents[1] / "docs" / "metrics.md"
    assert page.read_text() == markdown()
    assert all(f"| `{name}` |" in markdown() for name in SCHEMA)


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def events(run: Path) -> list[Event]:
    found = []
    for path in sorted((run / "tensorboard").iterdir(), key=lambda p: p.name.split(".")[-2:]):
        data, at = path.read_bytes(), 0
        while at < len(data):  # length, its checksum, the record, its checksum
            size = int.from_bytes(data[at : at + 8], "little")
            found.append(Event.FromString(data[at + 12 : at + 12 + size]))
            at += 16 + size
    return found


def scalars(run: Path) -> list[tuple[int, str, float]]:
    return [(e.step, v.tag, v.simple_value) for e in events(run) for v in e.summary.value]


def test_lines_are_sorted_exact_and_at_once(tmp_path):
    before = set(threading.enumerate())
    with MetricsWriter(tmp_path) as writer:
        writer.write(10, {"updates": np.int64(3), "return_mean": 0.1 + 0.2, "loss/total": np.float32(0.1)})
        text = (tmp_path / "metrics.jsonl").read_text()
        assert text == (
            '{"loss/total": 0.10000000149011612, "return_mean": 0.30000000000000004, "steps": 10, '
            '"updates": 3}\n'
        )
        assert writer.offset() == len(text)
        writer.write(20, {"steps": 20, "kl": math.nan, "entropy": -math.inf, "grad_norm": np.array(2.5)})
        assert lines(tmp_path)[1] == {"steps": 20, "kl": None, "entropy": None, "grad_norm": 2.5}
        assert set(threading.enumerate()) == before
    assert (20, "grad_norm", 2.5) in scalars(tmp_path) and len(scalars(tmp_path)) == 4


def test_what_is_refused_leaves_no_trace(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for metrics, text in (
            ({"kl": 1.0, "bogus": 1.0}, "'bogus' is not in the schema"),
            ({"kl": "high"}, "'kl' is 'high' .str.; expected a number"),
            ({"kl": np.zeros(2)}, "'kl' is array"),
            ({"steps": 3}, "say steps=3"),
        ):
            with pytest.raises(ConfigError, match=text):
                writer.write(1, metrics)
        assert writer.offset() == 0 and not (tmp_path / "tensorboard").exists()
    writer.close()
    with pytest.raises(RunDirectoryError, match="closed"):
        writer.write(1, {})
    with pytest.raises(RunDirectoryError, match="closed"):
        writer.log("late")


def test_resuming_cuts_off_what_came_after(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(10, {"kl": 1.0})
        offset = writer.offset()
        writer.write(20, {"kl": 2.0})
    with pytest.raises(RunDirectoryError, match="has metrics already"):
        MetricsWriter(tmp_path)
    with MetricsWriter.resume(tmp_path, offset, 10) as writer:
        assert writer.offset() == offset
        writer.write(20, {"kl": 3.0})
    assert lines(tmp_path) == [{"kl": 1.0, "steps": 10}, {"kl": 3.0, "steps": 20}]
    assert scalars(tmp_path) == [(10, "kl", 1.0), (20, "kl", 2.0), (20, "kl", 3.0)]  # both files are there
    starts = [e.step for e in events(tmp_path) if e.session_log.status == SessionLog.START]
    assert starts == [11]  # a reader hides 20, and keeps 10
    assert (tmp_path / "log.txt").read_text() == ""


def test_resuming_a_file_that_is_too_short_keeps_whole_lines(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(10, {"kl": 1.0})
        whole = writer.offset()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kl": 2')
    with MetricsWriter.resume(tmp_path, whole + 100, 10, tensorboard=False) as writer:
        writer.write(20, {"kl": 2.0})
    assert lines(tmp_path) == [{"kl": 1.0, "steps": 10}, {"kl": 2.0, "steps": 20}]
    assert f"had {whole} bytes of whole lines, expected {whole + 100}" in (tmp_path / "log.txt").read_text()
    with MetricsWriter.resume(tmp_path, 0, 0, tensorboard=False):
        assert lines(tmp_path) == []


def test_log_lines_carry_the_time_and_are_kept_on_resume(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.log("one\ntwo\n")
    with MetricsWriter.resume(tmp_path, 0, 0, tensorboard=False) as writer:
        writer.log("three é")
    first, second, third = (tmp_path / "log.txt").read_text().splitlines()
    assert first[4] == "-" and first[19:] == " one" and second == "    two" and third[19:] == " three é"


def test_a_line_that_does_not_fit_is_taken_back(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"kl": 1.0})
        real = writer._metrics._file

        class HalfFull:
            fileno = real.fileno
            calls = 0

            def write(self, data):
                self.calls += 1
                if self.calls > 1:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real.write(data[:5])

        monkeypatch.setattr(writer._metrics, "_file", HalfFull())
        with pytest.raises(HeadraceError, match=r"No space left on device.*Make room") as error:
            writer.write(2, {"kl": 2.0})
        assert "\n" not in str(error.value)
        monkeypatch.undo()
        writer.write(3, {"kl": 3.0})
    assert [line["steps"] for line in lines(tmp_path)] == [1, 3]


def test_a_full_disk_leaves_whole_lines(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small file system here; the test above covers the error")
    try:
        writer, written = MetricsWriter(tmp_path), 0
        with pytest.raises(HeadraceError, match="No space left"):
            for written in range(10_000):
                writer.write(written, {"kl": 1.0})
        with contextlib.suppress(HeadraceError):  # events may be buffered still
            writer.close()
        writer.close()
        assert written > 10 and len(lines(tmp_path)) in (written, written + 1)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True, capture_output=True)


def snapshot(steps=50_000, **changes) -> Snapshot:
    rooms = {"envs": Rates(1200, 1201, 0.1, 0.75), "learner": Rates(900, 901, 0.02, 0.0)}
    values = {"return_mean": 123.456, "lag_mean": 1.5, "lag_max": 4, "restarts": 2, "rooms": rooms}
    return Snapshot(steps, 4 * steps, 1000.0, **(values | changes))


def test_plain_lines_every_few_seconds(monkeypatch):
    clock = Clock(monkeypatch, panel_module, "monotonic")
    out = io.StringIO()
    with Panel("cartpole [x]", 100_000, console=Console(file=out, width=40), interval_s=5.0) as panel:
        panel.update(snapshot())
        for _ in range(100):
            clock.now += 0.04
            assert not panel.due
            panel.update(snapshot(60_000))
        assert out.getvalue().count("\n") == 1
        clock.now += 2.0
        assert panel.due
        panel.update(snapshot(70_000))
        panel.update(snapshot(100_000))
    first, second, last = out.getvalue().splitlines()
    assert first == (
        "cartpole [x] | steps 50,000/100,000 (50%) | frames 200,000 | steps/s 1,000 | left 0:00:50 | "
        "return 123.5 | lag 1.5 (max 4) | restarts 2 | busiest learner"
    )
    assert "steps 70,000/" in second and "100,000/100,000 (100%)" in last and "left 0:00:00" in last


def test_figures_that_are_not_there_yet():
    out = io.StringIO()
    with Panel("x", 10, console=Console(file=out), interval_s=0.0) as panel:
        panel.update(Snapshot(0, 0, 0.0))
        panel.update(Snapshot(1, 1, 0.0, return_mean=math.nan))
    assert out.getvalue().count("left – | return – | lag – (max –) | restarts 0") == 2


def test_terminal_panel_shows_the_rooms_and_ends_its_thread():
    before = set(threading.enumerate())
    out = io.StringIO()
    with Panel("pong", 100_000, console=Console(file=out, force_terminal=True, width=100)) as panel:
        panel.print("a line above")
        panel.update(snapshot())
        panel.update(snapshot(60_000))
    text = out.getvalue()
    assert "\x1b[" in text and "a line above" in text
    for word in (
        "pong",
        "50,000/100,000",
        "60,000/100,000",
        "0:00:50",
        "123.5",
        "wait in",
        "envs",
        "1,201",
        "75%",
    ):
        assert word in text, word
    assert set(threading.enumerate()) == before


def test_the_panel_writes_to_stderr(capsys):
    with Panel("x", 10) as panel:
        panel.update(Snapshot(5, 5, 1.0))
    captured = capsys.readouterr()
    assert captured.out == "" and "steps 5/10" in captured.err


def test_events_have_a_file_each(tmp_path):
    writers = [sinks._events(tmp_path / "tensorboard", None) for _ in range(3)]
    for writer in writers:
        writer.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3
