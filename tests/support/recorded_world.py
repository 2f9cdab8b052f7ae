"""Recorded groups in a real queue, a real replica, and trainer processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from dialoop import testing
from dialoop.clients.channel import Channel
from dialoop.clients.replay import AppendItem, ReplayClient
from dialoop.sequences import PolicyVersion, Sequence, Source, sequence_of
from dialoop.trajectory import Group, Stage, Trajectory
from dialoop.v1.replay_service_pb2_grpc import add_ReplayServiceServicer_to_server
from dialoop_learning.model.policy import PolicyModel, load_policy
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_services.hosting import GrpcServer
from dialoop_services.replay.servicer import ReplayServicer
from dialoop_services.replay.store import QueueStore
from dialoop_services.runtime import ServerSettings
from transformers import Qwen2ForCausalLM

from tests.support.inference_world import world as replica_world
from tests.support.redis_server import new_run
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
FIRST = PolicyVersion(lineage="main", number=1)
GROUPS_PER_STEP, GROUP_SIZE = 3, 2
UNIFORM_EVERY = 7
"""Of so many groups one has no signal, so that batches have drops."""


@torch.no_grad()
def record_groups(model_dir: Path, num_groups: int) -> list[Group]:
    """Scored groups that the model in `model_dir` has sampled, always the same.

    `num_groups` of them have a signal; the uniform ones in between come on top.
    """
    policy, sampler = load_policy(model_dir), Qwen2ForCausalLM.from_pretrained(model_dir)
    generator = torch.Generator().manual_seed(0)

    def sample(ids: list[int]) -> int:
        logits = sampler(torch.tensor([ids])).logits[0, -1]
        return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))

    groups: list[Group] = []
    while num_groups:
        groups.append(_group(policy, len(groups), sample))
        num_groups -= not _is_uniform(len(groups) - 1)
    return groups


def _is_uniform(number: int) -> bool:
    return number % UNIFORM_EVERY == 3


def _group(policy: PolicyModel, number: int, sample: Callable[[list[int]], int]) -> Group:
    trajectories = []
    for member in range(GROUP_SIZE):
        row = _sample_sequence(policy, number + member, sample)
        advantage = 0.0 if _is_uniform(number) else 1.0 - 2.0 * member
        trajectories.append(_trajectory(number, member, replace(row, advantage=advantage)))
    return testing.group(*trajectories, group_id=f"t/{number}")


def _sample_sequence(
    policy: PolicyModel, seed: int, sample: Callable[[list[int]], int]
) -> Sequence:
    """A prompt and an answer of lengths of their own."""
    prompt = [5 + (seed * 7 + i) % 50 for i in range(3 + seed % 5)]
    ids = list(prompt)
    for _ in range(2 + seed % 7):
        ids.append(sample(ids))
    answer = ids[len(prompt) :]
    mask = [False] * len(prompt) + [True] * len(answer)
    scores = policy(pack_rows([TokenRow.from_demonstration(ids, mask)])).logprobs
    pieces: list[tuple[list[int], dict[str, Any]]] = [
        (prompt, {"source": Source.PROMPT}),
        (answer, {"source": Source.MODEL, "policy_version": FIRST}),
    ]
    return sequence_of(pieces, logprobs=scores.tolist())


def _trajectory(number: int, member: int, row: Sequence) -> Trajectory:
    return testing.trajectory(
        trajectory_id=f"t/{number}.{member}",
        task_key=str(number),
        environment="recorded",
        turns=(),
        sequences=(row,),
    )


async def fill(replay: ReplayClient, run: str, groups: list[Group]) -> None:
    """Bring recorded groups into the queue the way every group goes."""
    await replay.advance_policy(run, FIRST, max_outstanding_groups=len(groups))
    await replay.offer_tasks(run, [group.task for group in groups])
    tasks = await replay.lease_tasks(run, worker="recorder", max_tasks=len(groups))
    by_task = {group.task.task_id: group for group in groups}
    played = [
        AppendItem(group=by_task[lease.task.task_id], lease_id=lease.lease_id)
        for lease in tasks.leases
    ]
    await replay.append_groups(run, Stage.UNSCORED, played)
    unscored = await replay.lease_groups(
        run, Stage.UNSCORED, worker="recorder", max_groups=len(groups)
    )
    scored = [
        AppendItem(group=by_task[u.group.task.task_id], lease_id=u.lease_id)
        for u in unscored.leases
    ]
    outcomes = await replay.append_groups(run, Stage.SCORED, scored)
    assert not [outcome for outcome in outcomes if outcome.is_rejected], outcomes
    await replay.acknowledge(run, [lease.lease_id for lease in unscored.leases])


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without what differs from run to run."""
    return {k: v for k, v in row.items() if k != "time" and not k.endswith("_s")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A queue of recorded groups and a replica that a trainer may publish to."""

    run: str
    replay: ReplayClient
    replay_address: str
    inference_address: str
    model_dir: Path
    run_dir: Path

    def environment(self, **settings: Any) -> dict[str, str]:
        """The variables of its trainer."""
        defaults = {
            "port": 0,
            "run": self.run,
            "run_dir": self.run_dir,
            "model_dir": self.model_dir,
            "replay_address": self.replay_address,
            "inference_addresses": [self.inference_address],
            "evaluation": {"num_tasks": 0},
            "groups_per_train_step": GROUPS_PER_STEP,
            "max_staleness": 1000,
            "pipeline_depth": 1,
        }
        return {
            f"DIALOOP_TRAINER_{k.upper()}": str(v)
            if isinstance(v, (str, Path))
            else json.dumps(v, default=str)
            for k, v in (defaults | settings).items()
        }

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        text = path.read_text("utf-8") if path.is_file() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    @property
    def train_rows(self) -> list[dict[str, Any]]:
        """Rows of train steps, without times."""
        return [without_times(row) for row in self.metrics if row["kind"] == "train"]


@asynccontextmanager
async def recorded_world(
    directory: Path, model_dir: Path, store: QueueStore, groups: list[Group]
) -> AsyncIterator[Recorded]:
    """A world of its own in `directory`."""
    servicer = ReplayServicer(store, poll_s=0.05)
    server = GrpcServer(ServerSettings(drain_s=1))
    server.add(add_ReplayServiceServicer_to_server, servicer, "dialoop.v1.ReplayService")
    run_dir = directory / "run"
    run_dir.mkdir(parents=True)
    async with AsyncExitStack() as exits:
        exits.push_async_callback(store.close)
        world = replica_world(model_dir, run_dir / "policies")
        replica = await exits.enter_async_context(world)
        await exits.enter_async_context(server)
        exits.callback(servicer.stop_waiting)
        replay = ReplayClient(await exits.enter_async_context(Channel(server.address)))
        run = new_run()
        if groups:
            await fill(replay, run, groups)
        yield Recorded(
            run=run,
            replay=replay,
            replay_address=server.address,
            inference_address=replica.server.address,
            model_dir=model_dir,
            run_dir=run_dir,
        )


class Trainer:
    """One trainer process."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and wait until it is gone."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self.is_alive:
            os.kill(self.pid, number)
        deadline = time.monotonic() + PATIENCE_S
        while self.is_alive:
            assert time.monotonic() < deadline, "it does not end"
            time.sleep(0.002)

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        try:
            return "State:\tZ" not in Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return False

    async def until(self, condition: Callable[[], object], *, every_s: float = 0.01) -> None:
        """Wait for a fact while it runs; its log is told when it ends first."""
        deadline = time.monotonic() + 5 * PATIENCE_S
        while not condition():
            assert self.is_alive, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            await asyncio.sleep(every_s)


class Trainers:
    """Starts trainers: forked from one process that has imported everything, or each afresh."""

    def __init__(self, *, are_forked: bool) -> None:
        self._started: list[subprocess.Popen[str]] = []
        self._trainers: list[Trainer] = []
        self._forker = (
            self._process("tests.support.programs.trainer_fork", {}, None) if are_forked else None
        )

    def start(self, environment: dict[str, str], log: Path) -> Trainer:
        """A new process."""
        if self._forker is None:
            pid = self._process("dialoop_services.trainer", environment, log).pid
        else:
            assert self._forker.stdin is not None
            assert self._forker.stdout is not None
            request = {"environment": environment, "log": str(log)}
            self._forker.stdin.write(json.dumps(request) + "\n")
            self._forker.stdin.flush()
            pid = int(self._forker.stdout.readline())
        self._trainers.append(Trainer(pid, log))
        return self._trainers[-1]

    def _process(
        self, module: str, environment: dict[str, str], log: Path | None
    ) -> subprocess.Popen[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DIALOOP_")}
        python_path = f"{ROOT}:{ROOT / 'client'}:{ROOT / 'services'}"
        paths = {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
        with ExitStack() as exits:
            output: Any = subprocess.PIPE
            if log is not None:
                output = exits.enter_context(log.open("a"))
            process = subprocess.Popen(
                [sys.executable, "-m", module],
                env=inherited | paths | environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=None if log is None else subprocess.STDOUT,
                text=True,
            )
        self._started.append(process)
        return process

    def close(self) -> None:
        """End what still runs."""
        for trainer in self._trainers:
            trainer.kill()
        for process in self._started:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


@contextmanager
def trainers(*, are_forked: bool) -> Iterator[Trainers]:
    """Trainers that are gone when the context is left."""
    starter = Trainers(are_forked=are_forked)
    try:
        yield starter
    finally:
        starter.close()
