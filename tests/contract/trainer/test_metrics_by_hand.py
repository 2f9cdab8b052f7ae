"""Every name of docs/metrics.md, computed by hand and compared with what a run writes.

The hand is plain Python and the plain logits of transformers' model
(tests.support.metrics.plain_steps). A test returns pairs of a row and of what the row has to say;
`by_hand` compares them.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from dialoop.chat import History
from dialoop.sequences import Along, Column
from dialoop.trajectory import StopReason
from dialoop_services.trainer.data.demonstrations import Demonstration, DemonstrationSet

from benchmarks.servers.families import make_family
from tests.support.metrics.by_hand import BY_HAND, Between, Pairs, Row, by_hand
from tests.support.metrics.job import (
    CALL_S,
    GENERATE_S,
    OFF,
    ROW_TOKENS,
    SETTINGS,
    SLEEP_S,
    Author,
    Queue,
    Ran,
    Tasks,
    first_batch,
    last_batch,
    plain_batch,
    real_job,
    right,
    shown_batch,
    shown_row,
    turn,
)
from tests.support.metrics.names import EVERY_ROW, general, names_in_docs
from tests.support.metrics.plain_steps import (
    Answer,
    Coefficients,
    PlainModel,
    TokenValues,
    UpdateByHand,
    forced_experts,
    grpo_update,
    k3,
    mean,
    rate,
    table,
)
from tests.support.metrics.self_teaching import Class, batch_of
from tests.support.trainer_world import worlds
from tests.support.waiting import until

COEFFICIENTS = Coefficients(clip=0.01, kl=0.1, kl_inference=0.05, entropy=0.01, band=(0.9, 1.1))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def ran(directory: Path, run_dir: Path) -> Iterator[Ran]:
    """A warm start; a step; a batch whose updates are refused; a step of data of two ages."""

    def refused(author: Author) -> Any:
        def spoil(policy: Any) -> None:
            next(policy.parameters()).grad[0, 0] = math.inf

        job.recorder.after_backward = spoil
        return plain_batch(author, "c", "d", version=2)

    def last(author: Author) -> Any:
        job.recorder.after_backward = lambda _: None
        return last_batch(author)

    job = real_job(run_dir, directory, first_batch, refused, last, is_published=True, **SETTINGS)
    job.run()
    yield job
    job.world.records.close()


class Batch(NamedTuple):
    """What a batch's row is of: its place, the policy's number then, and its groups."""

    place: int
    current: int
    trained: tuple[str, ...]
    dropped: tuple[str, ...] = ()


BATCHES = (
    Batch(0, 1, ("a", "b"), ("u",)),
    Batch(1, 2, ("c", "d")),
    Batch(2, 2, ("e", "f")),
)


def rows_of(ran: Ran) -> Iterator[tuple[Row, Batch]]:
    rows = ran.rows("train", "refused")
    assert [row["kind"] for row in rows] == ["train", "refused", "train"]
    return zip(rows, BATCHES, strict=True)


@dataclass(frozen=True, kw_only=True)
class StepByHand:
    updates: list[UpdateByHand]
    answers: list[Answer]

    @property
    def tokens(self) -> list[TokenValues]:
        """Each token once for each update that trained it."""
        return [token for update in self.updates for token in update.tokens]


@pytest.fixture(scope="module")
def steps(ran: Ran, directory: Path) -> list[StepByHand]:
    """The updates of each batch by hand, from the weights that each began with."""
    model, by_hand = PlainModel(directory), []
    for batch, updates in zip(BATCHES, ran.recorder.steps, strict=True):
        own = [
            answer.cut(ROW_TOKENS)
            for answer in ran.author.answers.values()
            if answer.trajectory.rstrip("0123456789") in batch.trained
        ]
        assert len(updates) == 4  # two epochs, two minibatches
        for epoch in (updates[:2], updates[2:]):
            assert sorted(n for u in epoch for n in u.names) == sorted(a.name for a in own)
        model.load(updates[0].weights)
        proximal = {answer.name: model.logprobs(answer) for answer in own}
        done = []
        for update in updates:
            part = [answer for answer in own if answer.name in update.names]
            model.load(update.weights)
            done.append(grpo_update(model, part, proximal, COEFFICIENTS, current=batch.current))
        by_hand.append(StepByHand(updates=done, answers=own))
    return by_hand


@by_hand(
    "train",
    *("reward", "reward_std", "rewards/<name>/mean", "rewards/<name>/std"),
    *(
        "response_tokens_mean",
        "response_tokens_min",
        "response_tokens_max",
        "trial_reward/<number>",
    ),
    *("truncated_share", "tool_call_rate", "num_groups_trained", "num_groups_dropped"),
)
def test_rewards_lengths_and_shares_of_a_step_s_trajectories(ran: Ran) -> Pairs:
    for row, batch in rows_of(ran):
        groups = [ran.author.groups[name] for name in (*batch.trained, *batch.dropped)]
        members = [trajectory for group in groups for trajectory in group.trajectories]
        named: dict[str, list[float]] = {"right": [], "brief": []}
        lengths, cut, calls = [], [], []
        for each in members:
            for name, values in named.items():
                rewards = [r for t in each.turns for r in t.rewards if r.name == name]
                values.append(sum(r.value * r.weight for r in rewards))
            lengths.append(sum(len(s.inference_logprobs) for s in each.sequences))
            ends = {t.stop_reason for t in each.turns}
            cut.append(each.truncated or bool(ends & {StopReason.LENGTH, StopReason.CONTEXT_FULL}))
            calls.append(any(t.num_tool_calls for t in each.turns))
        whole = [sum(values) for values in zip(*named.values(), strict=True)]
        yield (
            row,
            {
                "reward": mean(whole),
                "reward_std": statistics.pstdev(whole),
                "rewards/right/mean": mean(named["right"]),
                "rewards/right/std": statistics.pstdev(named["right"]),
                "response_tokens_mean": mean(lengths),
                "response_tokens_min": min(lengths),
                "response_tokens_max": max(lengths),
                "truncated_share": sum(cut) / len(cut),
                "tool_call_rate": sum(calls) / len(calls),
                "num_groups_trained": len(batch.trained),
                "num_groups_dropped": len(batch.dropped),
            },
        )
        if any(named["brief"]):
            yield row, {"rewards/brief/mean": mean(named["brief"])}
            yield row, {"rewards/brief/std": statistics.pstdev(named["brief"])}
    # By numbers: a0 1.5, a1 0, b0 1, b1 0.5, b2 -2, and twice 1 of the group that was dropped.
    first = ran.rows("train")[0]
    yield first, {"reward": 3 / 7, "tool_call_rate": 2 / 7, "truncated_share": 2 / 7}
    yield first, {"response_tokens_mean": 58 / 7, "rewards/brief/mean": 0.5 / 7}
    # Two of them are trials, of two episodes and of one.
    yield first, {"trial_reward/1": (0.25 - 2.0) / 2, "trial_reward/2": 1.5}
    assert "trial_reward/1" not in ran.rows("train")[1]


@by_hand(
    "train",
    *("num_trained_tokens", "num_forwarded_tokens", "num_saved_tokens", "num_oversize"),
    *("forwarded_per_distinct", "num_updates", "num_refused", "learning_rate"),
)
def test_counts_and_the_learning_rate_of_a_step(ran: Ran, steps: list[StepByHand]) -> Pairs:
    # Refused updates do not move the schedule on, which knows of eight.
    for (row, batch), step, applied in zip(rows_of(ran), steps, (4, 0, 4), strict=True):
        yield (
            row,
            {
                "num_trained_tokens": sum(len(answer.sampled) for answer in step.answers),
                # No two of them begin alike, and there are two epochs.
                "num_forwarded_tokens": 2 * sum(len(answer.ids) for answer in step.answers),
                **{"num_saved_tokens": 0, "forwarded_per_distinct": 1.0},
                "num_oversize": 1 if batch.place == 0 else 0,  # 160 tokens in rows of 150
                "num_updates": applied,
                "num_refused": 4 - applied,
                "learning_rate": rate((3, 4, 7)[batch.place], peak=1e-3, warmup=3, total=8),
            },
        )


@by_hand(
    "train",
    *("loss", "loss_objective", "loss_kl", "loss_kl_to_inference", "loss_entropy", "grad_norm"),
)
def test_the_loss_its_parts_and_the_gradients(ran: Ran, steps: list[StepByHand]) -> Pairs:
    for (row, batch), step in zip(rows_of(ran), steps, strict=True):
        yield row, {"loss": mean(update.loss for update in step.updates)}
        for name in ("loss_objective", "loss_kl", "loss_kl_to_inference", "loss_entropy"):
            yield row, {name: mean(update.parts[name] for update in step.updates)}
        norm = mean(update.grad_norm for update in step.updates)
        yield row, {"grad_norm": math.inf if batch.place == 1 else norm}
        assert norm > SETTINGS["max_grad_norm"]  # it is told as it is before the cut


@by_hand(
    "train",
    *("ratio", "ratio_squared", "ess", "approx_kl", "kl_to_ref", "kl_to_inference", "entropy"),
    *("clip_fraction", "correction_weight", "correction_masked"),
)
def test_means_over_trained_tokens(ran: Ran, steps: list[StepByHand]) -> Pairs:
    for (row, _), step in zip(rows_of(ran), steps, strict=True):
        tokens = step.tokens
        ratio, squared = (mean(token["ratio"] ** power for token in tokens) for power in (1, 2))
        yield row, {"ratio": ratio, "ratio_squared": squared, "ess": ratio**2 / squared}
        yield row, {"approx_kl": mean(token["mismatch_kl"] for token in tokens)}
        for name in ("kl_to_ref", "kl_to_inference", "entropy", "clip_fraction"):
            yield row, {name: mean(token[name] for token in tokens)}
        for name in ("correction_weight", "correction_masked"):
            yield row, {name: mean(token[name] for token in tokens)}
    for name in ("clip_fraction", "correction_masked"):
        assert 0 < ran.rows("train")[1][name] < 1  # else the numbers above prove nothing


@by_hand(
    "train",
    *("by_staleness", "by_depth", "staleness_mean", "staleness_max"),
    *("fresh_mismatch_kl", "fresh_mismatch_alarm"),
)
def test_tokens_by_age_and_depth(ran: Ran, steps: list[StepByHand]) -> Pairs:
    shown = ("mismatch_kl", "ratio", "entropy")
    for (row, batch), step in zip(rows_of(ran), steps, strict=True):
        by_age = {}
        for age in sorted({token["age"] for token in step.tokens}):
            own = [token for token in step.tokens if token["age"] == age]
            by_age[int(age)] = table(own, *shown, "clip_fraction")
            by_age[int(age)]["num_tokens"] = len(own) / 2  # of one epoch of two
        fresh = [token for token in step.updates[0].tokens if token["age"] == 0]
        by_depth = {
            low: table(own, *shown)
            for low, high in ((0, 128), (128, 256))
            if (own := [token for token in fresh if low <= token["depth"] < high])
        }
        oldest: dict[str, int] = {}
        for answer in step.answers:
            age = batch.current - min(answer.versions)
            oldest[answer.trajectory] = max(age, oldest.get(answer.trajectory, 0))
        kl = mean(token["mismatch_kl"] for token in fresh)
        yield row, {"by_staleness": by_age, "by_depth": by_depth}
        yield row, {"staleness_mean": mean(oldest.values()), "staleness_max": max(oldest.values())}
        yield row, {"fresh_mismatch_kl": kl, "fresh_mismatch_alarm": kl > 0.01}
    first, last = ran.rows("train")
    assert (list(first["by_staleness"]), list(last["by_staleness"])) == (["0"], ["0", "1"])
    assert (first["fresh_mismatch_alarm"], last["fresh_mismatch_alarm"]) == (False, True)
    assert "128" in {**first["by_depth"], **last["by_depth"]}
    yield last, {"staleness_mean": 0.5, "staleness_max": 1}


@by_hand(
    "train",
    *("lease_s", "rows_s", "train_s", "wait_s", "capture_s", "publish_s", "keep_s"),
)
def test_the_times_of_a_step_lie_between_moments_of_the_test_s_clock(ran: Ran) -> Pairs:
    recorder, loads = ran.recorder, ran.replicas[0].loads[1:]
    for row, batch in rows_of(ran):
        if row["kind"] == "refused":  # nothing is published
            assert not {"wait_s", "publish_s", "capture_s", "keep_s"} & set(row)
            continue
        began, ended = recorder.began[batch.place], recorder.ended[batch.place]
        before = ran.first_s if batch.place == 0 else recorder.ended[batch.place - 1]
        waits = [(b, e) for b, e in ran.queue.leased if before <= b and e <= began]
        after = next((b for b, _ in ran.queue.leased if b >= ended), ran.last_s)
        loaded = loads.pop(0)
        yield row, {"lease_s": Between(sum(e - b for b, e in waits), began - before)}
        yield row, {"train_s": Between(ended - began, loaded[0] - waits[-1][1])}
        yield row, {"rows_s": Between(0.0, began - waits[0][1])}
        yield row, {"wait_s": Between(0.0, loaded[0] - ended), "capture_s": 0.0, "keep_s": 0.0}
        yield row, {"publish_s": Between(loaded[1] - loaded[0], after - ended)}
        assert loaded[1] - loaded[0] >= SLEEP_S


@by_hand("train", "pipeline_depth", "max_staleness", "play_s_mean", "play_s_p99", "group_play_s")
def test_the_pace_of_a_step_and_the_times_of_its_episodes(ran: Ran) -> Pairs:
    for row, batch in rows_of(ran):
        if row["kind"] == "refused":
            continue
        times = [
            [
                sum(GENERATE_S + CALL_S * turn.num_tool_calls for turn in t.turns)
                for t in g.trajectories
            ]
            for g in (ran.author.groups[name] for name in batch.trained)
        ]
        every = [seconds for own in times for seconds in own]
        yield row, {"pipeline_depth": 0, "max_staleness": 1}
        yield row, {"play_s_mean": mean(every), "play_s_p99": max(every)}
        yield row, {"group_play_s": mean(max(own) for own in times)}
    # The first batch: 2 turns and 2 calls, 1 turn; 1 turn, 1 turn and 1 call, 1 turn.
    yield ran.rows("train")[0], {"play_s_mean": 9.0 / 5, "group_play_s": (5.0 + 2.5) / 2}


@by_hand("train", "prepare_s", "forward_backward_s", "optim_s")
def test_the_times_of_a_step_s_parts_lie_between_moments_of_its_updates(ran: Ran) -> Pairs:
    recorder = ran.recorder
    for row, batch in rows_of(ran):
        began, ended = recorder.began[batch.place], recorder.ended[batch.place]
        own = [n for n, moment in enumerate(recorder.updating) if began <= moment <= ended]
        assert len(own) == 4
        computing = sum(recorder.differentiated[n] - recorder.updating[n] for n in own)
        stepping = sum(recorder.updated[n] - recorder.differentiated[n] for n in own)
        prepared, taken = row["prepare_s"], row["forward_backward_s"]
        yield row, {"prepare_s": Between(0.0, recorder.updating[own[0]] - began)}
        yield row, {"forward_backward_s": Between(computing, ended - began - prepared)}
        least, most = computing + stepping - taken, row["train_s"] - prepared - taken
        yield row, {"optim_s": Between(least, most)}


@by_hand(
    "publish", "publish_s", "max_logprob_difference", "num_replicas", "num_bytes", "delta_bytes"
)
def test_a_publish_tells_its_time_its_proof_and_its_size(ran: Ran) -> Pairs:
    rows, (good, off, away) = ran.rows("publish"), ran.replicas
    assert len(rows) == len(good.loads) == len(off.loads) == 3
    assert not away.loads
    for row, size, (began, ended) in zip(rows, good.num_bytes, good.loads, strict=True):
        before = max(moment for moment in ran.recorder.updated if moment < began)
        later = [b for b, _ in ran.queue.leased] + ran.tasks.offered + [ran.last_s]
        after = min(moment for moment in later if moment > ended)
        yield row, {"num_replicas": 2, "num_bytes": size}
        yield row, {"delta_bytes": 0}  # each number of float32 changes: they go whole
        yield row, {"publish_s": Between(ended - began, after - before)}
        # One replica answers one probe token 0.125 nats off, and the others as the trainer.
        yield row, {"max_logprob_difference": OFF}
    policies = ran.world.run_dir / "policies"
    (file,) = (policies / "main-3").glob("*.safetensors")
    yield rows[-1], {"num_bytes": file.stat().st_size}


@by_hand(
    "evaluation",
    *("label", "mean_reward", "tool_call_rate", "num_trajectories", "num_failed"),
    *("oldest", "newest", "due_train_step", "trial_reward/<number>", "accuracy", "share"),
)
def test_an_evaluation_has_the_means_of_its_trajectories(ran: Ran) -> Pairs:
    rows = ran.rows("evaluation")
    labels = ["before_greedy", "before_sampled", "running", "after_greedy", "after_sampled"]
    assert [row["label"] for row in rows] == labels
    for row, label in zip(rows, labels, strict=True):
        rewards, calls = Tasks.REWARDS, Tasks.CALLS
        yield (
            row,
            {
                "label": label,
                "mean_reward": sum(rewards) / len(rewards),
                "tool_call_rate": sum(n > 0 for n in calls) / len(calls),
                "num_trajectories": 2,
                "accuracy": None,  # its rewards state no success
                "num_failed": 0 if label == "running" else 1,  # of 2 tasks, and of 3
                "share": 1.0 if label == "running" else 2 / 3,
                "oldest": "main-1",
                "newest": "main-2",
                "trial_reward/1": (0.0 + 1.0) / 2,
                "trial_reward/2": 3.0,
            },
        )
        if label == "running":
            yield row, {"due_train_step": 1}
        else:
            assert "due_train_step" not in row


def nll(model: PlainModel, answers: list[Answer]) -> float:
    return -mean(value for answer in answers for value in model.logprobs(answer))


@by_hand("warm_start", "loss", "learning_rate")
def test_each_tenth_step_of_a_warm_start_tells_its_own_loss(ran: Ran, directory: Path) -> Pairs:
    model, rows = PlainModel(directory), ran.rows("warm_start")
    assert [row["train_step"] for row in rows] == [10, 20]
    for row, number in zip(rows, (10, 20), strict=True):
        model.load(ran.recorder.updates[number - 1].weights)
        answers = [Answer.of(shown) for shown in shown_batch(number)]
        yield row, {"loss": nll(model, answers)}
        yield row, {"learning_rate": rate(number - 1, peak=2e-3, warmup=4, total=20)}


@by_hand("refused", *names_in_docs()["refused"])
def test_a_batch_whose_updates_are_all_refused_has_a_row_of_its_own(ran: Ran) -> Pairs:
    (row,) = ran.rows("refused")
    assert set(map(general, row)) <= names_in_docs()["train"] | names_in_docs()[EVERY_ROW]
    # Its numbers are computed above, beside those of train steps.
    yield row, {"num_updates": 0, "num_refused": 4, "train_step": 1}


@by_hand("set_aside", "group_id", "trajectory_id", "reason", "message")
def test_a_group_that_cannot_be_trained_is_told_by_its_first_bad_trajectory(ran: Ran) -> Pairs:
    (row,) = ran.rows("set_aside")
    yield row, {"group_id": "s", "trajectory_id": "s1", "reason": "token_out_of_range"}
    assert ran.queue.set_aside == {"lease-s": "token_out_of_range"}
    said = "Token id 100000 is outside the model's vocabulary of 314."
    yield row, {"message": f"{said} Play with the tokenizer of the model that is trained."}


@by_hand(EVERY_ROW, "time", "kind", "train_step", "policy_version", "lineage")
def test_rows_tell_when_they_were_written_and_after_which_step_and_policy(ran: Ran) -> Pairs:
    expected = [
        *(("warm_start", step, None) for step in (10, 20)),
        ("publish", 0, 1),
        *[("evaluation", 0, 2)] * 2,  # the newest policy that played it
        ("set_aside", 0, 1),
        *[("publish", 1, 2), ("train", 1, 2), ("refused", 1, 2)],
        *[("publish", 2, 3), ("train", 2, 3)],
        *[("evaluation", 2, 2)] * 2,
    ]
    rows = [row for row in ran.rows() if row.get("label") != "running"]
    for row, (kind, step, version) in zip(rows, expected, strict=True):
        yield row, {"time": Between(ran.first_time, ran.last_time), "kind": kind}
        lineage = None if version is None else "main"
        yield row, {"train_step": step, "policy_version": version, "lineage": lineage}


@by_hand("restore", "num_warm_start_steps", "evaluations")
def test_a_restored_job_tells_what_it_has_and_will_not_do_again(
    ran: Ran, run_dir: Path, directory: Path
) -> Pairs:
    again = real_job(run_dir, directory, is_published=True, **SETTINGS)
    again.run()
    (row,) = again.rows("restore")
    done = [each["label"] for each in ran.rows("evaluation") if each["label"] != "running"]
    yield row, {"num_warm_start_steps": 20, "train_step": 2, "evaluations": done}
    assert not again.tasks.labels
    again.world.records.close()


SHOWN = {
    10: shown_row(([10, 11], False), ([12, 13, 14], True)),
    20: shown_row(([20], False), ([21, 22], True), ([23], False), ([24, 25, 26], True)),
    30: shown_row(([30], False), ([31, 32, 33, 34, 35, 36, 37], True)),
    40: shown_row(([40], False), (list(range(41, 71)), True)),
}
"""Demonstrations by their first token; the last is longer than a row."""
HELD_OUT = (SHOWN[10], shown_row(([80], False), ([81, 82, 83, 84, 85], True)))


@pytest.fixture(scope="module")
def supervised(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    settings = {
        **{"mode": "sft", "num_steps": 4, "oversize": "drop", "max_row_tokens": 20},
        **{"learning_rate": 1e-3, "schedule": "linear", "num_warmup_updates": 1},
        "evaluation": {"num_tasks": 0, "every": 2},
    }
    shown = DemonstrationSet(
        size=4,
        show=lambda number, _: Demonstration(history=History(), place=str(10 * (number + 1))),
        render=lambda demonstration: (SHOWN[int(demonstration.place)],),
        batch_size=2,
        seed=3,
        heldout=HELD_OUT,
    )
    job = real_job(tmp_path_factory.mktemp("sft"), directory, supervised=shown, **settings)
    job.run()
    yield job
    job.world.records.close()


@by_hand("train", "epoch")
def test_a_step_of_sft_tells_of_its_demonstrations(supervised: Ran, directory: Path) -> Pairs:
    rows, recorder, model = supervised.rows("train"), supervised.recorder, PlainModel(directory)
    names = [update.names for update in recorder.updates]
    # An epoch is two batches of two, and the long demonstration is in none of their updates.
    assert [sorted(names[0] + names[1]), sorted(names[2] + names[3])] == [[10, 20, 30]] * 2
    began = [supervised.first_s, *recorder.updated]
    ended = [*recorder.updating[1:], supervised.last_s]
    for step, (row, update) in enumerate(zip(rows, recorder.updates, strict=True)):
        answers = [Answer.of(SHOWN[name]) for name in update.names]
        model.load(update.weights)
        num_tokens = sum(len(answer.sampled) for answer in answers)
        loss = -torch.stack([model.score(answer)[0].sum() for answer in answers]).sum() / num_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        yield row, {"epoch": step // 2, "num_oversize": 2 - len(update.names)}
        yield row, {"num_trained_tokens": num_tokens, "num_updates": 1, "num_refused": 0}
        yield row, {"loss": float(loss.detach()), "grad_norm": model.take_gradient_norm()}
        yield row, {"learning_rate": rate(step, peak=1e-3, warmup=1, total=4)}
        at_least = recorder.updated[step] - recorder.updating[step]
        yield row, {"train_s": Between(at_least, ended[step] - began[step])}


@by_hand("heldout", "loss", "num_tokens")
def test_held_out_demonstrations_have_the_mean_loss_of_their_tokens(
    supervised: Ran, directory: Path
) -> Pairs:
    rows, model = supervised.rows("heldout"), PlainModel(directory)
    answers = [Answer.of(row) for row in HELD_OUT]
    for row, step, weights in zip(
        rows,
        (2, 4),
        (supervised.recorder.updates[2].weights, supervised.recorder.weights()),
        strict=True,
    ):
        yield row, {"train_step": step, "num_tokens": 8, "loss": nll(model.load(weights), answers)}


ONE_UPDATE: dict[str, Any] = {
    **{"num_steps": 1, "groups_per_train_step": 2, "num_minibatches": 1},
    "evaluation": {"num_tasks": 0},
}


def chosen(author: Author, *, num_members: int, reward_of: Callable[[int], float]) -> list[Any]:
    row, member = author.sequence, author.member
    return [
        author.group(
            name,
            *(
                member(reward_of(n), row((4, 0), (6, 1)), turns=(turn(right(reward_of(n))),))
                for n in range(num_members)
            ),
        )
        for name in ("a", "b")
    ]


@by_hand("train", "nll")
def test_a_loss_that_imitates_tells_the_likelihood_of_what_was_chosen(
    directory: Path, tmp_path: Path
) -> Pairs:
    def batch(author: Author) -> Any:
        return chosen(author, num_members=3, reward_of=lambda n: float(n == 1))

    job = real_job(tmp_path, directory, batch, **ONE_UPDATE, loss="sft")
    job.run()
    (row,), (update,) = job.rows("train"), job.recorder.updates
    answers = [each for each in job.author.answers.values() if each.advantage]
    assert sorted(update.names) == sorted(each.name for each in answers)
    value = nll(PlainModel(directory).load(update.weights), answers)
    yield row, {"nll": value, "loss": value, "loss_objective": value, "num_trained_tokens": 12}
    job.world.records.close()


def with_experts(author: Author, recorded: dict[int, torch.Tensor]) -> Any:
    """Sixteen answers of ten tokens; for each token but the last one, experts were recorded."""
    generator = torch.Generator().manual_seed(3)
    for lease in chosen(author, num_members=8, reward_of=float):
        members = []
        for each in lease.group.trajectories:
            (sequence,) = each.sequences
            experts = torch.rand(10, 4, generator=generator).argsort(-1)[:, :2]
            experts[-1] = -1
            recorded[int(sequence.token_ids[0])] = experts
            values = experts.numpy().astype(np.uint8)[:, None]  # -1 becomes 255
            column = Column(values=values, along=Along.TOKENS)
            members.append(
                replace(each, sequences=(replace(sequence, columns={"routed_experts": column}),))
            )
        yield replace(lease, group=replace(lease.group, trajectories=tuple(members)))


@by_hand(
    "train",
    *("teacher_log_ratio", "router_balance", "num_recorded_choices", "routing_differs"),
    *("replayed_mismatch_kl", "own_routing_mismatch_kl"),
)
def test_a_mixture_of_experts_that_learns_from_a_teacher(tmp_path: Path) -> Pairs:
    directory = make_family("qwen3_moe", tmp_path / "model", fields={"num_hidden_layers": 1})
    recorded: dict[int, torch.Tensor] = {}
    job = real_job(
        tmp_path / "run",
        directory,
        lambda author: list(with_experts(author, recorded)),
        **ONE_UPDATE,
        loss="distill",
        objective={"router_balance_coeff": 0.1},
    )
    job.run()
    (row,), (update,) = job.rows("train"), job.recorder.updates
    model, num_differing = PlainModel(directory).load(update.weights), 0
    used, chances, tokens = [], [], []
    for answer in job.author.answers.values():
        experts = recorded[answer.name]
        with forced_experts(model, experts) as routed:
            policy = model.logprobs(answer)
        differs = (routed.chosen.sort(-1).values != experts.sort(-1).values).any(-1)
        num_differing += int((differs & (experts[:, 0] >= 0)).sum())
        used.append(routed.used)
        chances.append(routed.chances.detach())
        columns = (policy, model.logprobs(answer), answer.engine, answer.reference)
        tokens += zip(*columns, strict=True)
    shares = torch.cat(used).flatten().bincount(minlength=4) / 160
    balance = 4 * float((shares * torch.cat(chances).mean(0)).sum())
    gains = [teacher - now for now, _, _, teacher in tokens]
    loss = -mean(math.exp(now - engine) * (teacher - now) for now, _, engine, teacher in tokens)
    yield row, {"teacher_log_ratio": mean(gains), "router_balance": balance}
    yield row, {"loss_objective": loss, "loss": loss + 0.1 * balance}
    yield row, {"num_recorded_choices": 16 * 9.0, "routing_differs": num_differing / (16 * 9)}
    probed = tokens[:12]  # of two answers: they have an eighth of the 160 tokens
    yield row, {"replayed_mismatch_kl": mean(k3(engine, now) for now, _, engine, _ in probed)}
    yield row, {"own_routing_mismatch_kl": mean(k3(engine, own) for _, own, engine, _ in probed)}
    job.world.records.close()


@by_hand("train", "num_with_feedback")
def test_a_policy_that_learns_from_itself_behind_feedback(directory: Path, tmp_path: Path) -> Pairs:
    room = Class(directory)
    groups = room.groups()
    named = {**ONE_UPDATE, "loss": "self_distillation"}
    job = real_job(tmp_path, directory, batch_of(*groups), **named)
    job.run()
    (row,), (update,) = job.rows("train"), job.recorder.updates
    model, tokens = PlainModel(directory).load(update.weights), []
    for own, taught in room.by_hand(*groups):
        columns = (model.logprobs(own), model.logprobs(taught), own.engine)
        tokens += zip(*columns, strict=True)
    loss = -mean(math.exp(now - engine) * (teacher - now) for now, teacher, engine in tokens)
    yield row, {"teacher_log_ratio": mean(teacher - now for now, teacher, _ in tokens)}
    yield row, {"loss_objective": loss, "loss": loss}
    # Of four trajectories one has passed; 5, 4 + 6 and 8 tokens were sampled.
    yield row, {"num_with_feedback": 3, "num_trained_tokens": 23}
    job.world.records.close()


async def test_a_wait_for_groups_that_a_publish_made_stale_counts(tmp_path: Path) -> None:
    """The batch is whole, a requested publish ages it while the job is paused, and others come."""
    queue = Queue()
    with worlds(tmp_path) as make:
        here = make(num_steps=1, max_staleness=0, pipeline_depth=0, replay=queue)
        here.offer("a", "b")
        (batch,) = queue.batches

        def paused() -> Any:
            here.board.pause()
            return batch()

        queue.batches = [paused]
        here.offer("c", "d")
        running = asyncio.create_task(here.run())
        await until(lambda: len(queue.leased) == 1)
        await here.job.publish()
        here.board.resume()
        await running
        (row,) = [row for row in here.rows if row["kind"] == "train"]
    assert set(queue.dropped) == {"lease-a", "lease-b"}
    assert len(queue.leased) == 2
    assert row["lease_s"] >= sum(end - begin for begin, end in queue.leased)


def test_every_name_of_the_page_has_a_test_that_computes_it() -> None:
    assert {kind: set(names) for kind, names in BY_HAND.items()} == names_in_docs()


def test_the_page_has_every_name_that_these_runs_write(ran: Ran, supervised: Ran) -> None:
    names = names_in_docs()
    names["refused"] = names["train"]
    for row in (*ran.rows(), *supervised.rows()):
        unknown = set(map(general, row)) - names[EVERY_ROW] - names[row["kind"]]
        assert not unknown, (row["kind"], unknown)
