"""The rules of ``headrace envs check``, and what a check tells."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

Severity: TypeAlias = Literal["error", "warning"]


class Rule(NamedTuple):
    """One rule.

    Attributes:
        severity: an error makes training wrong or impossible; a warning may be meant.
        expected: what the rule asks.
        todo: what to do about a breach.
    """

    severity: Severity
    expected: str
    todo: str


RULES: dict[str, Rule] = {
    "made": Rule(
        "error",
        "the id alone makes the environment, in a process of its own and several times in it",
        "Check id and arguments. A module must be importable from the working directory; a Gymnasium id that "
        "a module registers is written module:Env-v0.",
    ),
    "spaces": Rule(
        "error",
        "Dict and Tuple over Box, Discrete, MultiDiscrete and MultiBinary, the same each time it is made",
        "Convert other spaces in a wrapper (gymnasium.ObservationWrapper or ActionWrapper).",
    ),
    "alive": Rule(
        "error",
        "no call ends the process",
        "Look for os._exit, a crash in native code, or too little memory; it was doing what is named here.",
    ),
    "returns": Rule(
        "error",
        "each call returns within the time limit",
        "Give its waits a timeout. If it is merely slow, raise --timeout-s here and env.step_timeout_s in training.",
    ),
    "raises": Rule("error", "no call raises", "Mend it at the line named here."),
    "reset-result": Rule(
        "error",
        "reset(seed=…) returns (observation, info), info a dict",
        "Return both, as Gymnasium does.",
    ),
    "step-result": Rule(
        "error",
        "step returns (observation, reward, terminated, truncated, info), info a dict",
        "Return all five, as Gymnasium does; `done` of old environments is terminated or truncated.",
    ),
    "observation-form": Rule(
        "error", "the nesting and shapes of its space", "Mend the observation or the space."
    ),
    "observation-extra": Rule(
        "warning", "no parts that its space does not have", "Add the part to the space; as it is, headrace drops it."
    ),
    "observation-kind": Rule(
        "error",
        "numbers of the kind its space says; integers where it says integers",
        "Mend the observation's dtype or the space's.",
    ),
    "observation-precision": Rule(
        "warning",
        "arrays of the dtype its space says",
        "Convert it in the environment; headrace casts it on every step.",
    ),
    "observation-range": Rule(
        "error",
        "categories and bits within their space, integers within their dtype",
        "Mend the observation or the space.",
    ),
    "observation-bounds": Rule(
        "warning",
        "numbers within the bounds of their Box",
        "Mend the bounds, which may be infinite, or clip the observation.",
    ),
    "observation-finite": Rule(
        "error",
        "finite numbers of float32's range",
        "Mend it in the environment or replace it in a wrapper; a run stops at it.",
    ),
    "reward": Rule(
        "error",
        "one finite real number of float32's range",
        "Mend it in the environment or replace it in a wrapper; a run stops at it.",
    ),
    "end-flags": Rule(
        "error", "terminated and truncated are bools", "Convert them with bool(); None and arrays are neither."
    ),
    "same-seed": Rule(
        "error",
        "two environments reset with the same seed and given the same actions say the same",
        "Draw all randomness from self.np_random after super().reset(seed=seed), not from random or np.random; "
        "keep no state in globals.",
    ),
    "seed-zero": Rule(
        "error", "0 is a seed like any other", "Write `if seed is not None`, not `if seed`."
    ),
    "reset-reseeds": Rule(
        "error",
        "reset() without a seed goes on with its stream, so that episodes differ",
        "Seed only when reset is given a seed; self.np_random after super().reset(seed=seed) does that.",
    ),
    "seed-ignored": Rule(
        "warning",
        "another seed gives other episodes, where episodes differ at all",
        "Draw from self.np_random after super().reset(seed=seed); else all environments play the same episodes.",
    ),
    "observation-reused": Rule(
        "warning",
        "an observation that was returned is not written again",
        "Return a copy; headrace copies at once, wrappers that keep observations do not.",
    ),
    "action-written": Rule(
        "warning",
        "step leaves its action as it is",
        "Copy the action before changing it; headrace hands out copies, other callers may not.",
    ),
    "episode-ends": Rule(
        "warning",
        "an episode ends, or a time limit is set",
        "Set env.max_episode_steps; if episodes are longer than that, check with more --steps.",
    ),
    "limit-terminates": Rule(
        "warning",
        "a time limit says truncated, not terminated",
        "Say truncated where a limit cut the episode; if the task itself is over after so many steps, leave it.",
    ),
    "close": Rule("warning", "close() raises nothing, called once or twice", "Let close() do nothing the second time."),
    "resume": Rule(
        "warning",
        "an episode that is played again goes on exactly, so that a resumed run does",
        "Draw all randomness from self.np_random after super().reset(seed=seed), not from a generator of its own.",
    ),
    "group": Rule(
        "error",
        "groups of it keep the contract of headrace.envs.contract",
        "See docs/environments.md.",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A breach of a rule.

    Attributes:
        severity: ``error`` or ``warning``.
        rule: a key of ``RULES``.
        got: what the environment did, and when.
        expected: what the rule asks.
        todo: what to do about it.
    """

    severity: Severity
    rule: str
    got: str
    expected: str
    todo: str


def breach(rule: str, got: str, expected: str | None = None, todo: str | None = None) -> Finding:
    """A finding in the rule's words, or in more exact ones."""
    severity, asks, help_ = RULES[rule]
    return Finding(severity, rule, got, expected or asks, todo or help_)


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        id: the environment's id.
        findings: errors first.
        facts: what was measured: ``observation_space`` and ``action_space`` as text, ``step_s`` and
            ``reset_s`` (mean seconds of a call), ``steps``, ``episodes``, ``stepped_in`` …; what the check did
            not come to is absent, null in JSON.
        notes: remarks that are no findings, such as slow steps.
    """

    id: str
    findings: tuple[Finding, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings are allowed."""
        return all(finding.severity != "error" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """As one JSON object."""
        found = [asdict(finding) for finding in self.findings]
        measured = {**dict.fromkeys(("observation_space", "action_space", "step_s", "reset_s")), **self.facts}
        return {"id": self.id, "ok": self.ok, "findings": found, **measured, "notes": list(self.notes)}


def markdown() -> str:
    """The rules as the table of docs/environments.md."""
    rows = [f"| `{name}` | {r.severity} | {r.expected} | {r.todo} |" for name, r in RULES.items()]
    return "\n".join(["| rule | severity | expected | what to do |", "|---|---|---|---|", *rows])
