"""What a stack says of itself is what others read."""

from __future__ import annotations

import os
from types import SimpleNamespace

from dialoop.cli.running_stacks import read_announcement
from dialoop_services.config.job import JobConfig
from dialoop_services.stack.layout import Layout, ports_of
from dialoop_services.stack.processes.supervisor import State
from dialoop_services.stack.run_dir import RunDir
from dialoop_services.stack.running import _announce


def test_a_stacks_rest_addresses_are_read_as_it_writes_them(tmp_path):
    config = JobConfig(store="memory")
    run_dir = RunDir(path=tmp_path, run_id="r-1")
    layout = Layout(config=config, run_dir=run_dir, ports=ports_of(config, with_redis=False))
    service = SimpleNamespace(
        spec=SimpleNamespace(name="replay"),
        state=State.STARTING,
        child=SimpleNamespace(pid=17),
        num_restarts=2,
        alarm="",
    )
    supervisor = SimpleNamespace(services=(service,))
    with _announce(layout, supervisor) as announcement:
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
