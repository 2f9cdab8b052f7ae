"""Publishing: what a replica that fails, lies or is away does to it."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from dialoop.clients.channel import Channel
from dialoop.clients.inference import InferenceClient
from dialoop.clients.replay import ReplayClient
from dialoop.episode import UpdateMode
from dialoop.errors import DeadlineExceeded, DialoopError, PreconditionFailed, Unavailable
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion
from dialoop_services.runtime.durable import whole_file
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.learner.learner_state import CapturedWeights, ExportedWeights
from dialoop_services.trainer.publish import publisher as module
from dialoop_services.trainer.publish.publisher import PolicyNotKept, Publisher
from dialoop_services.trainer.settings import TrainerSettings
from safetensors.torch import save_file

from tests.support.waiting import PATIENCE_S, until

CAPTURE_S = 0.01


class FakeLearner:
    """A model whose log-probs are all -1."""

    vocab_size = 64

    def export(self, path: Path, first: Path | None = None) -> ExportedWeights:
        return self.capture(path, first).measured()

    def capture(self, path: Path, first: Path | None = None) -> CapturedWeights:
        time.sleep(CAPTURE_S)
        with whole_file(first or path, sync=False) as file:
            save_file({"w": torch.zeros(1)}, file)
        return CapturedWeights(path=path, first=first)

    def logprobs(self, rows: list[list[int]]) -> list[Any]:
        return [np.full(len(row) - 1, -1.0, dtype=np.float32) for row in rows]


class FakeReplica:
    """A replica that answers probes from a list, errors included, the last one for ever."""

    def __init__(self, *answers: float | DialoopError) -> None:
        self._answers = list(answers)
        self.version: PolicyVersion | None = None
        self.on_load: Callable[[], None] = lambda: None
        self.hangs = False
        self.fault = ""
        self.manifests: list[Any] = []

    async def load_weights(self, manifest: Any, contents: Any = None, *, deadline_s: float) -> None:
        self.on_load()
        self.manifests.append(manifest)
        if self.hangs:
            await asyncio.sleep(deadline_s)
            raise DeadlineExceeded("It hangs.")
        self.version = manifest.policy_version

    async def get_policy(self) -> Any:
        return SimpleNamespace(policy_version=self.version, ready=not self.fault, reason=self.fault)

    async def logprobs(self, rows: list[list[int]], *, deadline_s: float) -> Any:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, DialoopError):
            raise answer
        values = [np.full(len(row) - 1, answer, dtype=np.float32) for row in rows]
        return SimpleNamespace(policy_version=self.version, logprobs=values)


class FakeReplay:
    def __init__(self) -> None:
        self.announced: list[tuple[int, int]] = []

    async def advance_policy(
        self, run: str, version: PolicyVersion, *, max_outstanding_groups: int, **_: Any
    ) -> int:
        self.announced.append((version.number, max_outstanding_groups))
        return 0


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.0)


class FakeRotation:
    """Who the registry says may serve."""

    def __init__(self) -> None:
        self.admitted: list[Any] = []

    async def put(self, replicas: Iterable[Any], *, is_in: bool) -> None:
        for replica in replicas:
            if is_in:
                self.admitted.append(replica)

    def name_of(self, replica: Any) -> str:
        return "a replica"


CREDITS: dict[str, Any] = {"groups_per_train_step": 4, "pipeline_depth": 0}


def publisher(
    run_dir: Path,
    *replicas: FakeReplica | InferenceClient,
    replay: FakeReplay | None = None,
    rotation: FakeRotation | None = None,
    **settings: Any,
) -> Publisher:
    return Publisher(
        TrainerSettings(run_dir=run_dir, **settings),
        cast("Learner", FakeLearner()),
        cast("tuple[InferenceClient, ...]", replicas),
        cast("ReplayClient", replay or FakeReplay()),
        rotation=cast("Any", rotation),
    )


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine until the context is left."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()


def version(number: int, lineage: str = "main") -> PolicyVersion:
    return PolicyVersion(lineage=lineage, number=number)


async def test_a_policy_sent_from_memory_is_live_before_its_file_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, replay, memory = FakeReplica(-1.0), FakeReplay(), tmp_path / "memory"
    made = publisher(tmp_path, replica, replay=replay, shared_memory_dir=memory, **CREDITS)
    in_memory, on_disk = (
        folder / "main-1" / "model.safetensors" for folder in (memory, tmp_path / "policies")
    )
    when: list[tuple[bool, bool, int]] = []
    keep = ExportedWeights.keep

    def note() -> None:
        when.append((in_memory.exists(), on_disk.exists(), len(replay.announced)))

    def keep_noted(weights: ExportedWeights) -> None:
        note()
        keep(weights)

    def look() -> None:
        note()
        made.keep(version(1))  # an evaluation that it played ends just now

    replica.on_load = look
    monkeypatch.setattr(ExportedWeights, "keep", keep_noted)
    captured = await made.capture(version(1))
    published = await made.publish(version(1), captured=captured)
    # The queue has the credits of the live policy before the disk is waited for.
    assert when == [(True, False, 1), (True, False, 2)]
    assert (on_disk.parent / module.KEPT).is_file()
    kept = on_disk.read_bytes()
    assert kept == in_memory.read_bytes()
    assert hashlib.sha256(kept).hexdigest() == replica.manifests[0].sha256
    pointers = (tmp_path / "policies" / name for name in ("latest.json", "kept.json"))
    assert len({pointer.read_text() for pointer in pointers}) == 1
    assert published.capture_s >= CAPTURE_S
    assert published.keep_s > 0
    assert (await made.publish(version(2))).capture_s == 0
    on_disk_first = publisher(tmp_path / "other", FakeReplica(-1.0))
    assert (await on_disk_first.publish(version(1))).keep_s == 0


async def test_a_disk_that_is_full_fails_the_publish_of_a_policy_that_is_live(
    tmp_path: Path,
) -> None:
    """The job ends then: no group of that policy may be acknowledged without its weights."""
    replica, memory = FakeReplica(-1.0), tmp_path / "memory"
    made = publisher(tmp_path, replica, shared_memory_dir=memory)
    (tmp_path / "policies" / "main-1" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(PolicyNotKept, match="could not be written") as caught:
        await made.publish(version(1))
    assert caught.value.reason is Reason.WRITE_FAILED
    assert replica.version == version(1)


@pytest.mark.parametrize("answer", [-5.6, -1.1, math.nan])
async def test_a_replica_that_says_loaded_and_has_other_weights_ends_the_publish(
    tmp_path: Path, answer: float
) -> None:
    """As one did whose transfer had brought nothing: nothing is announced, nobody is asked."""
    replay, sound = FakeReplay(), FakeReplica(-1.0)
    made = publisher(tmp_path, sound, FakeReplica(answer), replay=replay, **CREDITS)
    with pytest.raises(PreconditionFailed, match="has other weights") as caught:
        await made.publish(version(1))
    assert caught.value.reason is Reason.OTHER_WEIGHTS
    assert replay.announced == [(1, 0)], "without credits no task is leased"


async def test_rounding_is_not_taken_for_other_weights(tmp_path: Path) -> None:
    """Of 16 bits .6 to .9 nat at single tokens were seen, and of TF32 a thousandth in the mean."""
    for name, off, bound in (("tf32", 0.02, 1e-4), ("half", 0.45, 0.5), ("gate", 0.45, 3.0)):
        replica = FakeReplica(-1.0 - off)
        made = publisher(tmp_path / name, replica, max_logprob_difference=bound)
        assert (await made.publish(version(1))).max_logprob_difference == pytest.approx(off)
    wide = publisher(tmp_path / "wide", FakeReplica(-1.6), max_logprob_difference=3.0)
    with pytest.raises(PreconditionFailed, match="has other weights"):
        await wide.publish(version(1))


async def test_a_replica_of_the_registry_with_other_weights_gets_no_traffic(tmp_path: Path) -> None:
    """The publish waits for one that holds, and says how far off the others are."""
    replay, rotation = FakeReplay(), FakeRotation()
    made = publisher(
        tmp_path, FakeReplica(-5.6), replay=replay, rotation=rotation, publish_deadline_s=0.2
    )
    with pytest.raises(DeadlineExceeded, match=r"answers 4\.6 nats away") as caught:
        await made.publish(version(1))
    assert caught.value.reason is Reason.PUBLISH_TIMED_OUT
    assert rotation.admitted == []
    assert replay.announced == [(1, 0)]
    both = publisher(
        tmp_path / "both", FakeReplica(-5.6), sound := FakeReplica(-1.0), rotation=rotation
    )
    assert (await both.publish(version(1))).num_replicas == 1
    assert rotation.admitted == [sound]


async def test_weights_that_are_not_finite_are_the_trainers_own_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [np.full(47, math.nan, dtype=np.float32)] * 4
    monkeypatch.setattr(FakeLearner, "logprobs", lambda self, _: rows)
    published = await publisher(tmp_path, FakeReplica(math.nan)).publish(version(1))
    assert published.max_logprob_difference == math.inf


async def test_a_publish_that_nobody_could_be_asked_about_is_not_taken_as_exact(
    tmp_path: Path,
) -> None:
    replica = FakeReplica(Unavailable("restarting"), DeadlineExceeded("slow"), -1.03125)
    published = await publisher(tmp_path, replica).publish(version(1))
    assert published.max_logprob_difference == 0.03125


async def test_a_replica_that_leaves_while_it_is_asked_does_not_end_the_publish(
    tmp_path: Path,
) -> None:
    gone = FakeReplica(Unavailable("gone"))

    def leave() -> None:
        raise PreconditionFailed("It has it.", reason="VERSION_NOT_NEWER")

    async def away() -> Any:
        raise Unavailable("gone")

    gone.on_load = leave
    gone.get_policy = away  # type: ignore[method-assign]
    published = await publisher(tmp_path, gone, FakeReplica(-1.0)).publish(version(1))
    assert published.num_replicas == 1


def policies_in(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "policies").iterdir() if path.is_dir()}


async def publish_all(publishing: Publisher, *versions: PolicyVersion) -> None:
    for number, each in enumerate(versions):
        published = await publishing.publish(each)
        # As after a clock that was set back: files' times say the opposite of the versions.
        os.utime(published.weights.path, (10**9 - number, 10**9 - number))


async def test_the_first_and_the_newest_policies_are_kept_also_across_lineages(
    tmp_path: Path,
) -> None:
    publishing = publisher(tmp_path, FakeReplica(-1.0), keep_policies=2)
    main = [version(number) for number in (1, 2, 3)]
    await publish_all(publishing, *main, version(2, "main.1"), version(3, "main.1"))
    assert policies_in(tmp_path) == {"main-1", "main.1-2", "main.1-3"}


async def test_evaluated_and_every_nth_policy_are_kept_also_after_a_restart(
    tmp_path: Path,
) -> None:
    settings = {"keep_policies": 1, "keep_policies_every": 4}
    publishing = publisher(tmp_path, FakeReplica(-1.0), **settings)
    await publish_all(publishing, version(1), version(2), version(3))
    publishing.keep(version(3))
    publishing.keep(version(99))  # it has been deleted, say
    again = publisher(tmp_path, FakeReplica(-1.0), **settings)
    await publish_all(again, *(version(number) for number in (4, 5, 6, 7)))
    assert policies_in(tmp_path) == {"main-1", "main-3", "main-4", "main-7"}


async def test_milestones_stay_within_their_bound_and_so_does_the_best(tmp_path: Path) -> None:
    settings = {"keep_policies": 1, "keep_policies_every": 0, "keep_milestones": 2}
    publishing = publisher(tmp_path, FakeReplica(-1.0), **settings)
    rewards = {2: 0.5, 3: 0.9, 4: None, 5: 0.1, 6: float("nan"), 7: 0.9, 8: 0.2}
    for number in range(1, 10):
        await publish_all(publishing, version(number))
        if number in rewards:
            publishing.keep(version(number))
            publishing.keep(version(number), rewards[number])
    assert policies_in(tmp_path) == {"main-1", "main-3", "main-7", "main-8", "main-9"}
    again = publisher(tmp_path, FakeReplica(-1.0), **{**settings, "keep_milestones": 1})
    await publish_all(again, version(10))
    assert policies_in(tmp_path) == {"main-1", "main-3", "main-8", "main-10"}


async def test_all_policies_are_kept_only_where_the_settings_say_so(tmp_path: Path) -> None:
    versions = [version(number) for number in range(1, 8)]
    for folder, settings, num_kept in (("all", {"keep_policies": 0}, 7), ("default", {}, 5)):
        await publish_all(publisher(tmp_path / folder, FakeReplica(-1.0), **settings), *versions)
        assert len(policies_in(tmp_path / folder)) == num_kept


async def test_a_replica_that_hangs_holds_a_publish_for_its_deadline_only(tmp_path: Path) -> None:
    hung, well = FakeReplica(-7.0), FakeReplica(-1.0)
    hung.hangs = True
    publish = publisher(tmp_path, hung, well, publish_deadline_s=0.2).publish
    async with asyncio.timeout(PATIENCE_S):
        published = await publish(version(1))
    assert published.num_replicas == 1
    assert published.max_logprob_difference == 0.0


@contextmanager
def deaf_server() -> Iterator[str]:
    """The address of a process that is stopped: the system takes connections, nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


async def test_a_hung_replica_holds_up_one_publish_and_later_ones_not_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    well = FakeReplica(-1.0)
    with deaf_server() as address:
        async with Channel(address) as channel:
            hung = InferenceClient(channel)
            publishing = publisher(tmp_path, hung, well, publish_deadline_s=0.5)
            published = [await publishing.publish(version(n)) for n in (1, 2, 3)]
            seconds = [each.publish_s for each in published]
            assert [each.num_behind for each in published] == [1, 1, 1]
            assert seconds[0] >= 0.5
            assert max(seconds[1:]) < 0.5
            # It goes on, loads the newest policy by itself, and is waited for again.
            back = FakeReplica(-1.0)
            monkeypatch.setattr(hung, "get_policy", back.get_policy)
            monkeypatch.setattr(hung, "load_weights", back.load_weights)
            monkeypatch.setattr(hung, "logprobs", back.logprobs)
            back.version = version(3)
            async with running(publishing.keep_up()):
                await until(lambda: not publishing._behind)
            again = await publishing.publish(version(4))
            assert (again.num_replicas, again.num_behind) == (2, 0)


async def test_a_publish_without_any_replica_ends_at_its_deadline(tmp_path: Path) -> None:
    with deaf_server() as address:
        async with Channel(address) as channel:
            publish = publisher(tmp_path, InferenceClient(channel), publish_deadline_s=0.3).publish
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(DeadlineExceeded, match=r"policy main-1 within 0.3 s") as caught:
                    await publish(version(1))
    assert caught.value.reason is Reason.PUBLISH_TIMED_OUT


async def test_a_publish_says_what_becomes_of_answers_under_way(tmp_path: Path) -> None:
    replica = FakeReplica(-1.0)
    await publisher(tmp_path, replica, update_mode="wait").publish(version(1))
    assert [manifest.update_mode for manifest in replica.manifests] == [UpdateMode.WAIT]


@pytest.mark.parametrize(
    ("fault", "has_restarted", "is_sent"),
    [
        ("", False, False),
        ("ASLEEP", False, False),
        ("WEIGHTS_BAD", False, True),
        ("NOT_READY", True, True),
        ("ASLEEP", True, True),
    ],
)
async def test_a_policy_is_sent_again_to_whoever_lacks_it_and_not_to_whoever_sleeps_on_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    has_restarted: bool,
    is_sent: bool,
) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.005)
    replica = FakeReplica(-1.0)
    shared = {"device_lock": tmp_path / "device.lock", "pipeline_depth": 0}
    publishing = publisher(tmp_path, replica, data_plane="chunks", **shared)
    await publishing.publish(version(1))
    replica.fault = fault
    if has_restarted:
        replica.version = None
    keeping = asyncio.create_task(publishing.keep_up())
    async with asyncio.timeout(PATIENCE_S):
        while is_sent and len(replica.manifests) < 2:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    keeping.cancel()
    assert (len(replica.manifests) > 1) == is_sent


async def test_no_training_task_is_leased_before_the_first_policy_is_live(tmp_path: Path) -> None:
    """An answer begun earlier would span the model directory's version, which is not announced."""
    replica, replay = FakeReplica(-1.0), FakeReplay()
    before_load: list[list[tuple[int, int]]] = []
    replica.on_load = lambda: before_load.append(list(replay.announced))
    made = publisher(tmp_path, replica, replay=replay, groups_per_train_step=4, pipeline_depth=0)
    for number in (1, 2):
        await made.publish(PolicyVersion(lineage="main", number=number))
    assert before_load == [[(1, 0)], [(1, 0), (1, 4), (2, 4)]]
    assert replay.announced[-1] == (2, 4)


async def test_a_replica_catches_up_while_a_quick_trainer_publishes_on_and_another_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself it would load a policy only once that has been the newest for two looks."""
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.005)
    well, late, hung = FakeReplica(-1.0), FakeReplica(-1.0), FakeReplica(-1.0)
    late.hangs = hung.hangs = True
    made = publisher(tmp_path, well, late, hung, publish_deadline_s=0.2)
    assert (await made.publish(version(1))).num_replicas == 1
    late.hangs = False
    hung.on_load = lambda: setattr(made, "_settings", TrainerSettings(run_dir=tmp_path))
    number, num_replicas = 1, 1
    async with running(made.keep_up()), asyncio.timeout(PATIENCE_S):
        await until(lambda: len(hung.manifests) > 1)  # its second load lasts for two minutes
        while num_replicas == 1:
            number += 1
            num_replicas = (await made.publish(version(number))).num_replicas
            await asyncio.sleep(0)
    assert num_replicas == 2
    assert late.version == version(number)
    assert hung.version is None


def told_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == module.__name__]


async def test_a_replica_that_is_away_is_told_once_and_then_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.005)
    away, num_looks = FakeReplica(-1.0), 0

    async def refuse() -> Any:
        nonlocal num_looks
        num_looks += 1
        raise Unavailable("gone")

    publishing = publisher(tmp_path, away, FakeReplica(-1.0))
    answers = away.get_policy
    away.get_policy = refuse  # type: ignore[method-assign]
    publishing._behind.add(cast("InferenceClient", away))
    async with running(publishing.keep_up()):
        await until(lambda: num_looks > 5)
        assert told_by(caplog) == []  # nothing is published that it could lack
        away.get_policy = answers  # type: ignore[method-assign]
        await publishing.publish(version(1))
        away.get_policy, num_looks = refuse, 0  # type: ignore[method-assign]
        publishing._behind.add(cast("InferenceClient", away))
        await until(lambda: num_looks > 20)
        assert told_by(caplog) == ["A replica lacks the newest policy."]
        away.get_policy = answers  # type: ignore[method-assign]
        await until(lambda: len(told_by(caplog)) == 2)
    assert told_by(caplog)[1] == "A replica serves the newest policy."


async def test_a_replica_that_is_still_starting_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica = cast("InferenceClient", FakeReplica(-1.0))
    publishing = publisher(tmp_path, cast("FakeReplica", replica))
    publishing._tokenizer_digest = "digest"
    now = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))

    async def refuse() -> Any:
        raise Unavailable("not yet")

    replica.get_policy = refuse  # type: ignore[method-assign]
    for second in (0, 30, 299):
        now = 1000.0 + second
        assert not await publishing._is_fit(replica)
    assert told_by(caplog) == []
    now = 1301.0
    await publishing._is_fit(replica)
    assert told_by(caplog) == ["A replica does not say what it serves."]
    publishing._note_well(replica)
    assert told_by(caplog)[1:] == ["A replica serves the newest policy."]


async def test_a_failure_of_a_replica_is_told_again_when_it_has_lasted_twice_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica = cast("InferenceClient", FakeReplica(-1.0))
    publishing = publisher(tmp_path, cast("FakeReplica", replica))
    now = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    told_at = []
    for second in range(200):
        now = 1000.0 + second
        caplog.clear()
        publishing._warn(replica, "A replica did not load the policy.", reason="UNAVAILABLE")
        told_at += [second] * len(told_by(caplog))
    assert told_at == [0, 20, 40, 80, 160]
