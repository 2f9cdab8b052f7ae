"""Measure groups per second through the replay service over gRPC: append, lease, acknowledge.

python benchmarks/replay_throughput.py --groups 2000 --kib 16 --fsync everysec

Starts a redis-server and the service in processes of their own; prints one JSON line, with the CPU
milliseconds a group of the service and of Redis. `--before PATH` measures the service of commit
127deda, checked out there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import numpy as np

if "--before" in sys.argv:
    # The queue of that commit speaks its own protos.
    sys.path.insert(0, f"{sys.argv[sys.argv.index('--before') + 1]}/client")
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import trajectory_pb2 as messages
from dialoop.v1.replay_service_pb2_grpc import ReplayServiceStub

from tests.support.redis_server import RedisServer

RUN = "benchmark"
UNSCORED = messages.STAGE_UNSCORED


def _launch(settings: dict[str, str], before: str) -> tuple[subprocess.Popen[str], str]:
    path = {"PYTHONPATH": f"{before}/client:{before}"} if before else {}
    process = subprocess.Popen(
        [sys.executable, "-m", "services.replay" if before else "dialoop_services.replay"],
        env={**os.environ, **settings, **path},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "address=" in line:
            return process, line.rpartition("address=")[2].strip().rstrip("]")
    raise RuntimeError("the service did not start")


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _group(task: messages.Task, group_id: str, kib: int) -> messages.Group:
    """Return eight trajectories of one sequence."""
    sequence = _sequence(kib * 1024 // 8 // 6)
    return messages.Group(
        group_id=group_id,
        task=task,
        trajectories=[
            messages.Trajectory(
                trajectory_id=f"{group_id}.{i}", group_id=group_id, sequences=[sequence]
            )
            for i in range(8)
        ],
    )


def _sequence(length: int) -> messages.Sequence:
    """Return sampled tokens with their log-probs, in the form of the protos that were loaded."""
    version = messages.PolicyVersion(lineage="main", number=0)
    place = {"length": length, "source": messages.SOURCE_MODEL}
    if not hasattr(messages, "Column"):
        return messages.Sequence(
            token_ids=[1000] * length,
            segments=[messages.Segment(policy_version=version, **place)],
            inference_logprobs=[-0.5] * length,
        )
    ids, logprobs = np.full(length, 1000, "<i4"), np.full(length, -0.5, "<f4")
    columns = [
        messages.Column(name=name, data_type=kind, along=along, shape=[length], data=data.tobytes())
        for name, kind, along, data in (
            ("token_ids", messages.DATA_TYPE_INT32, messages.ALONG_TOKENS, ids),
            ("inference_logprobs", messages.DATA_TYPE_FLOAT32, messages.ALONG_SAMPLED, logprobs),
        )
    ]
    return messages.Sequence(
        columns=columns,
        segments=[messages.Segment(policy_version_index=0, **place)],
        policy_versions=[version],
    )


async def _prepare(
    stub: ReplayServiceStub, num_groups: int, kib: int, before: str
) -> list[pb.AppendItem]:
    tasks = [
        messages.Task(task_id=f"t{i}", purpose=messages.PURPOSE_TRAINING, num_trajectories=8)
        for i in range(num_groups)
    ]
    version = messages.PolicyVersion(lineage="main", number=0)
    await stub.AdvancePolicy(
        pb.AdvancePolicyRequest(run=RUN, policy_version=version, max_outstanding_groups=num_groups)
    )
    await stub.OfferTasks(pb.OfferTasksRequest(run=RUN, tasks=tasks))
    leased = await stub.LeaseTasks(
        pb.LeaseTasksRequest(run=RUN, worker="collector", max_tasks=num_groups)
    )
    return [
        pb.AppendItem(
            group=_group(held.task, f"{held.task.task_id}#1" if before else held.task.task_id, kib),
            lease_id=held.lease_id,
        )
        for held in leased.leases
    ]


async def _groups_per_s(
    work: Callable[[int], Awaitable[None]], num_groups: int, batch: int, parallel: int
) -> float:
    """Return the groups per second of `work(start)` over all batches, `parallel` at a time."""
    starts = iter(range(0, num_groups, batch))

    async def worker() -> None:
        for start in starts:
            await work(start)

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(parallel)))
    return num_groups / (time.perf_counter() - began)


async def _measure(
    address: str, options: argparse.Namespace, pids: dict[str, int]
) -> dict[str, float]:
    limit = [("grpc.max_receive_message_length", 64 << 20)]
    async with grpc.aio.insecure_channel(address, options=limit) as channel:
        stub = ReplayServiceStub(channel)
        items = await _prepare(stub, options.groups, options.kib, options.before)
        leases: list[str] = []

        async def append(start: int) -> None:
            batch = items[start : start + options.batch]
            response = await stub.AppendGroups(
                pb.AppendGroupsRequest(run=RUN, stage=UNSCORED, items=batch)
            )
            assert all(o.status == pb.APPEND_STATUS_APPENDED for o in response.outcomes)

        async def lease(start: int) -> None:
            response = await stub.LeaseGroups(
                pb.LeaseGroupsRequest(
                    run=RUN, stage=UNSCORED, worker="scorer", max_groups=options.batch
                )
            )
            leases.extend(held.lease_id for held in response.leases)

        async def acknowledge(start: int) -> None:
            dropped = [
                pb.AcknowledgeItem(lease_id=held, outcome=pb.OUTCOME_DROPPED, reason="measured")
                for held in leases[start : start + options.batch]
            ]
            await stub.Acknowledge(pb.AcknowledgeRequest(run=RUN, items=dropped))

        rates: dict[str, float] = {}
        for work in (append, lease, acknowledge):
            used = {name: _cpu_s(pid) for name, pid in pids.items()}
            rate = await _groups_per_s(work, options.groups, options.batch, options.parallel)
            rates[f"{work.__name__}_groups_per_s"] = round(rate)
            for name, pid in pids.items():
                cpu_ms = (_cpu_s(pid) - used[name]) / options.groups * 1e3
                rates[f"{work.__name__}_{name}_cpu_ms"] = round(cpu_ms, 3)
        stats = (await stub.GetStats(pb.GetStatsRequest(run=RUN))).stats
        assert stats.training.num_groups_dropped["measured"] == options.groups
        return {"group_bytes": items[0].group.ByteSize(), **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--kib", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--fsync", choices=("everysec", "always", "no"), default="everysec")
    parser.add_argument("--store", choices=("redis", "memory"), default="redis")
    parser.add_argument("--before", default="", help="a checkout of commit 127deda")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        redis = RedisServer(Path(directory), fsync=options.fsync)
        redis.start()
        process, address = _launch(
            {"DIALOOP_REPLAY_STORE": options.store, "DIALOOP_REPLAY_REDIS_URL": redis.url},
            options.before,
        )
        try:
            pids = {"service": process.pid, "redis": redis.pid}
            rates = asyncio.run(_measure(address, options, pids))
        finally:
            process.terminate()
            process.wait(timeout=20)
            redis.stop()
    facts = vars(options) | {"before": bool(options.before), "load_before": round(load_before, 2)}
    print(json.dumps({"benchmark": "replay_throughput", **facts, **rates}))


if __name__ == "__main__":
    main()
