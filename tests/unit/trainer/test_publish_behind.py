"""A publish beside the next train step: its bytes, its order, and who learns of its failure."""

from __future__ import annotations

import asyncio
import hashlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dialoop.errors import PreconditionFailed
from dialoop_learning.model.weight_writer import WeightsWriter
from dialoop_learning.parallel.parallel_state import gather_buckets
from dialoop_learning.parallel.ranks import ALONE
from dialoop_services.trainer.learner.learner_state import CapturedWeights, LearnerState
from safetensors.torch import load_file, save_file

from tests.support.trainer_world import World, worlds
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with worlds(tmp_path) as make:
        yield make


def weights() -> dict[str, torch.Tensor]:
    """Tensors of several dtypes, one of them larger than a chunk, one transposed, one empty."""
    numbers = torch.arange(300_000, dtype=torch.float32)
    return {
        "large": numbers,
        "turned": numbers[:12].view(3, 4).T,
        "half": numbers[:5].bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
        "counts": torch.arange(3),
        "naïve": numbers[:1].half(),
    }


def write(path: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Write as a learner does; return the names that were gathered for it."""
    state: Any = SimpleNamespace(_ranks=ALONE)
    gathered: list[str] = []

    def buckets() -> Iterator[dict[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            gathered.append(name)
            yield {name: tensor}

    like = {name: tensor.to("meta") for name, tensor in tensors.items()}
    try:
        LearnerState._write(state, path, like, buckets(), {"format": "pt"})
    finally:
        assert gathered == list(tensors)  # other ranks wait for this one in each
    return gathered


def test_the_bytes_are_those_of_safetensors_with_their_digest(tmp_path: Path) -> None:
    tensors, path, copy = weights(), tmp_path / "own" / "w", tmp_path / "memory" / "w"
    write(copy, tensors)
    exported = CapturedWeights(path=path, first=copy).measured()
    assert not path.exists()  # whoever waits for the policy does not wait for the disk
    exported.keep()
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(plain, tmp_path / "theirs", metadata={"format": "pt"})
    readable = tmp_path / "readable"
    readable.touch()
    content = path.read_bytes()
    assert content == (tmp_path / "theirs").read_bytes() == copy.read_bytes()
    assert exported.sha256 == hashlib.sha256(content).hexdigest()
    assert exported.num_bytes == len(content)
    modes = {file.stat().st_mode for file in (path, copy, readable)}
    assert len(modes) == 1  # whoever may read other files of the run may read the weights
    assert torch.equal(load_file(path)["turned"], tensors["turned"])


def test_two_layers_at_most_are_in_memory_on_their_way_to_the_file(tmp_path: Path) -> None:
    names = ["embed", *(f"layers.{n}.{part}" for n in range(6) for part in "ab"), "norm"]
    shards = {name: torch.empty(1) for name in names}
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def change(_: str, tensor: torch.Tensor) -> torch.Tensor:
        whole = torch.ones_like(tensor)
        made.append(weakref.ref(whole))
        return whole

    with WeightsWriter(tmp_path / "w", shards, {}) as writer:
        for bucket in gather_buckets(shards, ALONE, change=change):
            assert len({name[:9] for name in bucket}) == 1
            writer.put(bucket)
            del bucket
            most = max(most, sum(ref() is not None for ref in made))
    assert most <= 4
    assert load_file(tmp_path / "w").keys() == shards.keys()


def test_a_file_that_cannot_be_written_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blocked").write_text("a file where a folder is needed")
    blocked, free = tmp_path / "blocked" / "w", tmp_path / "own" / "w"
    with pytest.raises(PreconditionFailed, match="could not be written"):
        write(blocked, weights())
    write(free, weights())
    with pytest.raises(PreconditionFailed, match="could not be written"):
        CapturedWeights(path=blocked, first=free).measured().keep()

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(PreconditionFailed, match=r"own/late could not be .*: No space left"):
        write(tmp_path / "own" / "late", weights())
    assert [path.name for path in free.parent.iterdir()] == ["w"]


async def test_the_next_step_trains_while_a_publish_waits_for_replicas(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=3, checkpoint_every=2)
    publish = here.publisher.publish

    async def held_at_the_second(policy: Any, **named: Any) -> Any:
        if policy.number == 2:
            here.publisher.gate.clear()
        return await publish(policy, **named)

    here.publisher.publish = held_at_the_second  # type: ignore[method-assign]
    for names in ("ab", "cd", "ef"):
        here.offer(*names)
    async with asyncio.timeout(PATIENCE_S):
        running = asyncio.create_task(here.job.run())
        await until(lambda: here.learner.weights == 2)
        # The second step has ended. Its publish and the checkpoint wait for the first's.
        await asyncio.sleep(0.05)
        assert here.publisher.published == [("main-1", 0), ("main-2", 1)]
        assert here.board.newest is not None
        assert here.board.newest.policy_version.number == 1
        assert [e.policy_version.number for e in here.job.checkpointer.journal.entries()] == [2]
        here.publisher.gate.set()
        await running
    assert here.publisher.published == [(f"main-{n + 1}", n) for n in range(4)]
    trained = [row for row in here.rows if row["kind"] == "train"]
    assert trained[1]["wait_s"] > trained[0]["wait_s"]
    assert [(row["train_step"], row["policy_version"]) for row in trained] == [
        (1, 2),
        (2, 3),
        (3, 4),
    ]


async def test_without_staleness_a_publish_stays_before_the_next_step(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=2, pipeline_depth=0)
    here.offer(*"ab")
    here.offer(*"cd")
    live: list[int] = []

    def note() -> None:
        assert here.board.newest is not None
        live.append(here.board.newest.policy_version.number)

    here.learner.while_training = note
    await here.run()
    assert live == [1, 2]


async def test_a_publish_that_fails_beside_a_step_ends_the_job_and_is_not_saved(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=3, checkpoint_every=1)
    publish = here.publisher.publish

    async def fail(version: Any, **named: Any) -> Any:
        if version.number == 2:
            raise PreconditionFailed("The disk is full.", reason="WRITE_FAILED")
        return await publish(version, **named)

    here.publisher.publish = fail  # type: ignore[method-assign]
    here.offer(*"ab")
    here.offer(*"cd")
    with pytest.raises(ExceptionGroup) as caught:
        await here.run()
    assert caught.group_contains(PreconditionFailed, match="disk is full")
    assert here.checkpoints.newest is not None
    # No checkpoint holds the step: a restarted trainer repeats it from the journal.
    assert [e.policy_version.number for e in here.job.checkpointer.journal.entries()] == [2]
    assert here.replay.acknowledged == []
