"""The process in which a user's environment is checked. It never imports JAX itself."""

import ctypes
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeAlias

from headrace.envs import registry
from headrace.envs.check import group, single
from headrace.envs.check.calls import Beat, Calls, Stop, made
from headrace.envs.check.report import Finding, breach
from headrace.envs.check.text import spec_text
from headrace.envs.contract import EnvSpec
from headrace.seeds import Role, stream_seed

Tell: TypeAlias = Callable[[dict[str, Any]], None]

SLOW_STEP_S = 0.05
SLOW_RESET_STEPS, SLOW_RESET_S = 10, 0.01
GROUP_BUDGET_S = 10.0
_RESUME = "set_state continues exactly"
_SEEDING = ("slots differ", "a reset does not re-seed", "equal seeds, equal rows")


def main(request: dict[str, Any]) -> None:
    """Check, write JSON lines to the file descriptor ``request["results"]``, and leave whatever still runs."""
    _die_with(request["parent"])
    faulthandler.enable(request["trace"])
    faulthandler.register(signal.SIGUSR1, request["trace"])

    def tell(line: dict[str, Any]) -> None:
        os.write(request["results"], json.dumps(line).encode() + b"\n")

    try:
        run(request, Beat(request["beat"]), tell)
        tell({"done": True})
    except BaseException:  # a fault of the check, not of what is checked
        tell({"crash": traceback.format_exc()})
    sys.stdout.flush()
    os._exit(0)  # threads that the environment left behind would keep the interpreter


def run(request: dict[str, Any], beat: Beat, tell: Tell) -> None:
    """Check one id; tells ``{"finding": …}``, ``{"facts": …}`` and ``{"note": …}`` as they are known."""
    found = single.Found(lambda finding: tell({"finding": asdict(finding)}))
    calls = Calls(beat)
    try:
        make = made(lambda: calls("finding the environment", _single_maker, request))
        tell({"facts": {"stepped_in": "thread" if registry.steps_in_thread(request["id"]) else "worker"}})
        if make is None:
            findings, facts = _check_group(request, calls, tell, request["steps"] or group.MESSAGES)
            found.add(findings)
            tell({"facts": facts})
        else:
            # Seed 0 has a rule of its own, whose breach would hide behind others.
            seed = request["seed"] + 1
            _check_single(request, single.Check(make, calls, found, seed, request["steps"]), tell)
    except Stop as stop:
        found.add([stop.finding])


def _single_maker(request: dict[str, Any]) -> Any:
    return registry.single_of(request["id"], request["kwargs"], request["max_episode_steps"])


def _check_single(request: dict[str, Any], check: single.Check, tell: Tell) -> None:
    try:
        check.run()
    finally:
        facts = check.facts()
        tell({"facts": facts})
    for note in _notes(facts.get("step_s", 0.0), facts.get("reset_s", 0.0)):
        tell({"note": note})
    if not check.found.errors:
        messages = int(GROUP_BUDGET_S / (8 * group.SLOTS * max(facts["step_s"], 1e-6)))
        messages = min(max(messages, 30), group.MESSAGES, facts["steps"])
        findings, _ = _check_group(request, check.calls, tell, messages)
        check.found.add(_in_plainer_words(findings, "seed-ignored" in check.found.rules))


def _in_plainer_words(findings: list[Finding], seed_ignored: bool) -> list[Finding]:
    """What a suite on groups finds of single environments that were in order one by one.

    They are alike, and do not go on as they were, where their seeds were ignored, which was found already.
    """
    if seed_ignored:
        findings = [f for f in findings if not f.got.startswith((*_SEEDING, _RESUME))]
    return [breach("resume", f.got) if f.got.startswith(_RESUME) else f for f in findings]


def _check_group(
    request: dict[str, Any], calls: Calls, tell: Tell, messages: int
) -> tuple[list[Finding], dict[str, Any]]:
    def make() -> Any:
        return registry.make_group(
            request["id"],
            group.SLOTS,
            lambda slot, life: stream_seed(request["seed"], Role.TRAIN_ENV, slot, life),
            kwargs=request["kwargs"],
            max_episode_steps=request["max_episode_steps"],
            bounds="ignore",  # a rule of the single environments, which says more
        )

    def spec(spec: EnvSpec) -> None:
        texts = {"observation_space": spec_text(spec.observation), "action_space": spec_text(spec.action)}
        tell({"facts": texts})

    return group.check(make, calls, messages, request["seed"], spec)


def _notes(step_s: float, reset_s: float) -> list[str]:
    notes = []
    if step_s > SLOW_STEP_S:
        notes.append(f"a step takes {step_s * 1e3:.0f} ms; many environments at once hide that, one does not")
    if reset_s > SLOW_RESET_S and reset_s > SLOW_RESET_STEPS * step_s > 0:
        notes.append(f"a reset takes as long as {reset_s / step_s:.0f} steps ({reset_s * 1e3:.0f} ms)")
    return notes


def _die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, where it can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
