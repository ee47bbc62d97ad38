"""The check of single Gymnasium environments, stage by stage."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from headrace.envs.check import rules, seeding
from headrace.envs.check.calls import Calls, Stop, made
from headrace.envs.check.player import Actions, Player, Row, time_limit
from headrace.envs.check.report import Finding, breach
from headrace.envs.check.text import spec_text
from headrace.spaces import Spec, from_gymnasium

STEPS = 2000
FEW = 200
BUDGET_S = 30.0
WATCHED_ROWS = 100
"""Rows in which observations and actions are compared with copies of them."""
LIMIT_LIKE = 20
"""Episodes that all end at one step may be a time limit from this length on; shorter ones are small games."""


class Found:
    """The findings so far, each told at once, so that none is lost with the process.

    A rule is reported once for each thing it is broken by (the first word of ``got``, such as a leaf's path).
    """

    def __init__(self, tell: Callable[[Finding], None]) -> None:
        self._tell, self._seen = tell, set[tuple[str, str]]()
        self.rules, self.errors = set[str](), 0

    def add(self, findings: Iterable[Finding]) -> None:
        """Keep and tell those that are new."""
        for finding in findings:
            key = (finding.rule, finding.got.partition(" ")[0])
            if key not in self._seen:
                self._seen.add(key)
                self.rules.add(finding.rule)
                self.errors += finding.severity == "error"
                self._tell(finding)


class Episode(NamedTuple):
    """How an episode of the first run ended."""

    length: int
    terminated: bool
    truncated: bool


@dataclass
class Check:
    """One check of single environments.

    Attributes:
        make: makes an environment.
        calls: makes the calls into it.
        found: takes the findings.
        seed: of the check's own seeds and actions.
        steps: of the first run; None: ``STEPS``, or from ``FEW`` on as many as take ``BUDGET_S``.
    """

    make: Callable[[], gym.Env]
    calls: Calls
    found: Found
    seed: int = 0
    steps: int | None = None
    envs: list[gym.Env] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    reset_s: list[float] = field(default_factory=list)
    _spaces: list[Spec] = field(default_factory=list)

    def run(self) -> None:
        """Every stage, in an order in which a fault is met by the rule that names it.

        Raises:
            Stop: the check cannot go on; its finding was not told yet.
        """
        player = self.player("")
        limit = time_limit(player.env)
        self._first_run(player)
        self.found.add(_endings(self.episodes, len(self.step_s), limit))
        self._resets(player)
        seeding.check(self)
        self._close()

    def player(self, label: str) -> Player:
        """Another environment, of the same spaces as the ones before."""
        env = made(lambda: self.calls(f"making the environment{label}", self.make))
        self.envs.append(env)
        spaces = [self._space(env, part) for part in ("observation_space", "action_space")]
        if self._spaces and spaces != self._spaces:
            raise Stop(breach("spaces", f"the spaces{label} differ from the first's"))
        self._spaces = spaces
        return Player(env, self.calls, label)

    def _space(self, env: gym.Env, part: str) -> Spec:
        space, name = self.calls(f"reading {part}", getattr, env, part, None), part.replace("_", " ")
        if not isinstance(space, gym.Space):
            raise Stop(breach("spaces", f"the {name} is a {type(space).__name__}", "one of gymnasium.spaces"))
        return made(lambda: self.calls(f"reading {part}", from_gymnasium, space, name))

    @property
    def observation_spec(self) -> Spec:
        """Spec of one observation."""
        return self._spaces[0]

    @property
    def action_spec(self) -> Spec:
        """Spec of one action."""
        return self._spaces[1]

    def checked(self, row: Row, player: Player) -> Row:
        """``row`` with its breaches told."""
        self.found.add(rules.row(self.observation_spec, row, player.when))
        return row

    def _first_run(self, player: Player) -> None:
        actions, start = Actions(self.action_spec, self.seed), time.monotonic()
        row = self._timed(player, lambda: player.reset(self.seed))
        most = STEPS if self.steps is None else self.steps
        while len(self.step_s) < most:
            enough = self.steps is None and len(self.step_s) >= FEW
            if enough and time.monotonic() - start > BUDGET_S:
                break
            row = self._watched_step(player, actions, row)
            if player.ended:
                ends = bool(row.terminated), bool(row.truncated)
                self.episodes.append(Episode(player.step, *ends))

    def _watched_step(self, player: Player, actions: Actions, before: Row) -> Row:
        """One step or reset; that it leaves the last observation and its action alone is looked at for a while."""
        action = actions()
        given, kept = actions.given(action), actions.given(action)
        watched = len(self.step_s) < WATCHED_ROWS
        was = rules.copied(before).observation if watched else None
        row = self._timed(player, lambda: player.advance(given))
        if watched and (changed := rules.difference(was, before.observation)):
            got = f"{changed}, before and after {player.when}"
            self.found.add([breach("observation-reused", got)])
        if watched and (changed := rules.difference(kept, given, "action")):
            self.found.add([breach("action-written", f"{changed}, before and after {player.when}")])
        return row

    def _timed(self, player: Player, call: Callable[[], Row]) -> Row:
        row = call()
        (self.reset_s if row.first else self.step_s).append(self.calls.last_s)
        return self.checked(row, player)

    def _resets(self, player: Player) -> None:
        """Reset twice in a row and in the middle of an episode."""
        actions = Actions(self.action_spec, self.seed + 1)
        for _ in range(2):
            self.checked(player.reset(), player)
            self.checked(player.reset(), player)
            self.checked(player.advance(actions.given(actions())), player)

    def _close(self) -> None:
        """Close all, the first one twice."""
        closed = [self.envs[0], *self.envs]
        for i, env in enumerate(closed):
            what = f"close(){' a second time' if i == 1 else ''}"
            try:
                self.calls(what, env.close)
            except Stop as stop:
                self.found.add([breach("close", stop.finding.got)])

    def facts(self) -> dict[str, Any]:
        """What was measured: ``step_s``, ``reset_s`` …; what was not come to is absent."""
        facts: dict[str, Any] = {"steps": len(self.step_s), "episodes": len(self.episodes)}
        for name, seconds in (("step_s", self.step_s), ("reset_s", self.reset_s)):
            if seconds:
                facts[name] = float(np.mean(seconds))
        if self.envs:
            facts["time_limit"] = time_limit(self.envs[0])
        if len(self._spaces) == 2:
            facts |= {"observation_space": spec_text(self.observation_spec)}
            facts |= {"action_space": spec_text(self.action_spec)}
        return facts


def _endings(episodes: list[Episode], steps: int, limit: int | None) -> list[Finding]:
    """Whether episodes end, and whether they end as a time limit would have it."""
    if not episodes:
        return [] if limit else [breach("episode-ends", f"no episode ended within {steps} steps")]
    lengths = {episode.length for episode in episodes}
    alike = len(lengths) == 1 and min(lengths) >= LIMIT_LIKE and len(episodes) >= 5
    if alike and all(e.terminated and not e.truncated for e in episodes):
        got = f"all {len(episodes)} episodes ended terminated at step {min(lengths)}, whatever the actions"
        return [breach("limit-terminates", got)]
    return []
