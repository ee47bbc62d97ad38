"""Every metric there is: its name, unit, meaning and source. The sink refuses what is not here.

A name may hold placeholders: ``<room>`` is one of the four rooms, ``<reason>`` why a range was dropped,
``<name>`` any word of lower-case letters, digits and underscores, ``<id>`` an environment's id or an evaluation's name,
``<info>`` a number in the info of an episode's last step. Everything under ``time/`` depends on wall
time; in a ``sync`` run everything else is reproducible.
"""

import difflib
import functools
import re
from dataclasses import dataclass

from headrace.envs.failures import REASONS
from headrace.errors import ConfigError
from headrace.metrics.meter import ROOMS

DROP_REASONS = ("queue_full", "lag", "life_cut")
_PLACEHOLDERS = {
    "<room>": "|".join(ROOMS),
    "<reason>": "|".join(DROP_REASONS),
    "<failure>": "|".join(REASONS),
    "<name>": "[a-z0-9_]+",
    "<id>": r"[^\s,<>]+",
    "<info>": r"[A-Za-z0-9_.\-/]+",
}


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    name: str
    unit: str
    meaning: str
    source: str


_TABLE = (
    Metric("steps", "steps", "Agent steps: rows that are not `first`, of training slots.", "envs"),
    Metric("frames", "frames", "Steps times action repeat.", "envs"),
    Metric("learned_steps", "steps", "Steps the learner has trained on.", "learner"),
    Metric("updates", "updates", "Updates of the params.", "learner"),
    Metric("episodes", "episodes", "Training episodes that ended by themselves or by a limit.", "envs"),
    Metric("return_mean", "reward", "Mean raw return of the last 100 episodes.", "envs"),
    Metric("return_min", "reward", "Lowest raw return of the last 100 episodes.", "envs"),
    Metric("return_max", "reward", "Highest raw return of the last 100 episodes.", "envs"),
    Metric(
        "return_train_mean",
        "reward",
        "Mean return of the last 100 episodes as the learner sees rewards.",
        "envs",
    ),
    Metric("length_mean", "steps", "Mean length of the last 100 episodes.", "envs"),
    Metric(
        "episode/<info>",
        "1",
        "Mean, over those of the last 100 episodes that gave it, of a number in the info of the last step.",
        "envs",
    ),
    Metric("env/<id>/episodes", "episodes", "Training episodes of one of several ids that ended.", "envs"),
    Metric("env/<id>/steps", "steps", "Agent steps of one of several ids.", "envs"),
    Metric("env/<id>/return_mean", "reward", "Mean raw return of the last 100 episodes of one id.", "envs"),
    Metric("env/<id>/return_min", "reward", "Lowest raw return of the last 100 episodes of one id.", "envs"),
    Metric("env/<id>/return_max", "reward", "Highest raw return of the last 100 episodes of one id.", "envs"),
    Metric("env/<id>/length_mean", "steps", "Mean length of the last 100 episodes of one id.", "envs"),
    Metric("env/<id>/episode/<info>", "1", "As `episode/<info>`, of the episodes of one id.", "envs"),
    Metric(
        "restarts",
        "lives",
        "Environments that began a new life without an end of the episode before.",
        "envs",
    ),
    Metric(
        "failures/<failure>",
        "failures",
        "Times an environment raised, gave a bad value (the row was left out), or its process hung or died.",
        "envs",
    ),
    Metric("lag_mean", "updates", "Mean lag of the batches since the last report.", "learner"),
    Metric("lag_max", "updates", "Largest lag of a batch since the last report.", "learner"),
    Metric(
        "dropped_ranges/<reason>",
        "ranges",
        "Ranges dropped so far because the queue was full, they were too stale, or their life was cut.",
        "experience",
    ),
    Metric(
        "inference/batches",
        "batches",
        "Batches of central inference since the last report; the figures below are over them.",
        "inference",
    ),
    Metric("inference/rows_mean", "rows", "Mean number of slots answered by a batch.", "inference"),
    Metric("inference/rows_max", "rows", "Slots answered by the largest batch.", "inference"),
    Metric(
        "inference/padding", "1", "Share of the computed rows that only fill a bucket, 0 to 1.", "inference"
    ),
    Metric(
        "inference/by_minimum",
        "batches",
        "Batches that went out because inference.min_batch slots waited.",
        "inference",
    ),
    Metric("inference/by_maximum", "batches", "Batches of inference.max_batch slots.", "inference"),
    Metric(
        "inference/by_deadline",
        "batches",
        "Batches that went out because a request had waited inference.deadline_ms (in a sync run: an answer was needed).",
        "inference",
    ),
    Metric(
        "inference/compilations",
        "programs",
        "Programs that central inference has compiled so far; all of them before the first step.",
        "inference",
    ),
    Metric(
        "skipped_updates", "updates", "Updates skipped because a loss or gradient was not finite.", "learner"
    ),
    Metric("loss/total", "1", "The loss that is minimised, a mean over valid rows.", "learner"),
    Metric("loss/policy", "1", "The policy's part of the loss.", "learner"),
    Metric("loss/value", "1", "The value's part of the loss.", "learner"),
    Metric("loss/<name>", "1", "Another part of the loss, named by the agent.", "learner"),
    Metric("entropy", "nats", "Mean entropy of the policy.", "learner"),
    Metric("entropy_cost", "1", "Weight of the entropy in the loss.", "learner"),
    Metric("kl", "nats", "Mean KL divergence from the behaviour policy to the learner's.", "learner"),
    Metric("grad_norm", "1", "Global norm of the gradient before clipping.", "learner"),
    Metric("learning_rate", "1", "Step size of the optimiser.", "learner"),
    Metric("rho_clipped", "1", "Mean of min(1, π/μ), learner's policy over behaviour policy.", "learner"),
    Metric("value_mean", "reward", "Mean predicted value.", "learner"),
    Metric("agent/<name>", "1", "A figure of one agent alone; see its page.", "learner"),
    Metric(
        "eval/return_mean",
        "reward",
        "Mean raw return of the evaluation episodes, greedy, on all ids that are trained on.",
        "envs",
    ),
    Metric("eval/return_std", "reward", "Standard deviation of those returns.", "envs"),
    Metric("eval/return_min", "reward", "Lowest of those returns.", "envs"),
    Metric("eval/return_max", "reward", "Highest of those returns.", "envs"),
    Metric("eval/length_mean", "steps", "Mean length of the evaluation episodes.", "envs"),
    Metric("eval/episodes", "episodes", "How many evaluation episodes these figures are over.", "envs"),
    Metric(
        "eval/episode/<info>",
        "1",
        "Mean over the evaluation episodes that gave it, as `episode/<info>`.",
        "envs",
    ),
    *(
        Metric(f"eval/<id>/{figure}", unit, f"As `eval/{figure}`, of one id or evaluation.", "envs")
        for figure, unit in {
            "return_mean": "reward",
            "return_std": "reward",
            "return_min": "reward",
            "return_max": "reward",
            "length_mean": "steps",
            "episodes": "episodes",
            "episode/<info>": "1",
        }.items()
    ),
    Metric("time/wall_s", "s", "Wall time since this process started the run or resumed it.", "runtime"),
    Metric("time/steps_per_s", "steps/s", "Agent steps per second since the last report.", "runtime"),
    Metric("time/updates_per_s", "updates/s", "Updates per second since the last report.", "runtime"),
    Metric(
        "time/<room>/rate_in", "rows/s", "Rows the room took in per second since the last report.", "<room>"
    ),
    Metric(
        "time/<room>/rate_out", "rows/s", "Rows the room gave out per second since the last report.", "<room>"
    ),
    Metric("time/<room>/wait_in", "1", "Share of wall time the room waited for input, 0 to 1.", "<room>"),
    Metric("time/<room>/wait_out", "1", "Share of wall time the room waited to hand on, 0 to 1.", "<room>"),
    Metric(
        "time/inference/request_wait_ms_mean",
        "ms",
        "Mean wait of a request in central inference, from being asked to being sent to the device.",
        "inference",
    ),
    Metric("time/inference/request_wait_ms_max", "ms", "Longest of those waits.", "inference"),
    Metric("time/eval_s", "s", "Time the last evaluation took.", "runtime"),
)

SCHEMA: dict[str, Metric] = {metric.name: metric for metric in _TABLE}


def _pattern(name: str) -> str:
    pattern = re.escape(name)
    for placeholder, values in _PLACEHOLDERS.items():
        pattern = pattern.replace(placeholder, f"(?:{values})")
    return pattern


_PATTERNS = tuple((re.compile(_pattern(m.name)), m) for m in _TABLE if "<" in m.name)


@functools.lru_cache(maxsize=4096)
def find(name: str) -> Metric:
    """The row a metric's name belongs to; an exact name goes before a pattern.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name in SCHEMA and "<" not in name:
        return SCHEMA[name]
    for pattern, metric in _PATTERNS:
        if pattern.fullmatch(name):
            return metric
    near = difflib.get_close_matches(name, SCHEMA, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(
        f"metric {name!r} is not in the schema{hint} An agent's own figures go under 'loss/<name>' or "
        "'agent/<name>'; others are declared in headrace/metrics/schema.py."
    )


def markdown() -> str:
    """The page docs/metrics.md."""
    rows = [f"| `{m.name}` | {m.unit} | {m.meaning} | {m.source} |" for m in _TABLE]
    return "\n".join(
        [
            "# Metrics",
            "",
            "Written by `headrace.metrics.schema.markdown()`; change the table there.",
            "",
            "Each line of `metrics.jsonl` holds some of these, always `steps`; what is not finite is `null`.",
            "Everything under `time/` depends on wall time; in a `sync` run everything else is reproducible.",
            f"`<room>` is one of {', '.join(ROOMS)}; `<reason>` one of {', '.join(DROP_REASONS)};",
            f"`<failure>` one of {', '.join(REASONS)}.",
            "`<id>` is an id of `env.id` where that names several, under `eval/` also a name of `eval.envs`;",
            "`<info>` names a number in the info of the last step; what is no letter, digit, `.`, `-` or `/` is `_` in it.",
            "",
            "| name | unit | meaning | from |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )
