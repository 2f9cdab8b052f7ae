"""A transfer between devices that fails, hangs or finds a replica that began anew."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from dialoop.clients.weights import WeightsManifest
from dialoop.errors import DeadlineExceeded, InvalidConfig, PreconditionFailed, Unavailable
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion
from dialoop_services.trainer.learner.learner_state import ExportedWeights
from dialoop_services.trainer.publish import vllm_transfer as module

from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MANIFEST = WeightsManifest(policy_version=PolicyVersion(lineage="main", number=1))


class Engine:
    """A trainer engine of vLLM, whose broadcast waits until the replica takes it, or it is shut."""

    made: list[Engine]

    def __init__(self, client: Any, *, hangs: bool) -> None:
        self.source: Any = None
        self.is_shut, self._client, self._hangs = threading.Event(), client, hangs
        self.thread = threading.current_thread()
        client.init_weight_transfer_engine({})

    def send_weights(self) -> None:
        self._client.start_weight_update()
        self._client.update_weights({})
        if self._hangs:
            self.is_shut.wait(PATIENCE_S)
            raise RuntimeError("NCCL error: aborted")
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        self.is_shut.set()


class Replica:
    """A replica that takes every step, or raises at the second one; it notes what came."""

    def __init__(self, *errors: Exception | None) -> None:
        self._errors = list(errors)
        self.phases: list[list[str]] = []

    async def load_weights(self, manifest: Any, steps: Any, *, deadline_s: float) -> None:
        error = self._errors.pop(0) if self._errors else None
        phases: list[str] = []
        self.phases.append(phases)
        try:
            async with asyncio.timeout(deadline_s):
                async for step in steps:
                    phases.append(step.phase.name)
                    if error is not None and len(phases) > 1:
                        raise error
        except TimeoutError as late:
            raise DeadlineExceeded("The replica did not answer in time.") from late


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def make(*hangs: bool) -> tuple[module.VllmTransfer, list[Engine]]:
        left, made = list(hangs), cast("list[Engine]", [])

        def engine(_: str, *, client: Any, **__: Any) -> Engine:
            made.append(Engine(client, hangs=left.pop(0) if left else False))
            return made[-1]

        monkeypatch.setattr(module, "trainer_engine", engine)
        return module.VllmTransfer("ipc", num_workers=1), made

    return make


async def send(plane: module.VllmTransfer, replica: Replica, path: Path, within_s: float) -> None:
    weights = ExportedWeights(path=path, sha256="", num_bytes=0)
    await plane.send(cast("Any", replica), MANIFEST, weights, deadline_s=within_s)


async def test_a_connection_is_kept_from_publish_to_publish(
    plane: Callable[..., Any], tmp_path: Path
) -> None:
    made, engines = plane()
    replica = Replica()
    for _ in range(2):
        await send(made, replica, tmp_path, PATIENCE_S)
    assert replica.phases == [
        ["INIT", "START", "UPDATE", "FINISH"],
        ["START", "UPDATE", "FINISH"],
    ]
    assert len(engines) == 1
    # vLLM makes a CUDA stream of its own the current one of its thread, which is nobody else's.
    assert not engines[0].thread.is_alive()


async def test_a_refusal_ends_the_publish_while_the_broadcast_still_waits(
    plane: Callable[..., Any], tmp_path: Path
) -> None:
    made, engines = plane(True)
    anew = PreconditionFailed("It began anew.", reason=Reason.TRANSFER_NOT_CONNECTED)
    replica, other = Replica(anew), Replica()
    began = time.monotonic()
    with pytest.raises(PreconditionFailed, match="It began anew"):
        await send(made, replica, tmp_path, PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2
    assert engines[0].is_shut.wait(PATIENCE_S), "which ends the broadcast"
    for each in (replica, other):
        await send(made, each, tmp_path, PATIENCE_S)
    assert replica.phases[-1][0] == "INIT", "it connects to the replica anew"
    assert len(engines) == 3


async def test_a_broadcast_that_nobody_takes_is_a_failed_publish_at_its_deadline(
    plane: Callable[..., Any], tmp_path: Path
) -> None:
    made, engines = plane(True)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await send(made, Replica(), tmp_path, 0.3)
    assert time.monotonic() - began < PATIENCE_S / 2
    assert engines[0].is_shut.wait(PATIENCE_S)
    await send(made, Replica(), tmp_path, PATIENCE_S)


async def test_an_error_of_vllm_is_a_failed_publish_with_its_words(
    plane: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = plane()
    real = module.trainer_engine

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(module, "trainer_engine", fails)
    replica = Replica()
    with pytest.raises(Unavailable, match="RuntimeError: CUDA out of memory") as caught:
        await send(made, replica, tmp_path, PATIENCE_S)
    assert caught.value.reason is Reason.TRANSFER_FAILED
    monkeypatch.setattr(module, "trainer_engine", real)
    await send(made, replica, tmp_path, PATIENCE_S)


def test_a_machine_without_a_gpu_has_no_such_plane() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InvalidConfig) as caught:
        module.VllmTransfer("ipc", num_workers=1)
    assert caught.value.reason is Reason.NEEDS_CUDA
