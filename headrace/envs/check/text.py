"""What a check tells, as text."""

import numpy as np

from headrace.envs.check.report import Finding, Report
from headrace.spaces import BoxSpec, DiscreteSpec, MultiDiscreteSpec, Spec

MANY = 8


def report_text(report: Report) -> str:
    """Each finding, the notes, and a line that sums up."""
    found = [finding_text(finding) for finding in report.findings]
    return "\n\n".join([*found, *(f"note     {note}" for note in report.notes), summary(report)])


def finding_text(finding: Finding) -> str:
    """A finding in four lines."""
    return (
        f"{finding.severity:<8} {finding.rule}\n  got       {finding.got}\n"
        f"  expected  {finding.expected}\n  to do     {finding.todo}"
    )


def summary(report: Report) -> str:
    """One line: findings, spaces, speed, where it is stepped."""
    facts = report.facts
    kinds = [finding.severity for finding in report.findings]
    counts = [f"{kinds.count(kind)} {kind}{'s' * (kinds.count(kind) != 1)}" for kind in ("error", "warning")]
    parts = [f"{report.id}: {', '.join(counts) if kinds else 'no findings'}"]
    if "observation_space" in facts:
        parts.append(f"observation {facts['observation_space']}, action {facts['action_space']}")
    if facts.get("step_s"):
        reset = f", a reset {duration(facts['reset_s'])}" if facts.get("reset_s") else ""
        speed = f"{1 / facts['step_s']:,.0f} steps/s, a step {duration(facts['step_s'])}{reset}"
        parts.append(f"{speed} (over {facts['steps']} steps)")
    if facts.get("time_limit"):
        parts.append(f"time limit {facts['time_limit']} steps")
    if "stepped_in" in facts:
        place = {"thread": "the actor's thread", "worker": "a worker process"}[facts["stepped_in"]]
        parts.append(f"stepped in {place}")
    return "; ".join(parts)


def duration(seconds: float) -> str:
    """Seconds in a fitting unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def spec_text(spec: Spec) -> str:
    """A spec in Gymnasium's words."""
    if isinstance(spec, dict):
        return f"Dict({', '.join(f'{key}: {spec_text(part)}' for key, part in spec.items())})"
    if isinstance(spec, tuple):
        return f"Tuple({', '.join(map(spec_text, spec))})"
    if isinstance(spec, DiscreteSpec):
        return f"Discrete({spec.n}{f', start={spec.start}' if spec.start else ''})"
    if isinstance(spec, MultiDiscreteSpec):
        start = f", start={_numbers(spec.start)}" if any(spec.start) else ""
        return f"MultiDiscrete({_numbers(spec.nvec)}{start})"
    if isinstance(spec, BoxSpec):
        return f"Box({_bound(spec.low)} … {_bound(spec.high)}, {spec.shape}, {spec.env_dtype})"
    return f"MultiBinary({spec.shape})"


def _numbers(values: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, values[:MANY]))
    return f"[{shown}{', …' if len(values) > MANY else ''}]"


def _bound(values: np.ndarray) -> str:
    ends = (values.min(), values.max()) if values.size else (0, 0)
    low, high = (f"{end:.6g}" if values.dtype.kind == "f" else str(int(end)) for end in ends)
    return low if low == high else f"[{low} to {high}]"
