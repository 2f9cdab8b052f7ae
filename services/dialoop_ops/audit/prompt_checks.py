"""What prompts give away: long ones that are no longer played.

A loader that filters or counts anew when a run resumes may pass over every prompt beyond a length.
Nothing fails: the rewards are those of the short ones, and often better.
"""

from __future__ import annotations

from math import lgamma, log

from dialoop_ops.audit.records import EVALUATION, Dump, Rollout
from dialoop_ops.audit.report import WARNING, AuditFinding, NotCheckable, evidence_of

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
