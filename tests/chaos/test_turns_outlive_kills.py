"""kill -9 of everything, over and over: no finished turn is sampled again, no effect doubled.

Tokens are counted where they are sampled, and effects where they happen: outside of what is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from dialoop.clients.channel import Channel
from dialoop.clients.replay import ReplayClient
from dialoop.clients.retry import RetryPolicy
from dialoop.errors import Unavailable
from dialoop.trajectory import Stage
from dialoop_ops.audit.audit import audit
from dialoop_services.trainer.records.rows import as_row

from tests.support.collector_world import MAIN_0, RUN, adds_up
from tests.support.programs.counting import NUM_TURNS
from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.redis
ROOT = Path(__file__).parents[2]
GROUP_SIZE = 4
ONCE = RetryPolicy(max_attempts=1)
ROLES = ("replay", "environment", "inference", "collector")


def free_ports(*names: str) -> dict[str, int]:
    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in names}
    ports = {name: each.getsockname()[1] for name, each in sockets.items()}
    for each in sockets.values():
        each.close()
    return ports


@dataclass
class Fleet:
    """All processes of a run without a trainer; they are killed and started at the same ports."""

    folder: Path
    num_groups: int
    answer_s: float
    ports: dict[str, int] = field(default_factory=lambda: free_ports(*ROLES))
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    num_starts: int = 0

    def __post_init__(self) -> None:
        (self.folder / "counting" / "effects").mkdir(parents=True)
        (self.folder / "redis").mkdir()
        self.redis = RedisServer(self.folder / "redis", fsync="everysec")

    def address(self, role: str) -> str:
        return f"127.0.0.1:{self.ports[role]}"

    def settings(self, role: str) -> dict[str, str]:
        paths = [ROOT, ROOT / "client", ROOT / "services"]
        shared = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PORT": str(self.ports[role])}
        own = {
            # A task whose lease runs out three times before a new turn is given up; so many kills,
            # and a loaded machine, blame nobody here.
            "replay": {"STORE": "redis", "REDIS_URL": self.redis.url, "MAX_ATTEMPTS": "100"},
            "environment": {"ENVIRONMENTS": "tests.support.programs.counting:environment"},
            "inference": {},
            "collector": {
                "RUN": RUN,
                "RUN_DIR": str(self.folder),
                "WORKER": f"c{self.num_starts}",
                "REPLAY_ADDRESS": self.address("replay"),
                "ENVIRONMENT_ADDRESS": self.address("environment"),
                "INFERENCE_ADDRESSES": json.dumps([self.address("inference")]),
                "GROUP_SIZE": str(GROUP_SIZE),
                "MAX_GROUPS_IN_FLIGHT": str(self.num_groups),
                "PAGE_SIZE": "16",
                "LEASE_S": "10",
                "WAIT_S": "0.2",
            },
        }[role]
        prefix = f"DIALOOP_{role.upper()}_"
        named = {f"{prefix}{name}": value for name, value in own.items()}
        named[f"{prefix}PORT"] = str(self.ports[role])
        counting = {"COUNTING": str(self.folder / "counting"), "ANSWER_S": str(self.answer_s)}
        return shared | named | counting

    def start(self) -> None:
        self.redis.start()
        self.num_starts += 1
        for role in ROLES:
            module = f"dialoop_services.{role}"
            if role == "inference":
                module = "tests.support.programs.counting"
            with (self.folder / f"{role}.log").open("ab") as log:
                self.processes[role] = subprocess.Popen(
                    [sys.executable, "-m", module],
                    cwd=ROOT,
                    env=os.environ | self.settings(role),
                    stdout=log,
                    stderr=log,
                )

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
        self.redis.kill()
        for process in self.processes.values():
            process.wait(timeout=PATIENCE_S)

    def lines(self, name: str) -> list[str]:
        path = self.folder / "counting" / name
        return path.read_text().splitlines() if path.exists() else []

    def counts(self, name: str) -> int:
        """Sum of a count over all of the run's collectors."""
        files = self.folder.glob("collector-*.json")
        values = (json.loads(file.read_text())[name] for file in files)
        return sum(sum(v.values()) if isinstance(v, dict) else v for v in values)


async def allow(replay: ReplayClient, num_groups: int) -> None:
    """Give credits, as soon as the queue is up."""
    deadline = time.monotonic() + 8 * PATIENCE_S
    while True:
        try:
            await replay.advance_policy(RUN, MAIN_0, max_outstanding_groups=num_groups)
            return
        except Unavailable:
            assert time.monotonic() < deadline, "the queue does not start"
            await asyncio.sleep(0.2)


async def play_under_kills(fleet: Fleet, num_kills: int, turns_between: int, num_groups: int):
    """Play groups while everything is killed so often; return all members when they are there."""
    async with AsyncExitStack() as exits:
        exits.callback(fleet.kill)
        fleet.start()
        channel = await exits.enter_async_context(Channel(fleet.address("replay"), retry=ONCE))
        replay = ReplayClient(channel)
        for _ in range(num_kills):
            await allow(replay, num_groups)
            num_before = len(fleet.lines("samples"))
            async with asyncio.timeout(8 * PATIENCE_S):
                while len(fleet.lines("samples")) < num_before + turns_between:
                    await asyncio.sleep(0.02)
            fleet.kill()
            fleet.start()
        await allow(replay, num_groups)
        deadline = time.monotonic() + 15 * PATIENCE_S
        while (counts := (await replay.get_stats(RUN)).training).num_groups_unscored < num_groups:
            assert time.monotonic() < deadline, counts
            await asyncio.sleep(0.2)
        assert adds_up(counts)
        assert not counts.num_groups_dropped
        leased = await replay.lease_groups(RUN, Stage.UNSCORED, worker="s", max_groups=num_groups)
        await asyncio.sleep(1.5)  # the collector's counts are on the disk
        return [member for lease in leased.leases for member in lease.group.trajectories]


@pytest.mark.parametrize(
    ("num_agents", "num_kills", "turns_between", "answer_s"),
    [
        (8, 1, 40, 0.2),
        pytest.param(
            64,
            20,
            260,
            1.0,
            marks=[
                pytest.mark.heavy(reason="kills every process twenty times, some minutes"),
                pytest.mark.timeout(2400),
            ],
        ),
    ],
)
async def test_no_finished_turn_is_sampled_again_and_every_effect_happens_once(
    tmp_path, record_property, num_agents, num_kills, turns_between, answer_s
):
    fleet = Fleet(tmp_path, num_groups=num_agents // GROUP_SIZE, answer_s=answer_s)
    num_turns = max(num_agents * NUM_TURNS, num_kills * (turns_between + num_agents))
    num_groups = -(-num_turns // (GROUP_SIZE * NUM_TURNS))
    members = await play_under_kills(fleet, num_kills, turns_between, num_groups)
    assert len(members) == len({member.trajectory_id for member in members})
    assert len(members) == num_groups * GROUP_SIZE
    assert {len(member.turns) for member in members} == {NUM_TURNS}
    assert {failure for member in members for failure in member.failures} == set()

    num_sampled = sum(map(int, fleet.lines("samples")))
    num_again = num_sampled - sum(member.num_model_tokens for member in members)
    record_property("share_sampled_again", num_again / num_sampled)
    most_a_turn = max(map(int, fleet.lines("samples")))
    assert 0 <= num_again <= num_kills * num_agents * most_a_turn
    if num_kills > 1:
        assert num_again / num_sampled <= 0.01

    calls, effects = fleet.lines("calls"), list((tmp_path / "counting" / "effects").iterdir())
    assert len(effects) == len(set(calls)) == sum(member.num_tool_calls for member in members)
    assert len(calls) > len(effects), "steps were taken again, with the ids of the first time"
    assert fleet.counts("num_episodes_continued") > 0
    assert fleet.counts("num_episodes_restarted") == 0

    fate = {"outcome": "trained", "label": "", "train_step": 1, "lineage": MAIN_0.lineage}
    rows = (json.dumps(fate | as_row(member)) for member in members)
    (tmp_path / "audited").mkdir()
    (tmp_path / "audited" / "trajectories.jsonl").write_text("\n".join(rows) + "\n")
    report = audit(tmp_path / "audited")
    assert report.num_rollouts == len(members)
    assert {"retokenised_history", "wrong_mask", "sampling_mismatch"} <= set(report.checked)
    assert report.findings == ()
