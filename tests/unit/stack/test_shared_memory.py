"""Where the stack lets policies go through memory, and what it leaves there: nothing."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from dialoop_ops.stack.layout import Layout, ports_of
from dialoop_ops.stack.run_dir import RunDir
from dialoop_ops.stack.running import fill_with_latest, memory_for
from dialoop_services.config.file import parse_config
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.runtime.settings import load

Usage = namedtuple("Usage", "total used free")


def run_dir(path: Path) -> RunDir:
    (path / "run" / "model").mkdir(parents=True, exist_ok=True)
    return RunDir(path=path / "run", run_id="run-1")


def test_a_run_has_its_own_folder_in_memory_always_the_same(tmp_path: Path) -> None:
    config = parse_config({}, source="a test")
    folder = memory_for(config, run_dir(tmp_path), memory=tmp_path)
    assert folder is not None
    assert folder.parent == tmp_path
    assert folder == memory_for(config, run_dir(tmp_path), memory=tmp_path)
    assert folder != memory_for(config, run_dir(tmp_path / "b"), memory=tmp_path)


def test_without_memory_or_room_in_it_or_use_for_it_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = parse_config({}, source="a test"), run_dir(tmp_path)
    chunks = parse_config({"inference": {"data_plane": "chunks"}}, source="a test")
    assert memory_for(config, run, memory=tmp_path / "none") is None
    assert memory_for(chunks, run, memory=tmp_path) is None
    (run.model(config) / "model.safetensors").write_bytes(b"\0" * (40 << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 64 << 20))
    assert memory_for(config, run, memory=tmp_path) is None
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 256 << 20))
    assert memory_for(config, run, memory=tmp_path) is not None


def test_the_folder_starts_with_the_newest_policy_alone_and_ends_gone(tmp_path: Path) -> None:
    policies, memory = tmp_path / "policies", tmp_path / "memory"
    for version in ("main-1", "main-2"):
        (policies / version).mkdir(parents=True)
        (policies / version / "model.safetensors").write_text(version)
    (policies / "latest.json").write_text(json.dumps({"path": "main-2/model.safetensors"}))
    (memory / "main-9").mkdir(parents=True)
    with fill_with_latest(memory, policies):
        assert {path.name for path in memory.iterdir()} == {"latest.json", "main-2"}
        assert (memory / "main-2" / "model.safetensors").read_text() == "main-2"
    assert not memory.exists()
    with fill_with_latest(None, policies):
        pass


def test_the_newest_policy_on_the_disk_is_taken_where_a_kill_was_faster_than_the_disk(
    tmp_path: Path,
) -> None:
    policies, memory = tmp_path / "policies", tmp_path / "memory"
    (policies / "main-2").mkdir(parents=True)
    (policies / "main-2" / "model.safetensors").write_text("main-2")
    kept = json.dumps({"number": 2, "path": "main-2/model.safetensors"})
    (policies / "kept.json").write_text(kept)
    (policies / "latest.json").write_text(json.dumps({"path": "main-3/model.safetensors"}))
    with fill_with_latest(memory, policies):
        assert (memory / "latest.json").read_text() == kept
        assert (memory / "main-2" / "model.safetensors").read_text() == "main-2"


@pytest.mark.parametrize(
    ("plane", "transfer"),
    [("shared_memory", ""), ("chunks", ""), ("nccl", "nccl"), ("ipc", "ipc")],
)
def test_both_sides_are_told_of_the_data_plane(plane: str, transfer: str, tmp_path: Path) -> None:
    config = parse_config({"inference": {"data_plane": plane}}, source="a test")
    memory = Path("/memory") if plane == "shared_memory" else None
    ports = ports_of(config, with_redis=False)
    layout = Layout(config=config, run_dir=run_dir(tmp_path), ports=ports, memory=memory)
    inference = load(InferenceSettings, **layout.values_of("inference"))
    # A replica that is started again reads the newest policy there, whatever the plane.
    newest = memory or run_dir(tmp_path).policies.resolve()
    assert (inference.weights_root, inference.weight_transfer) == (newest, transfer)
    trainer = layout.values_of("trainer")
    assert trainer["data_plane"] == plane
    assert trainer.get("shared_memory_dir") == memory
