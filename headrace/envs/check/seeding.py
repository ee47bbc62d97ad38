"""The rules on seeds: the same for the same, others for others, and resets that go on."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from headrace.envs.check import rules
from headrace.envs.check.player import Actions, Player, Row
from headrace.envs.check.report import breach

if TYPE_CHECKING:
    from headrace.envs.check.single import Check

Seeds: TypeAlias = Sequence[int | None]
"""Of resets in order; None: without one."""
STEPS = 200
BUDGET_S = 20.0
EPISODES = 4
OPENING = 10
"""Steps of an episode by which it is told from others, beside its first observation."""


def check(run: "Check") -> None:
    """Two environments of one seed and a third of another, played with the same actions."""
    players = [run.player(f" of the {nth} environment") for nth in ("second", "third", "fourth")]
    seeds = run.seed, run.seed, run.seed + 1
    actions = Actions(run.action_spec, run.seed)
    sequence = [actions() for _ in range(OPENING)]

    def openings(*seeds_of: Seeds) -> list[list[list[Row]]]:
        """For each player the beginnings of episodes with these seeds."""
        pairs = zip(players, seeds_of, strict=True)
        return [[_opening(player, actions, sequence, seed) for seed in each] for player, each in pairs]

    differ = _lock_step(run, players, seeds, actions)
    one, same, _ = openings([None], [None], [None])
    differ = differ or _difference(one, same)
    if differ:
        run.found.add([breach("same-seed", f"{differ}, of two environments reset with seed={run.seed}")])
        return
    # All three were called alike so far: where seeds are ignored they are still alike.
    one, _, other = openings(*([seed, *[None] * (EPISODES - 1)] for seed in seeds))
    _streams(run, one, other)
    # Where they are not, their pasts are unlike, and a seed 0 that is taken for none does not come out alike.
    one, _, other = openings(*[[0]] * 3)
    if differ := _difference(one, other):
        one, _, other = openings(*[[run.seed + 2]] * 3)
        if not _difference(one, other):
            run.found.add([breach("seed-zero", f"{differ}, of two environments reset with seed=0")])


def _lock_step(run: "Check", players: list[Player], seeds: Sequence[int], actions: Actions) -> str | None:
    """Where the first two, of one seed, differ."""
    start = time.monotonic()
    rows = [run.checked(player.reset(seed), player) for player, seed in zip(players, seeds, strict=True)]
    for _ in range(min(STEPS, run.steps or STEPS)):
        differ = _row_difference(*rows[:2])
        if differ:
            return f"{differ} at {players[0].at}"
        if time.monotonic() - start > BUDGET_S:
            break
        action = actions()
        rows = [run.checked(player.advance(actions.given(action)), player) for player in players]
    return None


def _streams(run: "Check", ones: list[list[Row]], others: list[list[Row]]) -> None:
    """Whether episodes of one life differ, and whether they depend on its seed."""
    alike = [all(not _difference([each[0]], [episode]) for episode in each) for each in (ones, others)]
    if all(alike) and _difference(ones, others):
        got = f"{EPISODES} episodes of seed {run.seed} began alike, and {EPISODES} of seed {run.seed + 1} too"
        run.found.add([breach("reset-reseeds", got)])
    if not any(alike) and not _difference(ones, others):
        got = f"seeds {run.seed} and {run.seed + 1} gave the same {EPISODES} episodes, one unlike another"
        run.found.add([breach("seed-ignored", got)])


def _opening(player: Player, actions: Actions, sequence: list[Any], seed: int | None) -> list[Row]:
    """Copies of the rows from a reset until ``sequence`` or the episode ends."""
    rows = [rules.copied(player.reset(seed))]
    for action in sequence:
        if player.ended:
            break
        rows.append(rules.copied(player.advance(actions.given(action))))
    return rows


def _difference(ones: list[list[Row]], others: list[list[Row]]) -> str | None:
    """The first difference of two lists of openings, in words."""
    for one, other in zip(ones, others, strict=True):
        for t, (a, b) in enumerate(zip(one, other, strict=False)):
            text = _row_difference(a, b)
            if text:
                return f"{text} at {f'step {t}' if t else 'the reset'} of an episode"
        if len(one) != len(other):
            return f"an episode's length is {len(one) - 1} and {len(other) - 1}"
    return None


def _row_difference(one: Row, other: Row) -> str | None:
    parts = ((name, getattr(one, name), getattr(other, name)) for name in Row._fields)
    return next((text for name, a, b in parts if (text := rules.difference(a, b, name))), None)
