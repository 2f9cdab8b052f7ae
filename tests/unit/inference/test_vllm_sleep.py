"""What a vLLM engine that shares its device is asked, in which order; on CUDA and on a CPU."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see `make setup`")

from dialoop.errors import InternalError, Unavailable
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.vllm_engine.engine import VllmEngine
from dialoop_services.inference.vllm_engine.options import frees_memory_asleep
from dialoop_services.inference.vllm_engine.sleep import SharedDevice, Sleep
from dialoop_services.runtime.device_lock import DeviceLock
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.worker.gpu_worker import Worker

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vllm


class FakeLlm:
    """Says what it was asked; its worker is real where the lock is concerned."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.no_room_for: list[str] = []
        self.errored = False
        self.worker = SharedDevice()
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._pause)

    async def _pause(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode} {clear_cache}")

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.calls.append(f"sleep {level} {mode}")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        self.calls.append(f"wake {tags or 'all'}")
        if (tags or ["all"]) == self.no_room_for:
            raise RuntimeError("CUDA out of memory")
        return True

    async def collective_rpc(self, method: str, args: tuple[str, ...] = ()) -> list[Any]:
        self.calls.append(method.removeprefix("dialoop_"))
        return [getattr(self.worker, method)(*args)]


def sleeping(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, cuda: bool
) -> tuple[FakeLlm, Sleep, DeviceLock]:
    """The engine's sleep, awake, and the trainer's end of the lock."""
    llm, path = FakeLlm(), folder / "device.lock"
    return llm, Sleep(cast("AsyncLLM", llm), lock=path, frees_memory=cuda), DeviceLock(path)


async def test_weights_that_were_dropped_come_back_with_a_load_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llm, sleep, trainer = sleeping(monkeypatch, tmp_path, cuda=True)
    await sleep.hold_device()
    assert not trainer.try_own(), "the worker itself holds it"
    await sleep.begin(keep_weights=False)
    await sleep.begin(keep_weights=False)
    assert trainer.try_own()
    trainer.release()
    with pytest.raises(InternalError):
        await sleep.wake()
    assert sleep.is_asleep
    await sleep.make_room_for_weights()
    assert sleep.is_asleep, "until the new weights are there"
    assert not trainer.try_own()
    await sleep.end()
    await sleep.end()
    assert not sleep.is_asleep
    assert llm.calls == [
        *("hold_device", "sleep 2 abort", "leave_device", "leave_device"),
        *("hold_device", "wake ['weights']", "wake ['kv_cache']"),
    ]


async def test_weights_that_were_kept_need_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llm, sleep, trainer = sleeping(monkeypatch, tmp_path, cuda=True)
    await sleep.begin(keep_weights=True)
    await sleep.wake()
    await sleep.wake()
    assert llm.calls == ["sleep 1 abort", "leave_device", "hold_device", "wake all"]
    assert not trainer.try_own()


async def test_the_worker_does_not_take_what_the_trainer_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llm, sleep, trainer = sleeping(monkeypatch, tmp_path, cuda=True)
    await sleep.begin(keep_weights=True)
    assert trainer.try_own()
    with pytest.raises(InternalError):
        await sleep.wake()
    assert sleep.is_asleep
    assert "wake all" not in llm.calls


@pytest.mark.parametrize("tag", ["weights", "kv_cache", "all"])
async def test_a_wake_that_fails_ends_the_engine_and_its_worker_keeps_the_trainer_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tag: str
) -> None:
    llm, sleep, trainer = sleeping(monkeypatch, tmp_path, cuda=True)
    await sleep.begin(keep_weights=tag == "all")
    llm.no_room_for = [tag]
    with pytest.raises(RuntimeError):
        await wake(sleep, tag)
    assert sleep.is_broken
    calls, llm.no_room_for = list(llm.calls), []
    for again in (wake(sleep, tag), sleep.begin(keep_weights=True)):
        with pytest.raises(Unavailable) as caught:
            await again
        assert caught.value.reason == "NOT_READY"
    assert llm.calls == calls, "what is broken is asked for nothing more"
    assert not trainer.try_own(), "some of the memory may be there still"
    llm.worker.dialoop_leave_device()  # as its end does
    assert trainer.try_own()


async def wake(sleep: Sleep, tag: str) -> None:
    if tag == "all":
        await sleep.wake()
    else:
        await sleep.make_room_for_weights()
        await sleep.end()


async def test_an_engine_that_failed_to_wake_is_dead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llm, sleep, _ = sleeping(monkeypatch, tmp_path, cuda=True)
    engine = VllmEngine.__new__(VllmEngine)
    engine._llm, engine._sleep = cast("AsyncLLM", llm), sleep
    assert engine.is_alive
    await sleep.begin(keep_weights=True)
    assert engine.is_alive
    llm.no_room_for = ["all"]
    with pytest.raises(RuntimeError):
        await sleep.wake()
    assert not engine.is_alive


async def test_a_device_that_is_taken_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, sleep, trainer = sleeping(monkeypatch, tmp_path, cuda=True)
    await sleep.begin(keep_weights=True)
    assert trainer.try_own()
    with pytest.raises(InternalError):
        await sleep.wake()
    trainer.release()
    assert trainer.try_own(), "the worker holds nothing"
    trainer.release()
    await sleep.wake()
    assert not sleep.is_asleep


async def test_asked_to_sleep_again_the_worker_lets_go_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, sleep, trainer = sleeping(monkeypatch, tmp_path, cuda=True)
    await sleep.begin(keep_weights=True)
    await sleep.hold_device()  # and nobody let go
    await sleep.begin(keep_weights=True)
    assert trainer.try_own()


async def test_on_a_cpu_the_core_stands_still_and_vllms_own_sleep_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llm, sleep, trainer = sleeping(monkeypatch, tmp_path, cuda=False)
    await sleep.begin(keep_weights=False)
    assert trainer.try_own()
    trainer.release()
    await sleep.make_room_for_weights()
    await sleep.end()
    await sleep.begin(keep_weights=False)
    await sleep.wake()
    standing_still = ["pause abort True", "leave_device", "hold_device"]
    assert llm.calls == standing_still * 2


def test_vllm_takes_what_it_is_asked() -> None:
    for name, arguments in (
        ("sleep", {"level": 2, "mode": "abort"}),
        ("wake_up", {"tags": ["weights"]}),
    ):
        inspect.signature(getattr(AsyncLLM, name)).bind(None, **arguments)
        arguments.pop("mode", None)
        inspect.signature(getattr(Worker, name)).bind(None, **arguments)
    mixed_in = {name for name in dir(SharedDevice) if not name.startswith("__")}
    assert not any(hasattr(Worker, name) for name in mixed_in), "vLLM refuses extensions that clash"


def test_sleep_mode_is_asked_of_vllm_only_where_it_has_one(tmp_path: Path) -> None:
    from vllm.platforms import current_platform

    can = current_platform.is_sleep_mode_available()
    assert frees_memory_asleep(EngineOptions(device_lock=tmp_path / "lock")) is can
    assert not frees_memory_asleep(EngineOptions())
