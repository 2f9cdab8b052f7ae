"""What log-probs give away: another sampling than claimed, weights that never arrived, old data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from dialoop_ops.audit.records import TRAINED, CurvePoint, Dump, Rollout, TokenRecord
from dialoop_ops.audit.report import (
    ERROR,
    AuditFinding,
    Evidence,
    NotCheckable,
    evidence_of,
    finding_of,
)

# Engines and trainers that are right differ by less, in nats, even in bfloat16 on the median token.
_TOLERANCE = 0.02
_FEWEST_TOKENS = 100
_FEWEST_GROUPS = 20
_SURE = 4.0
"""Standard errors beyond which a difference is no chance."""
_SMALLEST_AGREEMENT = 0.02
_FRESH_KL = 0.01
"""KL in nats between sampler and trainer on tokens of one policy; the job's own alarm."""
_GROWTH = 4.0
_PROBE_GROWN = 0.05
_FEWEST_POINTS = 2
_FEWEST_PAIRS = 8
_EQUAL = 2e-6
_EQUAL_SHARE = 0.9


class Pairs(NamedTuple):
    """Log-probs of the same tokens by sampler and trainer [N], with a step for each row."""

    engine: np.ndarray
    trainer: np.ndarray
    steps: np.ndarray


def check_sampling(dump: Dump) -> list[AuditFinding]:
    """Look for log-probs that are not of the distribution that is claimed to be sampled from."""
    rollouts = [r for r in dump.rollouts if any(len(t.logprobs) for t in r.sequences)]
    if not rollouts:
        raise NotCheckable("there are no log-probs of the sampler")
    evidence = [*_impossible(rollouts), *_other_temperatures(dump)]
    pairs = _pairs(rollouts)
    if pairs is not None and (detail := _disagreement(pairs)):
        evidence.append(_at_largest(rollouts, detail))
    elif pairs is None and len(dump.fresh_mismatch) > 1:
        early = median(point.value for point in dump.fresh_mismatch[:5])
        if early > _FRESH_KL:
            detail = (
                f"KL between sampler and trainer {early:.3g} nats on tokens of the same policy, "
                "from the first step on"
            )
            evidence.append(Evidence(step=dump.fresh_mismatch[0].step, detail=detail))
    if detail := _frequencies(rollouts):
        evidence.append(Evidence(detail=detail))
    if pairs is None and len(dump.fresh_mismatch) < 2:
        dump.limits["sampling_mismatch"] = (
            "there are no log-probs of both sampler and trainer: only the tokens' frequencies and "
            "the log-probs themselves were looked at"
        )
    return finding_of(
        "sampling_mismatch",
        ERROR,
        evidence,
        message="The sampler's log-probs are not those of the distribution that the training "
        "assumes: another temperature, or top-p, top-k or min-p cut it.",
        remedy="Sample without truncation, record the log-probs after the temperature "
        "(vLLM: logprobs_mode=processed_logprobs), and train at the same temperature.",
        total=len(rollouts),
    )


def _impossible(rollouts: list[Rollout]) -> Iterator[Evidence]:
    """Yield log-probs above 0 or not finite, and rows in which all are exactly 0."""
    num_zero, num_rows, first = 0, 0, None
    for rollout in rollouts:
        for index, tokens in enumerate(rollout.sequences):
            values = tokens.logprobs
            if not len(values):
                continue
            bad = np.flatnonzero(~np.isfinite(values) | (values > 1e-3))
            if len(bad):
                positions = tokens.positions()
                place = int(positions[min(bad[0], len(positions) - 1)]) if len(positions) else None
                detail = f"the log-prob is {values[bad[0]]:.4g}"
                yield evidence_of(rollout, sequence=index, token=place, detail=detail)
            if rollout.temperature == 0:
                continue
            num_rows += 1
            if len(values) > 1 and not values.any():
                num_zero += 1
                first = first or evidence_of(rollout, sequence=index, detail="all log-probs are 0")
    if first is not None and num_zero > 0.2 * num_rows:
        yield first


def _other_temperatures(dump: Dump) -> Iterator[Evidence]:
    claim = dump.claims.temperature
    for rollout in dump.rollouts:
        own = rollout.temperature
        if rollout.fate != TRAINED or claim is None or own is None:
            continue
        if abs(own - claim) > 1e-6:
            detail = f"sampled at temperature {own:g}; the config says {claim:g}"
            yield evidence_of(rollout, detail=detail)


def _pairs(rollouts: list[Rollout]) -> Pairs | None:
    """Return the log-probs that both sides gave; None where there are too few."""
    engine, trainer, steps = [], [], []
    for rollout, tokens in _rows_of_both(rollouts):
        both = np.isfinite(tokens.logprobs) & np.isfinite(tokens.trainer_logprobs)
        engine.append(tokens.logprobs[both])
        trainer.append(tokens.trainer_logprobs[both])
        steps.append(np.full(int(both.sum()), rollout.step or 0))
    if sum(map(len, engine)) < _FEWEST_TOKENS:
        return None
    return Pairs(*(np.concatenate(p).astype(np.float64) for p in (engine, trainer, steps)))


def _rows_of_both(rollouts: list[Rollout]) -> Iterator[tuple[Rollout, TokenRecord]]:
    for rollout in rollouts:
        for tokens in rollout.sequences:
            if tokens.has_logprobs() and len(tokens.trainer_logprobs) == tokens.num_sampled:
                yield rollout, tokens


def _disagreement(pairs: Pairs) -> str:
    """Return how sampler and trainer differ in the first steps that say enough; "" if not.

    Later on they may differ because weights did not arrive, which is another fault.
    """
    # A token that is nearly certain tells nothing: every temperature makes it certain.
    unsure = (pairs.engine < -0.02) | (pairs.trainer < -0.02)
    if unsure.sum() < _FEWEST_TOKENS:
        return ""
    last = np.sort(pairs.steps[unsure])[_FEWEST_TOKENS - 1]
    early = unsure & (pairs.steps <= last)
    engine, trainer = pairs.engine[early], pairs.trainer[early]
    difference = engine - trainer
    above = float((difference > -_TOLERANCE).mean())
    if above > 0.98 and difference.mean() > _TOLERANCE:
        return (
            f"the sampler gives every token more than the trainer, {difference.mean():.3f} nats "
            "on average: its distribution was truncated"
        )
    typical = float(np.median(np.abs(difference)))
    if typical <= _TOLERANCE:
        return ""
    slope = float(np.polyfit(trainer, engine, 1)[0])
    return (
        f"sampler and trainer differ by {typical:.3f} nats on the median token; their log-probs "
        f"fit a temperature of about {1 / slope:.2f} against the trainer's"
        if slope > 0.05
        else f"sampler and trainer differ by {typical:.3f} nats on the median token"
    )


def _at_largest(rollouts: list[Rollout], detail: str) -> Evidence:
    """Return evidence at the token where sampler and trainer differ most."""
    worst, evidence = -1.0, Evidence(detail=detail)
    for rollout, tokens in _rows_of_both(rollouts):
        gap = np.nan_to_num(np.abs(tokens.logprobs - tokens.trainer_logprobs))
        place = int(gap.argmax())
        if gap[place] > worst:
            worst = float(gap[place])
            token = int(tokens.positions()[place])
            evidence = evidence_of(rollout, token=token, detail=detail)
    return evidence


def _frequencies(rollouts: list[Rollout]) -> str:
    """Return how the tokens' frequencies contradict their log-probs; "" where they do not.

    Of several samples after one prefix, two agree with probability sum(p²), which is also the mean
    of p over the samples. Both are estimated and compared, group by group.
    """
    by_group: dict[object, list[TokenRecord]] = defaultdict(list)
    # A trajectory that was written twice agrees with itself.
    for rollout in {rollout.name: rollout for rollout in rollouts}.values():
        if rollout.temperature == 0 or len(rollout.sequences) != 1:
            continue
        tokens = rollout.sequences[0]
        if tokens.has_logprobs() and np.isfinite(tokens.logprobs).all():
            by_group[rollout.group, rollout.step, rollout.fate].append(tokens)
    nodes = [_shared_nodes(members) for members in by_group.values() if len(members) > 1]
    differences = [sum(map(_agreement, own)) for own in nodes]
    num_nodes = sum(map(len, nodes))
    if len(differences) < _FEWEST_GROUPS or not num_nodes:
        return ""
    mean, error = fmean(differences), float(np.std(differences)) / len(differences) ** 0.5
    per_node = sum(differences) / num_nodes
    if abs(mean) <= _SURE * error or abs(per_node) < _SMALLEST_AGREEMENT:
        return ""
    more = "more" if mean > 0 else "less"
    return (
        f"samples after the same prefix agree {more} often than their log-probs say, by "
        f"{abs(per_node):.3f} a token ({abs(mean) / max(error, 1e-12):.0f} standard errors, "
        f"{len(differences)} groups)"
    )


def _shared_nodes(members: list[TokenRecord]) -> list[list[tuple[int, float]]]:
    """Return (token, probability) of the samples after each prefix that several members share.

    Only the first answers: after them the environment may go on in its own way.
    """
    by_prompt: dict[bytes, list[TokenRecord]] = defaultdict(list)
    for tokens in members:
        by_prompt[tokens.ids[: tokens.spans[0].start].tobytes()].append(tokens)
    nodes = []
    waiting = [(0, together) for together in by_prompt.values()]
    while waiting:
        index, together = waiting.pop()
        versions: dict[int, list[tuple[int, float]]] = defaultdict(list)
        following: dict[int, list[TokenRecord]] = defaultdict(list)
        for tokens in together:
            first = tokens.spans[0]
            if first.start + index >= first.end:
                continue
            token = int(tokens.ids[first.start + index])
            version = int(tokens.versions[index]) if len(tokens.versions) else 0
            versions[version].append((token, float(np.exp(tokens.logprobs[index]))))
            following[token].append(tokens)
        nodes += [samples for samples in versions.values() if len(samples) > 1]
        waiting += [(index + 1, rest) for rest in following.values() if len(rest) > 1]
    return nodes


def _agreement(samples: list[tuple[int, float]]) -> float:
    """Return the share of pairs that agree, minus the mean probability."""
    counts: dict[int, int] = defaultdict(int)
    for token, _ in samples:
        counts[token] += 1
    size = len(samples)
    agreeing = sum(count * (count - 1) for count in counts.values()) / (size * (size - 1))
    return agreeing - fmean(probability for _, probability in samples)


def check_weights(dump: Dump) -> list[AuditFinding]:
    """Look for policies that the sampler is said to have, and does not."""
    evidence: list[Evidence] = []
    lacking = []
    evidence += _failed_proofs(dump)
    if not dump.publishes and dump.kind == "dialoop":
        lacking.append("proofs of publishes")
    pairs = _pairs(dump.rollouts)
    points = _mismatch_points(pairs) if pairs is not None else dump.fresh_mismatch
    floor = _TOLERANCE if pairs is not None else _FRESH_KL
    if detail := _growth(points, floor):
        evidence.append(_at_largest(dump.rollouts, detail))
    if len(points) < _FEWEST_POINTS:
        lacking.append("log-probs of the trainer in two steps")
    same = _same_logprobs(dump.rollouts)
    if same is None:
        lacking.append("prompts that several policies answered, with log-probs")
    else:
        evidence += same
    if not evidence and same is None and not dump.publishes and len(points) < _FEWEST_POINTS:
        raise NotCheckable(f"there are no {' and no '.join(lacking)}")
    if lacking:
        dump.limits["weights_never_arrived"] = f"there are no {' and no '.join(lacking)}"
    return finding_of(
        "weights_never_arrived",
        ERROR,
        evidence,
        message="The policy's number grows and the sampler's weights do not follow.",
        remedy="After each publish compare log-probs of fixed prompts between trainer and "
        "sampler; look for an adapter that is not loaded, a stale cache, a tied head.",
        total=max(len(dump.publishes), len(points), 1),
    )


def _failed_proofs(dump: Dump) -> Iterator[Evidence]:
    """Yield publishes whose probe differs by more than the bound or, without one, grew."""
    bound = dump.claims.probe_bound
    if bound is None:
        points = [CurvePoint(step=version, value=value) for version, value in dump.publishes]
        if detail := _growth(points, _PROBE_GROWN):
            yield Evidence(
                version=dump.publishes[-1][0], detail=f"by the probe of each publish {detail}"
            )
        return
    firsts: dict[int | None, Rollout] = {}
    for rollout in dump.rollouts:
        firsts.setdefault(rollout.version, rollout)
    for version, value in dump.publishes:
        if value <= bound:
            continue
        detail = f"the probe of version {version} differs by {value:.3g} nats"
        first = firsts.get(version)
        spans = first.sequences[0].spans if first is not None and first.sequences else ()
        if first is None or not spans:
            yield Evidence(version=version, detail=detail)
        else:  # where what it sampled begins
            yield evidence_of(first, version=version, token=spans[0].start, detail=detail)


def _mismatch_points(pairs: Pairs) -> list[CurvePoint]:
    steps = np.unique(pairs.steps)
    return [
        CurvePoint(
            step=int(step),
            value=float(np.abs(pairs.engine - pairs.trainer)[pairs.steps == step].mean()),
        )
        for step in steps
    ]


def _growth(points: list[CurvePoint], floor: float) -> str:
    """Return how the difference of sampler and trainer grew with the steps; "" if it did not."""
    if len(points) < _FEWEST_POINTS:
        return ""
    third = max(1, len(points) // 3)
    early = median(point.value for point in points[:third])
    late = median(point.value for point in points[-third:])
    if late <= floor or late <= _GROWTH * max(early, 0.0):
        return ""
    return (
        f"sampler and trainer differ by {early:.3g} nats in the first steps and {late:.3g} in the "
        "last"
    )


def _same_logprobs(rollouts: list[Rollout]) -> list[Evidence] | None:
    """Return evidence that other versions gave the very same log-probs; None without pairs.

    A pair is one token after one prefix, sampled by policies at least two versions apart.
    """
    seen: dict[object, tuple[int, float]] = {}
    equal: list[Evidence] = []
    num_pairs = 0
    for rollout in rollouts:
        for index, tokens in enumerate(rollout.sequences):
            if not tokens.has_logprobs() or len(tokens.versions) != tokens.num_sampled:
                continue
            first = tokens.spans[0]
            for number in range(min(4, first.end - first.start)):
                value, version = float(tokens.logprobs[number]), int(tokens.versions[number])
                if version < 0 or not -30 < value < -0.01:
                    continue
                place = first.start + number
                key = (rollout.temperature, hash(tokens.ids[: place + 1].tobytes()))
                before = seen.setdefault(key, (version, value))
                if abs(version - before[0]) < 2:
                    continue
                num_pairs += 1
                if abs(value - before[1]) <= _EQUAL * max(1.0, abs(value)):
                    detail = (
                        f"log-prob {value:.6f}, as under version {before[0]}: the weights are "
                        "those of then"
                    )
                    fields = {"sequence": index, "token": place, "version": version}
                    equal.append(evidence_of(rollout, **fields, detail=detail))
    if num_pairs < _FEWEST_PAIRS:
        return None
    return equal if len(equal) >= _EQUAL_SHARE * num_pairs else []


def check_staleness(dump: Dump) -> list[AuditFinding]:
    """Look for trained tokens that lag by more versions than the bound allows."""
    bound = dump.claims.max_staleness
    ages = [(r, r.staleness) for r in dump.trained_rollouts() if r.staleness is not None]
    if bound is None:
        raise NotCheckable("no bound is known: give max_staleness")
    if not ages:
        raise NotCheckable("the versions of sampler and trainer are unknown")
    late = [(rollout, age) for rollout, age in ages if age > bound]
    return finding_of(
        "staleness_past_bound",
        ERROR,
        [evidence_of(rollout, detail=f"{age} versions old") for rollout, age in late],
        message=f"Trajectories were trained whose oldest token lagged by more than {bound} "
        "versions.",
        remedy="Drop or requeue such groups before the loss, and check who waits for whom.",
        total=len(ages),
    )
