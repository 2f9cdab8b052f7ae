"""What a stack says of itself is what others read."""

from __future__ import annotations

import os

from dialoop.cli.running_stacks import read_announcement
from dialoop_services.config.job import JobConfig
from dialoop_services.stack.layout import Layout, ports_of
from dialoop_services.stack.run_dir import RunDir
from dialoop_services.stack.running import _announce


def test_a_stacks_rest_addresses_are_read_as_it_writes_them(tmp_path):
    config = JobConfig(store="memory")
    run_dir = RunDir(path=tmp_path, run_id="r-1")
    layout = Layout(config=config, run_dir=run_dir, ports=ports_of(config, with_redis=False))
    with _announce(layout):
        stack = read_announcement(tmp_path, os.getpid())
    assert stack is not None
    assert stack.addresses["inference"] == layout.address("inference")
    assert stack.rest["inference"] == layout.rest_address("inference")
