"""What rewards and prompts give away: pay for length, strings that always win, lost prompts ..."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations, pairwise
from math import lgamma, log
from statistics import fmean, stdev

from dialoop_ops.audit.records import EVALUATION, CurvePoint, Dump, Rollout
from dialoop_ops.audit.report import (
    WARNING,
    AuditFinding,
    Evidence,
    NotCheckable,
    evidence_of,
    finding_of,
)

_FEWEST_PAIRS, _FEWEST_GROUPS = 60, 10
_CONCORDANCE = 0.9
"""Of pairs with other rewards, the share by which the longer one wins (or loses) more often."""
_NEAR = 0.25
"""Rewards are near when they differ by less than this share of all rewards' range."""
_MOST_MEMBERS = 64
"""Answers of a group that are compared in pairs."""
_SHORTEST = 8
_FEWEST_COPIES, _FEWEST_TASKS = 8, 5
_COPIES_SHARE = 0.1
_WINS = 0.9
_SHARED = 0.1
"""Above this share of its tasks with other winners, an answer does not depend on the task."""
_DROP_ERRORS = 2.5
_FEWEST_POINTS = 4


def check_length_bias(dump: Dump) -> list[AuditFinding]:
    """Look for rewards that follow the length of the answer, among answers to one prompt."""
    groups = _groups(dump.trained_rollouts())
    if len(groups) < _FEWEST_GROUPS:
        raise NotCheckable(f"only {len(groups)} groups of one prompt have rewards")
    names = {"reward"} | {name for rollout in dump.trained_rollouts() for name in rollout.rewards}
    return next(filter(None, (_length_finding(groups, name) for name in sorted(names))), [])


def _groups(rollouts: list[Rollout]) -> list[list[Rollout]]:
    """Return answers to one prompt in one step that were made in as many turns and tool calls."""
    groups: dict[object, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reward is not None:
            key = (rollout.step, rollout.group, rollout.num_turns, rollout.num_tool_calls)
            groups[key].append(rollout)
    return [members[:_MOST_MEMBERS] for members in groups.values() if len(members) > 1]


def _value(rollout: Rollout, name: str) -> float:
    value = rollout.reward if name == "reward" else rollout.rewards.get(name, 0.0)
    return 0.0 if value is None else value


def _length_finding(groups: list[list[Rollout]], name: str) -> list[AuditFinding]:
    values = [_value(rollout, name) for members in groups for rollout in members]
    spread = max(values) - min(values)
    if not spread or not math.isfinite(spread):
        return []
    for bound, what in ((spread, "all pairs"), (_NEAR * spread, "pairs with near rewards")):
        scores, used = [], 0
        for members in groups:
            own = list(_concordances(members, name, bound))
            scores += own
            used += bool(own)
        # A finite sample of few pairs may agree by chance; that many do not.
        if len(scores) < _FEWEST_PAIRS or used < _FEWEST_GROUPS:
            continue
        mean = fmean(scores)
        if abs(mean) >= _CONCORDANCE:
            way = "longer" if mean > 0 else "shorter"
            longest = max((r for members in groups for r in members), key=lambda r: _value(r, name))
            detail = f"{name}: of {what}, the {way} answer wins {(1 + abs(mean)) / 2:.0%}"
            return finding_of(
                "length_bias",
                WARNING,
                [evidence_of(longest, detail=detail)],
                message="The reward follows the length of the answer: the policy is taught to "
                f"answer {way}, whatever it says.",
                remedy="Look at what the reward measures, and compare its mean over answers of "
                "equal length.",
                count=len(scores),
                total=len(scores),
            )
    return []


def _concordances(members: list[Rollout], name: str, bound: float) -> Iterator[float]:
    """Yield 1 for a pair of which the longer has more reward, -1 for less, 0 for equal lengths."""
    for first, second in combinations(members, 2):
        difference = _value(first, name) - _value(second, name)
        if 1e-9 < abs(difference) <= bound:
            longer = (first.length > second.length) - (first.length < second.length)
            yield float(longer) * math.copysign(1.0, difference)


def check_duplicates(dump: Dump) -> list[AuditFinding]:
    """Look for one answer that wins on many different tasks."""
    rollouts = [r for r in dump.trained_rollouts() if r.reward is not None and r.text.strip()]
    if len({rollout.task for rollout in rollouts}) < _FEWEST_TASKS:
        raise NotCheckable(f"fewer than {_FEWEST_TASKS} tasks have answers with rewards")
    rewards = [rollout.reward or 0.0 for rollout in rollouts]
    low, high = min(rewards), max(rewards)
    if low == high:
        return []
    threshold = max(high - 0.2 * (high - low), fmean(rewards))
    winners = [rollout for rollout in rollouts if (rollout.reward or 0.0) >= threshold]
    copies: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        copies[_plain_text(rollout)].append(rollout)
    for text, same in sorted(copies.items(), key=lambda item: -len(item[1])):
        wins = [rollout for rollout in same if (rollout.reward or 0.0) >= threshold]
        if (
            len(text) >= _SHORTEST
            and len(wins) >= max(_FEWEST_COPIES, _COPIES_SHARE * len(winners), _WINS * len(same))
            and len({rollout.task for rollout in wins}) >= _FEWEST_TASKS
            and not _answers_its_tasks(text, wins, winners)
        ):
            num_tasks = len({rollout.task for rollout in wins})
            detail = f"{len(wins)} times on {num_tasks} tasks: {text[:80]!r}"
            return finding_of(
                "duplicated_high_reward",
                WARNING,
                [evidence_of(rollout, detail=detail) for rollout in wins],
                total=len(winners),
                message="One answer gets a high reward whatever is asked.",
                remedy="Read it, and mend the reward that it satisfies.",
            )
    return []


def _plain_text(rollout: Rollout) -> str:
    return " ".join(rollout.text.casefold().split())


def _answers_its_tasks(text: str, wins: list[Rollout], winners: list[Rollout]) -> bool:
    """Return whether the answer wins where no other does, as one of a few possible answers.

    A count or a choice is right on many tasks, and nothing else is right there. What wins whatever
    is asked wins beside the right answers, or nothing else wins at all.
    """
    own = {rollout.task for rollout in wins}
    # Who came to the same answer by a longer way gave no other one.
    others = {r.task for r in winners if not _plain_text(r).endswith(text)}
    return len(own & others) <= _SHARED * len(own) and len(wins) <= len(winners) / 2


def check_heldout(dump: Dump) -> list[AuditFinding]:
    """Look for a reward in training that rises while the held-out reward falls."""
    curves = {label: points for label, points in dump.heldout.items() if len(points) > 1}
    if len(dump.trained_reward) < 2 * _FEWEST_POINTS or not curves:
        raise NotCheckable("there are no curves of the reward in training and of a held-out one")
    train = dump.trained_reward
    half = len(train) // 2
    early, late = ([p.value for p in part] for part in (train[:half], train[half:]))
    if not fmean(late) - fmean(early) > 2 * math.hypot(_error(early), _error(late)):
        return []
    evidence = []
    for label, points in sorted(curves.items()):
        best = max(points[:-1], key=lambda point: point.value)
        last = points[-1]
        if best.value - last.value > _DROP_ERRORS * _fall_error(points, best, last):
            detail = (
                f"held-out {label or 'reward'} fell from {best.value:.3g} (step {best.step}) to "
                f"{last.value:.3g}, while the reward in training rose from {fmean(early):.3g} to "
                f"{fmean(late):.3g}"
            )
            evidence.append(Evidence(step=last.step, detail=detail))
    return finding_of(
        "heldout_falls",
        WARNING,
        evidence,
        message="The reward in training rises and the held-out reward falls.",
        remedy="Stop at the best held-out step, and look for what the policy exploits.",
        total=len(curves),
    )


def _error(values: list[float]) -> float:
    """Return the standard error of the mean."""
    if len(values) < 2:
        return math.inf
    return stdev(values) / math.sqrt(len(values))


def _fall_error(points: list[CurvePoint], best: CurvePoint, last: CurvePoint) -> float:
    """Return the standard error of the fall; where counts are unknown, of the curve's steps."""
    if best.count and last.count and all(0 <= point.value <= 1 for point in points):
        spread = math.sqrt(max(0.25 / best.count, best.value * (1 - best.value) / best.count))
        return math.hypot(spread, math.sqrt(max(last.value * (1 - last.value), 0.05) / last.count))
    if len(points) < _FEWEST_POINTS:
        return math.inf
    changes = [b.value - a.value for a, b in pairwise(points)]
    return max(_error(changes) * math.sqrt(2), 0.02)


_FEWEST_GROUPS = 20
_CHANCE = 1e-6
"""How likely what is reported may be where the order of the prompts has nothing to do with their
length."""


def check_vanished_prompts(dump: Dump) -> list[AuditFinding]:
    """Look for a length beyond which prompts were played once, and then never again."""
    firsts: dict[object, Rollout] = {}
    for rollout in dump.rollouts:
        if rollout.fate != EVALUATION:
            firsts.setdefault((rollout.step, rollout.group), rollout)
    groups = list(firsts.values())
    if len(groups) < _FEWEST_GROUPS:
        raise NotCheckable(f"only {len(groups)} prompts were played in training")
    unit = "tokens" if all(map(_tokens_of, groups)) else "characters"
    sizes = [_tokens_of(group) if unit == "tokens" else len(group.task) for group in groups]
    bounds = sorted(set(sizes))[:-1]
    for bound in bounds:
        places = [place for place, size in enumerate(sizes) if size > bound]
        end = places[-1] + 1
        if _log_chance(len(sizes), len(places), end) + log(len(bounds)) > log(_CHANCE):
            continue
        last = groups[places[-1]]
        detail = f"its prompt has {sizes[places[-1]]} {unit}; the longest since has {bound}"
        place = {"sequence": 0, "token": bound} if unit == "tokens" else {}
        return [
            AuditFinding(
                fault="vanished_prompts",
                severity=WARNING,
                message=f"{len(places)} of the first {end} prompts are longer than {bound} {unit}, "
                f"and none of the {len(sizes) - end} since: the policy trains on short ones alone.",
                remedy="Compare what the run was resumed with: filters of long prompts, and how "
                "the place in the data is found again. Shuffle data that are sorted by length.",
                evidence=(evidence_of(last, **place, detail=detail),),
                count=len(sizes) - end,
                total=len(sizes),
            )
        ]
    return []


def _tokens_of(rollout: Rollout) -> int:
    """Return the number of tokens of the prompt; 0 where they are not known."""
    spans = rollout.sequences[0].spans if rollout.sequences else ()
    return spans[0].start if spans else 0


def _log_chance(total: int, num_long: int, end: int) -> float:
    """Return the log of the chance that, in random order, all long ones are among the first."""
    return _log_choose(end, num_long) - _log_choose(total, num_long)


def _log_choose(total: int, count: int) -> float:
    return lgamma(total + 1) - lgamma(count + 1) - lgamma(total - count + 1)
