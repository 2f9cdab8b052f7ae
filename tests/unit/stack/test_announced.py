"""What a stack says of itself is what others read."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from dialoop.running_stacks import read_announcement
from dialoop_ops.stack.layout import Layout, ports_of
from dialoop_ops.stack.processes.log_stream import LogStream
from dialoop_ops.stack.processes.supervisor import State
from dialoop_ops.stack.run_dir import RunDir
from dialoop_ops.stack.running import Announcement
from dialoop_services.config.job import JobConfig
from rich.console import Console


def layout_in(folder: Path) -> Layout:
    config = JobConfig(store="memory")
    run_dir = RunDir(path=folder, run_id="r-1")
    return Layout(config=config, run_dir=run_dir, ports=ports_of(config, with_redis=False))


class FailingFile(io.StringIO):
    """A terminal, or a file in its place, that takes nothing."""

    number = errno.ENOSPC

    def write(self, text: str) -> int:
        raise OSError(self.number, text)


def test_a_full_disk_ends_neither_what_the_stack_says_nor_the_stack(tmp_path, monkeypatch):
    output = FailingFile()
    log = LogStream(Console(file=output), tmp_path)
    with Announcement(layout_in(tmp_path), SimpleNamespace(services=()), log) as announcement:
        monkeypatch.setattr(Path, "write_text", lambda *_, **__: output.write(""))
        announcement.write()
        assert read_announcement(tmp_path, os.getpid()) is None
        monkeypatch.undo()
        announcement.write()
        assert read_announcement(tmp_path, os.getpid()) is not None
    output.number = errno.EBADF
    with pytest.raises(OSError, match="gone"):
        log.say("stack", "gone")


def test_a_stacks_rest_addresses_are_read_as_it_writes_them(tmp_path):
    layout = layout_in(tmp_path)
    service = SimpleNamespace(
        spec=SimpleNamespace(name="replay"),
        state=State.STARTING,
        child=SimpleNamespace(pid=17),
        num_restarts=2,
        alarm="",
    )
    supervisor = SimpleNamespace(services=(service,))
    log = LogStream(Console(file=io.StringIO()), tmp_path)
    with Announcement(layout, supervisor, log) as announcement:
        announcement.write()
        starting = read_announcement(tmp_path, os.getpid())
        service.state, announcement.is_ready = State.READY, True
        announcement.write()
        stack = read_announcement(tmp_path, os.getpid())
    assert read_announcement(tmp_path, os.getpid()) is None
    announcement.write()  # a task that is late does not bring it back
    assert not (tmp_path / "stack.json").exists()
    assert starting is not None
    assert (starting.addresses, starting.rest) == ({}, {})
    state = {"state": "starting", "pid": 17, "num_restarts": 2, "alarm": ""}
    assert starting.processes == {"replay": state}
    assert stack is not None
    assert stack.run_id == "r-1"
    assert stack.processes == {"replay": state | {"state": "ready"}}
    assert stack.addresses["inference"] == layout.address("inference")
    assert stack.rest["inference"] == layout.rest_address("inference")
