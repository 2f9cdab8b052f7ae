"""SFT as a mode: epochs over demonstrations, held-out loss, one publish at the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dialoop.chat import History, Message
from dialoop.errors import InvalidConfig
from dialoop.sequences import PolicyVersion, Sequence, Source, sequence_of
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_ops.stack.report.plot import draw_learning
from dialoop_services.runtime.exit_reason import ExitReason
from dialoop_services.trainer.__main__ import _builder, with_steps_of
from dialoop_services.trainer.data.demonstrations import (
    Demonstration,
    DemonstrationSet,
    WarmStartBatches,
    demonstration_set,
    num_tokens_to_train,
    warm_start_batches,
)
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings

from tests.support.trainer_world import World, worlds

VERSION = PolicyVersion(lineage="demonstration", number=0)


def show(which: int, generator: object) -> Demonstration:
    return Demonstration(history=History((Message(role="user", content=str(which)),)))


def row(shown: Demonstration) -> tuple[Sequence, ...]:
    sampled = {"source": Source.MODEL, "policy_version": VERSION}
    ids = [int(shown.history[0].content)]
    return (sequence_of([([1], {"source": Source.PROMPT}), (ids, sampled)], logprobs=[0.0]),)


def numbers(size: int = 5, *, heldout: int = 0) -> DemonstrationSet:
    """Demonstrations that are their own numbers, two a batch."""
    kept = tuple(row(show(100 + n, None))[0] for n in range(heldout))
    return DemonstrationSet(size=size, show=show, render=row, batch_size=2, seed=0, heldout=kept)


def ids(batch: list[Sequence]) -> list[int]:
    return [int(sequence.token_ids[1]) for sequence in batch]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with worlds(tmp_path, mode="sft") as make:
        yield make


def metrics(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    lines = (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()
    return [row for line in lines if (row := json.loads(line))["kind"] == kind]


def test_an_epoch_shows_everything_once_and_the_next_in_another_order() -> None:
    demonstrations = numbers()
    assert demonstrations.steps_per_epoch == 3
    epochs = [
        [ids(demonstrations.batch(step)) for step in range(start, start + 3)] for start in (0, 3)
    ]
    assert [sorted(n for batch in epoch for n in batch) for epoch in epochs] == [
        [0, 1, 2, 3, 4]
    ] * 2
    assert epochs[0] != epochs[1]
    assert [demonstrations.epoch_of(step) for step in (2, 3)] == [0, 1]


async def test_sft_trains_epochs_and_publishes_at_the_end(
    world: Callable[..., World], tmp_path: Path
) -> None:
    here = world(supervised=numbers(), num_steps=6)
    await here.run()
    assert [ids(batch) for batch in here.learner.supervised] == [
        ids(numbers().batch(step)) for step in range(6)
    ]
    assert here.publisher.published == [("main-1", 0), ("main-2", 6)]
    rows = metrics(tmp_path, "train")
    assert [row["epoch"] for row in rows] == [0, 0, 0, 1, 1, 1]
    draw_learning(tmp_path / "metrics.jsonl", tmp_path / "learning.png")
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")


async def test_a_restarted_sft_goes_on_with_the_batches_it_has_not_trained(
    world: Callable[..., World],
) -> None:
    here = world(supervised=numbers(), num_steps=6, checkpoint_every=2)
    step = here.learner.sft_step

    def kill(batch: Any) -> Any:
        if len(here.learner.supervised) == 5:
            raise KeyError("killed")
        return step(batch)

    here.learner.sft_step = kill  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup):
        await here.run()
    again = world(supervised=numbers(), num_steps=6)
    await again.run()
    assert [ids(batch) for batch in again.learner.supervised] == [
        ids(numbers().batch(step)) for step in (4, 5)
    ]


async def test_the_loss_of_held_out_demonstrations_is_taken_and_can_stop_it(
    world: Callable[..., World], tmp_path: Path
) -> None:
    here = world(
        supervised=numbers(heldout=3), num_steps=9, evaluation={"every": 2, "stop_at": -0.2}
    )
    await here.run()
    losses = [(row["train_step"], row["loss"]) for row in metrics(tmp_path, "heldout")]
    assert losses == [(2, 1 / 3), (4, 1 / 5)]
    result = json.loads((tmp_path / "trainer.json").read_text("utf-8"))
    assert result["heldout_losses"] == {"2": 1 / 3, "4": 1 / 5}
    assert "reached" in result["stopped_early"]


async def test_a_killed_sft_remembers_what_its_checkpoint_was_evaluated_to(
    world: Callable[..., World],
) -> None:
    evaluation = {"every": 2, "stop_without_gain": 9}
    settings = {"num_steps": 6, "checkpoint_every": 2, "evaluation": evaluation}
    here = world(supervised=numbers(heldout=2), **settings)
    step, losses = here.learner.sft_step, iter([1.0, 2.0])

    def kill(batch: Any) -> Any:
        if len(here.learner.supervised) == 5:
            raise KeyError("killed")
        return step(batch)

    here.learner.sft_step = kill  # type: ignore[method-assign]
    here.learner.heldout_loss = lambda rows: (next(losses), len(rows))  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup):
        await here.run()
    again = world(supervised=numbers(heldout=2), **settings)
    await again.run()
    progress = again.job.state
    assert progress.heldout_losses == {"2": 1.0, "4": 2.0, "6": 1 / 7}
    assert (progress.best_evaluation, progress.num_evaluations_without_gain) == (-1.0, 1)


async def test_a_killed_sft_remembers_what_tasks_were_evaluated_to_while_it_trained(
    world: Callable[..., World],
) -> None:
    settings = {"num_steps": 5, "checkpoint_every": 2, "evaluation": {"every": 2, "num_tasks": 1}}
    here = world(supervised=numbers(), **settings)
    here.evaluator.rewards = [0.5]
    step = here.learner.sft_step

    def kill(batch: Any) -> Any:
        if here.job.state.best_evaluation is not None:
            raise KeyError("killed")
        return step(batch)

    here.learner.sft_step = kill  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup):
        await here.run()
    again = world(supervised=numbers(), **settings)
    await again.run()
    assert again.job.state.best_evaluation == 0.5


@pytest.mark.parametrize("checkpoint_every", [2, 3])
async def test_an_evaluation_that_a_kill_cut_short_is_run_again_by_the_next_sft(
    world: Callable[..., World], tmp_path: Path, checkpoint_every: int
) -> None:
    settings = {
        "num_steps": 5,
        "checkpoint_every": checkpoint_every,
        "evaluation": {"every": 2, "num_tasks": 1},
    }
    here = world(supervised=numbers(), **settings)
    evaluate, begun = here.evaluator.evaluate, asyncio.Event()

    async def hold(plan: Any, **options: Any) -> Any:
        if plan.label == "running":
            begun.set()
            await asyncio.Event().wait()
        return await evaluate(plan, **options)

    here.evaluator.evaluate = hold  # type: ignore[method-assign]
    running = asyncio.create_task(here.run())
    await begun.wait()
    running.cancel()
    await asyncio.wait([running])
    again = world(supervised=numbers(), **settings)
    again.evaluator.rewards = [0.25, 0.5]
    await again.run()
    rows = [row for row in metrics(tmp_path, "evaluation") if row["label"] == "running"]
    assert [row["due_train_step"] for row in rows] == [2, 4]
    assert again.job.state.best_evaluation == 0.5
    assert not again.job.state.due_evaluations


async def test_where_tasks_are_evaluated_on_each_evaluation_has_a_policy_of_its_own(
    world: Callable[..., World],
) -> None:
    here = world(supervised=numbers(), num_steps=5, evaluation={"every": 2, "num_tasks": 4})
    here.evaluator.rewards = [0.1, 0.2]
    await here.run()
    assert here.evaluator.num_asked == 2
    assert [weights for _, weights in here.publisher.published] == [0, 2, 4, 5]


def test_nothing_but_evaluations_is_played_while_sft_trains() -> None:
    assert TrainerSettings(mode="sft").max_outstanding_groups == 0


def test_nothing_is_played_where_nothing_is_trained() -> None:
    assert TrainerSettings(num_steps=0).max_outstanding_groups == 0


def test_depth_two_keeps_three_batches_outstanding() -> None:
    settings = TrainerSettings(pipeline_depth=2, groups_per_train_step=8)
    assert settings.max_outstanding_groups == 24


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


def write_chats(path: Path, count: int) -> Path:
    lines = (
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": str(n)}]}
        for n in range(count)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def test_a_file_is_split_by_its_seed_into_what_is_trained_and_what_is_held_out(
    tmp_path: Path, model_dir: Path
) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 20)
    sft = {"file": str(path), "heldout_fraction": 0.25, "batch_size": 4, "num_epochs": 3}
    settings = TrainerSettings(model_dir=model_dir, mode="sft", sft=sft)
    demonstrations = demonstration_set(settings, _builder(settings))
    assert (demonstrations.size, len(demonstrations.heldout)) == (15, 5)
    assert with_steps_of(settings, demonstrations).num_steps == 12
    trained = {tuple(s.token_ids) for step in range(4) for s in demonstrations.batch(step)}
    assert len(trained) == 15
    assert trained.isdisjoint({tuple(s.token_ids) for s in demonstrations.heldout})


def test_a_file_of_its_own_may_be_held_out(tmp_path: Path, model_dir: Path) -> None:
    train, heldout = (
        write_chats(tmp_path / name, n) for name, n in (("a.jsonl", 3), ("b.jsonl", 2))
    )
    settings = TrainerSettings(
        model_dir=model_dir, mode="sft", sft={"file": str(train), "heldout_file": str(heldout)}
    )
    demonstrations = demonstration_set(settings, _builder(settings))
    assert (demonstrations.size, len(demonstrations.heldout)) == (3, 2)


def test_the_environment_demonstrates_each_task_of_its_train_split(model_dir: Path) -> None:
    settings = TrainerSettings(model_dir=model_dir, mode="sft", environment="arithmetic")
    demonstrations = demonstration_set(settings, _builder(settings))
    assert demonstrations.size > 1000
    assert not demonstrations.heldout
    first, again = (demonstrations.batch(0) for _ in range(2))
    assert [tuple(s.token_ids) for s in first] == [tuple(s.token_ids) for s in again]


def test_a_demonstration_of_the_environments_own_that_fits_no_row_is_named_by_its_task(
    model_dir: Path,
) -> None:
    """As InvalidConfig, whose owner is the user: no restart of the trainer mends it."""
    settings = TrainerSettings(
        model_dir=model_dir, environment="arithmetic", oversize="error", max_row_tokens=16
    )
    settings = settings.model_copy(update={"max_row_tokens": 8})
    said = r"The demonstration of task \S+ of arithmetic has \d+ tokens, more than the"
    for batches in (
        warm_start_batches(settings, _builder(settings)),
        iter(map(demonstration_set(settings, _builder(settings)).batch, (0,))),
    ):
        with pytest.raises(InvalidConfig, match=said) as caught:
            next(batches)
        assert caught.value.reason == "SEQUENCE_TOO_LONG"


@pytest.mark.parametrize("name", ["file", "heldout_file"])
def test_a_demonstration_that_fits_no_row_is_named_by_its_line_before_any_step(
    tmp_path: Path, model_dir: Path, name: str
) -> None:
    short, long = write_chats(tmp_path / "short.jsonl", 3), tmp_path / "long.jsonl"
    lines = short.read_text("utf-8").splitlines()
    lines[1] = lines[1].replace("?", "how much is it? " * 40)
    long.write_text("\n" + "\n".join(lines), "utf-8")  # an empty line counts as one
    sft = {"file": str(short), name: str(long)}
    settings = TrainerSettings(model_dir=model_dir, mode="sft", sft=sft, max_row_tokens=128)
    with pytest.raises(InvalidConfig, match=r"line 3 of .*long\.jsonl has \d+ tokens") as caught:
        demonstration_set(settings, _builder(settings))
    assert caught.value.reason == "SEQUENCE_TOO_LONG"


@pytest.mark.parametrize("name", ["file", "heldout_file"])
@pytest.mark.parametrize(("oversize", "dropped"), [("drop", (2, 3)), ("truncate", (2,))])
def test_a_demonstration_of_which_nothing_is_left_to_train_is_dropped_by_its_line(
    tmp_path: Path,
    model_dir: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    oversize: str,
    dropped: tuple[int, ...],
) -> None:
    """Its prompt alone fills the row: as the only one of a batch it would fail every step."""
    short, long = write_chats(tmp_path / "short.jsonl", 3), tmp_path / "long.jsonl"
    lines = short.read_text("utf-8").splitlines()
    lines[1] = lines[1].replace("?", "how much is it? " * 40)
    lines[2] = lines[2].replace('"2"', '"' + "2" * 400 + '"')
    long.write_text("\n".join(lines), "utf-8")
    sft = {"file": str(short), "heldout_fraction": 0.0, "batch_size": 1, name: str(long)}
    options = {"sft": sft, "oversize": oversize, "max_row_tokens": 128}
    settings = TrainerSettings.model_validate({"model_dir": model_dir, "mode": "sft", **options})
    demonstrations = demonstration_set(settings, _builder(settings))
    assert len(
        demonstrations.heldout if name == "heldout_file" else range(demonstrations.size)
    ) == 3 - len(dropped)
    for warning, number in zip(caplog.messages, dropped, strict=True):
        assert f"line {number} of {long}, " in warning
    learner = Learner(settings)
    for step in range(demonstrations.steps_per_epoch):
        learner.sft_step(learner.rows_to_imitate(demonstrations.batch(step)))
    long.write_text(lines[1], "utf-8")
    with pytest.raises(InvalidConfig, match=r"No demonstration of .*long\.jsonl") as caught:
        demonstration_set(settings, _builder(settings))
    assert caught.value.reason == "SEQUENCE_TOO_LONG"


def test_a_warm_start_never_draws_what_leaves_nothing_to_train(
    tmp_path: Path, model_dir: Path
) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 2)
    lines = path.read_text("utf-8").splitlines()
    path.write_text("\n".join((lines[0], lines[1].replace("?", "why? " * 100))), "utf-8")
    options = {"warm_start": {"file": str(path), "num_steps": 1}, "max_row_tokens": 128}
    settings = TrainerSettings.model_validate({"model_dir": model_dir, **options})
    with pytest.raises(InvalidConfig, match=r"line 2 of .* has \d+ tokens"):
        warm_start_batches(settings, _builder(settings))
    settings = settings.model_copy(update={"oversize": "truncate"})
    demonstrations = warm_start_batches(settings, _builder(settings))
    drawn = [row for _ in range(3) for row in next(demonstrations)]
    assert max(len(row.token_ids) for row in drawn) < 128


@pytest.mark.parametrize(("oversize", "num_tokens"), [("truncate", 15 + 4), ("drop", 4)])
async def test_tokens_that_are_cut_off_are_not_counted_as_trained(
    world: Callable[..., World], tmp_path: Path, oversize: str, num_tokens: int
) -> None:
    both = DemonstrationSet(size=2, show=show, render=one_answer, batch_size=2, seed=0)
    options = {"oversize": oversize, "max_row_tokens": 16}
    await world(supervised=both, num_steps=1, **options).run()
    (row,) = metrics(tmp_path, "train")
    assert (row["num_trained_tokens"], row["num_oversize"]) == (num_tokens, 1)


def one_answer(shown: Demonstration) -> tuple[Sequence, ...]:
    """Of demonstration 0 an answer that no row of 16 tokens holds."""
    answer = [7] * (40 if shown.history[0].content == "0" else 4)
    sampled = {"source": Source.MODEL, "policy_version": VERSION}
    pieces: list[tuple[list[int], dict[str, Any]]] = [
        ([1], {"source": Source.PROMPT}),
        (answer, sampled),
    ]
    return (sequence_of(pieces, logprobs=[0.0] * len(answer)),)


def fits(sequence: Sequence) -> bool:
    settings = TrainerSettings(mode="sft", oversize="drop", max_row_tokens=16)
    return num_tokens_to_train(sequence, settings) > 0


async def test_a_batch_of_one_that_is_too_long_trains_the_next_that_is_not(
    world: Callable[..., World], tmp_path: Path
) -> None:
    """What an environment demonstrates is rendered when a batch needs it, and not before."""
    demonstrations = DemonstrationSet(
        size=3, show=show, render=one_answer, batch_size=1, seed=0, trains=fits
    )
    lengths = [[len(s.token_ids) for s in demonstrations.batch(step)] for step in range(3)]
    assert sorted(lengths) == [[5], [5], [41, 5]]
    assert lengths == [[len(s.token_ids) for s in demonstrations.batch(step)] for step in range(3)]
    options = {"oversize": "drop", "max_row_tokens": 16}
    await world(supervised=demonstrations, num_steps=3, **options).run()
    rows = metrics(tmp_path, "train")
    assert [row["num_trained_tokens"] for row in rows] == [4, 4, 4]
    assert sorted(row["num_oversize"] for row in rows) == [0, 0, 1]


async def test_demonstrations_that_are_all_too_long_end_with_the_cause(
    world: Callable[..., World],
) -> None:
    parts = {"size": 1, "show": show, "render": one_answer, "seed": 0, "trains": fits}
    with pytest.raises(ExceptionGroup) as caught:
        await world(supervised=DemonstrationSet(batch_size=2, **parts), num_steps=1).run()
    told = ExitReason.of(caught.value)
    assert (told.reason, told.is_final) == ("SEQUENCE_TOO_LONG", True), "no restart mends it"
    assert "the shortest has 41 tokens" in told.message
    with pytest.raises(InvalidConfig, match="the shortest has 41 tokens"):
        next(WarmStartBatches(batch_size=2, **parts))


def test_a_warm_start_goes_on_where_it_was_whatever_was_too_long() -> None:
    parts = {"size": 3, "show": show, "render": one_answer, "seed": 1, "trains": fits}
    batches = WarmStartBatches(batch_size=1, **parts)
    first = [[len(s.token_ids) for s in next(batches)] for _ in range(12)]
    assert any(41 in lengths for lengths in first)
    assert all(5 in lengths for lengths in first)
    resumed = WarmStartBatches(batch_size=1, **parts)
    resumed.skip(8)
    assert [[len(s.token_ids) for s in next(resumed)] for _ in range(4)] == first[8:]


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, model_dir: Path) -> None:
    settings = TrainerSettings(
        model_dir=model_dir, mode="sft", sft={"file": str(tmp_path / "none.jsonl")}
    )
    with pytest.raises(InvalidConfig, match="none"):
        demonstration_set(settings, _builder(settings))
