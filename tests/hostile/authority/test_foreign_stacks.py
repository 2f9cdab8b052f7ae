"""A run's folder that another user has written gets nobody's token."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dialoop import BlockingDialoop, Dialoop, running_stacks
from dialoop.errors import PermissionDenied
from dialoop.running_stacks import find_stack, require_addresses
from dialoop_ops.cli.main import main
from dialoop_ops.console.live_runs import LiveRuns
from dialoop_ops.now import Watcher

NAMES = ("environment", "inference", "replay", "scorer", "trainer")


@pytest.fixture
def foreign_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose lock is held and whose stack.json is there, both of another user."""
    run_dir = tmp_path / "runs" / "a"
    run_dir.mkdir(parents=True)
    addresses = dict.fromkeys(NAMES, "127.0.0.1:1")
    content = {"pid": os.getpid(), "run_id": "a-1", "addresses": addresses}
    (run_dir / "stack.json").write_text(json.dumps(content))
    with (run_dir.parent / ".a.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(str(os.getpid()))
        lock.flush()
        if os.getuid() == 0:
            os.chown(run_dir / "stack.json", 65534, 65534)
        else:
            own = SimpleNamespace(**{**vars(os), "getuid": lambda: os.getuid() + 1})
            monkeypatch.setattr(running_stacks, "os", own)
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("DIALOOP_TOKEN", raising=False)
        yield run_dir


@pytest.mark.parametrize("kind", [Dialoop, BlockingDialoop])
def test_the_sdk_sends_no_token_there(
    foreign_run: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind.of_run(foreign_run)
    with pytest.raises(PermissionDenied, match=r"has written .*stack\.json") as refused:
        kind.of_run(foreign_run, token="mine")
    assert refused.value.reason == "FOREIGN_STACK"
    monkeypatch.setenv("DIALOOP_TOKEN", "mine")
    with pytest.raises(PermissionDenied):
        kind.of_run(foreign_run)


def test_the_commands_send_no_token_there(
    foreign_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert require_addresses(foreign_run)["trainer"] == "127.0.0.1:1"
    monkeypatch.setenv("DIALOOP_TOKEN", "mine")
    for words in (["status", "a"], ["env", "list", "--run", "a"]):
        assert main(words) != 0
        assert "a token would go" in capsys.readouterr().err


async def test_a_watcher_and_the_console_send_no_token_there(foreign_run: Path) -> None:
    stack = find_stack(foreign_run)
    assert stack is not None
    async with Watcher(stack):
        pass
    with pytest.raises(PermissionDenied):
        await Watcher(stack, token="mine").__aenter__()
    async with LiveRuns() as live:
        for question in (
            live.dead_letters(foreign_run, "mine"),
            live.requeue(foreign_run, "mine", ["g"]),
            live.pause(foreign_run, "mine", is_paused=True),
            live.now(foreign_run, "mine"),
        ):
            with pytest.raises(PermissionDenied):
                await question
