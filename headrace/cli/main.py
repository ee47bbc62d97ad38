"""The command line: ``headrace train | eval | play | envs | list | bench``."""

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import ConfigError, EnvironmentFailure, HeadraceError

USAGE = """usage: headrace COMMAND …

  train PRESET|AGENT   train an agent, or continue a run
  eval RUN             greedy episodes of a run's policy
  play RUN             episodes of a run's policy as videos, or as they happen
  envs check ID        is an environment of your own fit to be trained on?
  list                 agents, presets and environment prefixes
  bench path | envs    how near the path comes to its rooms alone; environments in worker processes

`headrace COMMAND --help` tells more.
"""


def main(words: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 an error (one line on standard error), 2 wrong settings, 128+n on signal n."""
    try:
        status = run(list(sys.argv[1:] if words is None else words))
        sys.stdout.flush()
    except BrokenPipeError:  # who read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + 13
    raise SystemExit(status)


def run(words: list[str]) -> int:
    """Run a command; returns the exit status."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "eval": _eval,
        "play": _play,
        "envs": _envs,
        "list": _list,
        "bench": _bench,
    }
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    if words[0] == "--version":
        from headrace import __version__

        print(__version__)
        return 0
    logging.getLogger("absl").setLevel(logging.ERROR)  # libraries' remarks are not the user's
    try:
        if words[0] not in commands:
            from headrace.settings.fields import nearest

            raise ConfigError(
                f"unknown command {words[0]!r}{nearest(words[0], commands) or '.'} Known: {', '.join(commands)}"
            )
        return commands[words[0]](words[1:])
    except HeadraceError as error:
        print(f"headrace: error: {_one_line(error)}", file=sys.stderr)
        if isinstance(error, EnvironmentFailure):
            _tell_where(error.__cause__)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        # A run under way takes the first for a wish to leave; this is a second one, or no run is under way.
        print("headrace: interrupted", file=sys.stderr)
        return 128 + 2


def _tell_where(error: BaseException | None) -> None:
    """Print where an environment raised or hung, where that is in the user's own code."""
    from headrace.envs.failures import WorkerTraceback, raised_by_user

    if isinstance(error, WorkerTraceback):
        print(str(error).rstrip(), file=sys.stderr)
    elif raised_by_user(error):
        traceback.print_exception(error, file=sys.stderr)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _emit(result: Any, as_json: bool, text: str) -> None:
    print(json.dumps(result) if as_json else text, flush=True)


def _table(figures: dict[str, Any]) -> str:
    width = max(map(len, figures))
    return "\n".join(f"{name:<{width}}  {_number(value)}" for name, value in figures.items())


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _train(words: list[str]) -> int:
    from headrace.cli.arguments import parse_train

    arguments = parse_train(words)
    from headrace.runtime.run import Stopped, train

    try:
        summary = train(arguments.config)
    except Stopped as stopped:
        print(f"headrace: {stopped}", file=sys.stderr)
        _emit(stopped.summary, arguments.json, _table(stopped.summary))
        return 128 + (stopped.signal_number or 0)
    _emit(summary, arguments.json, _table(summary))
    return 0


def _eval(words: list[str]) -> int:
    from headrace.cli.commands import Eval, parse
    from headrace.runtime.policy import evaluate

    arguments = parse(Eval, "headrace eval", words)
    summary = evaluate(
        arguments.run, arguments.episodes, arguments.seed, arguments.id, arguments.kwargs or None
    )
    _emit(summary, arguments.json, _table(summary))
    return 0


def _play(words: list[str]) -> int:
    from headrace.cli.commands import Play, parse

    arguments = parse(
        Play, "headrace play", ["--no-explore" if word == "--greedy" else word for word in words]
    )
    from headrace.runtime.play import play

    options = {name: value for name, value in vars(arguments).items() if name not in ("run", "json")}
    summary = play(arguments.run, **options)
    signal_number = summary.pop("signal", 0)
    _emit(summary, arguments.json, _table(summary))
    return 128 + signal_number if signal_number else 0


def _envs(words: list[str]) -> int:
    from headrace.cli.commands import CheckEnv, parse

    if not words or words[0] in ("-h", "--help"):
        print("usage: headrace envs check ID [options]\n\n`headrace envs check --help` lists them.")
        return 0 if words else 2
    if words[0] != "check":
        raise ConfigError(f"got envs {words[0]}, expected: headrace envs check ID")
    arguments = parse(CheckEnv, "headrace envs check", words[1:])
    from headrace.envs.check import check
    from headrace.envs.check.text import report_text

    report = check(
        arguments.id,
        kwargs=arguments.kwargs,
        steps=arguments.steps,
        seed=arguments.seed,
        timeout_s=arguments.timeout_s,
        max_episode_steps=arguments.max_episode_steps,
    )
    _emit(report.as_json(), arguments.json, report_text(report))
    return 0 if report.ok else 1


def _list(words: list[str]) -> int:
    from headrace.cli.commands import List, catalogue, parse

    arguments = parse(List, "headrace list", words)
    entries = catalogue()
    text = "\n\n".join(
        f"{kind}\n" + "\n".join(f"  {name:<18}{about}" for name, about in those.items())
        for kind, those in entries.items()
    )
    _emit(entries, arguments.json, text)
    return 0


def _bench(words: list[str]) -> int:
    known: dict[str, Callable[[list[str]], int]] = {"path": _bench_path, "envs": _bench_envs}
    if words and words[0] in ("-h", "--help"):
        print(f"usage: headrace bench {'|'.join(known)} [options] [--json]")
        return 0
    if not words or words[0] not in known:
        got = " ".join(words[:1]) or "(nothing)"
        raise ConfigError(f"got bench {got}, expected headrace bench {' or '.join(known)}")
    return known[words[0]](words[1:])


def _bench_path(words: list[str]) -> int:
    from headrace.cli.commands import BenchPath, parse

    arguments = parse(BenchPath, "headrace bench path", words)
    from headrace.bench.path import bench_path, table

    result = bench_path(arguments.preset, arguments.seconds)
    _emit(result, arguments.json, table(result))
    return 0


def _bench_envs(words: list[str]) -> int:
    from headrace.cli.commands import BenchEnvs, parse

    arguments = parse(BenchEnvs, "headrace bench envs", words)
    from headrace.bench.envs import bench_envs, table

    result = bench_envs(arguments.seconds, arguments.workers)
    _emit(result, arguments.json, table(result))
    return 0


if __name__ == "__main__":
    main()
