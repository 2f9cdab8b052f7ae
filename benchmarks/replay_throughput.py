"""Measure groups per second through the replay service over gRPC: append, lease, acknowledge.

python -m benchmarks.replay_throughput --groups 2000 --tokens 512 --fsync everysec
python -m benchmarks.replay_throughput --groups 400 --tokens 512 --batch 8 --parallel 8 --rounds 5 \
    --before PATH --raw --atropos PYTHON

A group is eight trajectories of `--tokens` sampled tokens, with log-probs and messages. The ids are
drawn from a vocabulary of 151,936, as that of Qwen3: the protos of 127deda write small ids shorter.

Starts a redis-server and the service in processes of their own; prints one JSON line, with the CPU
milliseconds a group of the service and of Redis. `--before PATH` measures the service of commit
127deda, checked out there. `--raw` appends the same bytes with XADD from as many clients, without
the service, to a stream of the same redis-server, for two seconds: Redis writes its log to the disk
once a second, and a tenth of a second with or without that differs by half. `--atropos PYTHON`
sends the same groups to the API server of atroposlib, which keeps them in memory, in an environment
that has it. `--waiting N` leases 64 groups while N wait, of one short trajectory each, and prints
the CPU milliseconds a lease.

All but `--waiting` measure the second pass of their processes: the first one is for their memory.

`--rounds N` measures the service and each of these in turn, N times, and prints the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import httpx
import numpy as np
import numpy.typing as npt
import redis.asyncio

if "--before" in sys.argv and "--rounds" not in sys.argv:
    # The queue of that commit speaks its own protos.
    sys.path.insert(0, f"{sys.argv[sys.argv.index('--before') + 1]}/client")
from dialoop.v1 import chat_pb2 as chat
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import trajectory_pb2 as messages
from dialoop.v1.replay_service_pb2_grpc import ReplayServiceStub

from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import cpu_ns, processor
from tests.support.redis_server import RedisServer

RUN = "benchmark"
UNSCORED = messages.STAGE_UNSCORED
VOCABULARY = 151_936
# Seconds of XADD.
_RAW_S = 2.0
# Redis would rewrite its append-only file beside some measurements and not beside others.
_NO_REWRITE = {"auto-aof-rewrite-percentage": "0"}


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


@functools.cache
def _members(num_tokens: int) -> tuple[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]], ...]:
    """Return the ids and log-probs of a group's eight trajectories."""
    random = np.random.default_rng(0)
    return tuple(
        (
            random.integers(0, VOCABULARY, num_tokens, dtype="<i4"),
            -random.exponential(0.5, num_tokens).astype("<f4"),
        )
        for _ in range(8)
    )


def _group(task: messages.Task, group_id: str, num_tokens: int) -> messages.Group:
    """Return eight trajectories of a question and an answer of so many tokens."""
    history = [
        chat.Message(role="user", content="A question of a few words."),
        chat.Message(role="assistant", content="word" * num_tokens),
    ]
    return messages.Group(
        group_id=group_id,
        task=task,
        trajectories=[
            messages.Trajectory(
                trajectory_id=f"{group_id}.{i}",
                group_id=group_id,
                sequences=[_sequence(ids, logprobs)],
                history=chat.History(messages=history),
            )
            for i, (ids, logprobs) in enumerate(_members(num_tokens))
        ],
    )


def _sequence(ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> messages.Sequence:
    """Return sampled tokens with their log-probs, in the form of the protos that were loaded."""
    length = len(ids)
    version = messages.PolicyVersion(lineage="main", number=0)
    place = {"length": length, "source": messages.SOURCE_MODEL}
    if not hasattr(messages, "Column"):
        return messages.Sequence(  # type: ignore[call-arg]
            token_ids=ids.tolist(),
            segments=[messages.Segment(policy_version=version, **place)],  # type: ignore[call-arg]
            inference_logprobs=logprobs.tolist(),
        )
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
    stub: ReplayServiceStub, prefix: str, num_groups: int, num_tokens: int, before: str
) -> list[pb.AppendItem]:
    tasks = [
        messages.Task(task_id=f"{prefix}{i}", purpose=messages.PURPOSE_TRAINING, num_trajectories=8)
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
            group=_group(
                held.task, f"{held.task.task_id}#1" if before else held.task.task_id, num_tokens
            ),
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
    """Return the rates and CPU times of a second pass of groups; the first one warms up memory."""
    limit = [("grpc.max_receive_message_length", 64 << 20)]
    async with grpc.aio.insecure_channel(address, options=limit) as channel:
        stub = ReplayServiceStub(channel)
        for prefix in ("warm", "t"):
            items = await _prepare(stub, prefix, options.groups, options.tokens, options.before)
            rates = await _pass(channel, items, options, pids)
        stats = (await stub.GetStats(pb.GetStatsRequest(run=RUN))).stats
        assert stats.training.num_groups_dropped["measured"] == 2 * options.groups
        return {"group_bytes": items[0].group.ByteSize(), **rates}


async def _pass(
    channel: grpc.aio.Channel,
    items: list[pb.AppendItem],
    options: argparse.Namespace,
    pids: dict[str, int],
) -> dict[str, float]:
    """Append, lease and acknowledge the groups; requests are serialised beforehand, as for XADD."""
    stub = ReplayServiceStub(channel)
    requests = {
        start: pb.AppendGroupsRequest(
            run=RUN, stage=UNSCORED, items=items[start : start + options.batch]
        ).SerializeToString()
        for start in range(0, options.groups, options.batch)
    }
    append_groups = channel.unary_unary(
        "/dialoop.v1.ReplayService/AppendGroups",
        response_deserializer=pb.AppendGroupsResponse.FromString,
    )
    leases: list[str] = []

    async def append(start: int) -> None:
        response = await append_groups(requests[start])
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
        used = {name: cpu_ns(pid) for name, pid in pids.items()}
        rate = await _groups_per_s(work, options.groups, options.batch, options.parallel)
        rates[f"{work.__name__}_groups_per_s"] = round(rate)
        for name, pid in pids.items():
            cpu_ms = (cpu_ns(pid) - used[name]) / options.groups / 1e6
            rates[f"{work.__name__}_{name}_cpu_ms"] = round(cpu_ms, 3)
    return rates


async def _append_raw(url: str, options: argparse.Namespace, pid: int) -> dict[str, float]:
    """Return the groups per second of XADD alone, and its CPU milliseconds a group of Redis."""
    task = messages.Task(task_id="t", purpose=messages.PURPOSE_TRAINING, num_trajectories=8)
    content = _group(task, "t", options.tokens).SerializeToString()
    async with redis.asyncio.Redis.from_url(url) as client:

        async def append(_: int) -> None:
            await client.xadd("raw", {"b": content})

        await _groups_per_s(append, options.groups, 1, options.parallel)
        num_groups, took_s, used_ns = 0, 0.0, 0
        while took_s < _RAW_S:
            await client.delete("raw")
            before = cpu_ns(pid)
            rate = await _groups_per_s(append, options.groups, 1, options.parallel)
            used_ns += cpu_ns(pid) - before
            num_groups, took_s = num_groups + options.groups, took_s + options.groups / rate
    cpu_ms = round(used_ns / num_groups / 1e6, 3)
    return {"xadd_groups_per_s": round(num_groups / took_s), "xadd_redis_cpu_ms": cpu_ms}


def _atropos_group(num_tokens: int) -> dict[str, list[object]]:
    """Return the tokens of the group that `_group` makes, as atroposlib's server takes them."""
    ids = [ids.tolist() for ids, _ in _members(num_tokens)]
    return {
        "tokens": ids,
        "masks": ids,
        "inference_logprobs": [logprobs.tolist() for _, logprobs in _members(num_tokens)],
        "scores": [0.0] * 8,
    }


def _atropos(options: argparse.Namespace) -> dict[str, float]:
    """Return the groups per second of atroposlib's server, and its CPU milliseconds a group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = [options.atropos, "-m", "uvicorn", "atroposlib.api.server:app", "--log-level", "error"]
    path = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen([*app, "--host", "127.0.0.1", "--port", str(port)], env=path)
    try:
        return asyncio.run(_append_atropos(options, f"http://127.0.0.1:{port}", process.pid))
    finally:
        process.terminate()
        process.wait(timeout=20)


async def _append_atropos(options: argparse.Namespace, url: str, pid: int) -> dict[str, float]:
    body = json.dumps([_atropos_group(options.tokens)] * options.batch)
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await _register(client)

        async def append(_: int) -> None:
            answer = await client.post("/scored_data_list", content=body, headers=headers)
            answer.raise_for_status()

        await _groups_per_s(append, options.groups, options.batch, options.parallel)
        used = cpu_ns(pid)
        rate = await _groups_per_s(append, options.groups, options.batch, options.parallel)
        cpu_ms = (cpu_ns(pid) - used) / options.groups / 1e6
    return {"append_groups_per_s": round(rate), "append_server_cpu_ms": round(cpu_ms, 3)}


async def _register(client: httpx.AsyncClient) -> None:
    """Wait for atroposlib's server, and begin a run on it."""
    numbers = ("batch_size", "max_token_len", "save_checkpoint_interval", "starting_step")
    registration = {**dict.fromkeys((*numbers, "num_steps"), 1), "checkpoint_dir": ""}
    names = {"wandb_group": "g", "wandb_project": "p"}
    for _ in range(200):
        try:
            (await client.post("/register", json=registration | names)).raise_for_status()
        except httpx.ConnectError:
            await asyncio.sleep(0.1)
        else:
            return
    raise RuntimeError("atroposlib's server did not start")


_SHORT = 21  # tokens of each trajectory of which many wait
_WAITING_LEASES = 100
_LEASE = 64


async def _lease_among_many(
    address: str, options: argparse.Namespace, pids: dict[str, int]
) -> dict[str, float]:
    """Return the CPU milliseconds of a lease of 64 groups while `options.waiting` wait."""
    num_groups = options.waiting + _WAITING_LEASES * _LEASE
    limit = [("grpc.max_receive_message_length", 64 << 20)]
    async with grpc.aio.insecure_channel(address, options=limit) as channel:
        stub = ReplayServiceStub(channel)
        version = messages.PolicyVersion(lineage="main", number=0)
        await stub.AdvancePolicy(
            pb.AdvancePolicyRequest(
                run=RUN, policy_version=version, max_outstanding_groups=num_groups
            )
        )
        for start in range(0, num_groups, 1000):
            names = [f"t{i}" for i in range(start, min(start + 1000, num_groups))]
            await _append_small(stub, names, options.before)
        order = {"selection": f"SELECTION_{options.selection.upper()}"}
        request = pb.LeaseGroupsRequest(
            run=RUN,
            stage=UNSCORED,
            worker="scorer",
            max_groups=_LEASE,
            lease_s=3600,
            **({} if options.before else order),  # 127deda has one order
        )
        used = {name: cpu_ns(pid) for name, pid in pids.items()}
        for _ in range(_WAITING_LEASES):
            assert len((await stub.LeaseGroups(request)).leases) == _LEASE
        return {
            f"lease_64_{name}_cpu_ms": round((cpu_ns(pid) - used[name]) / _WAITING_LEASES / 1e6, 3)
            for name, pid in pids.items()
        }


async def _append_small(stub: ReplayServiceStub, names: list[str], before: str) -> None:
    tasks = [
        messages.Task(task_id=name, purpose=messages.PURPOSE_TRAINING, num_trajectories=1)
        for name in names
    ]
    await stub.OfferTasks(pb.OfferTasksRequest(run=RUN, tasks=tasks))
    leased = await stub.LeaseTasks(
        pb.LeaseTasksRequest(run=RUN, worker="collector", max_tasks=len(names), lease_s=3600)
    )
    items = []
    for held in leased.leases:
        group = _group(held.task, held.task.task_id + "#1" * bool(before), _SHORT)
        del group.trajectories[1:]
        items.append(pb.AppendItem(group=group, lease_id=held.lease_id))
    request = pb.AppendGroupsRequest(run=RUN, stage=UNSCORED, items=items)
    outcomes = (await stub.AppendGroups(request)).outcomes
    assert all(o.status == pb.APPEND_STATUS_APPENDED for o in outcomes)


def _rates(server: RedisServer, options: argparse.Namespace) -> dict[str, float]:
    if options.raw:
        return asyncio.run(_append_raw(server.url, options, server.pid))
    process, address = _launch({"DIALOOP_REPLAY_REDIS_URL": server.url}, options.before)
    try:
        pids = {"service": process.pid, "redis": server.pid}
        measure = _lease_among_many if options.waiting else _measure
        return asyncio.run(measure(address, options, pids))
    finally:
        process.terminate()
        process.wait(timeout=20)


def _round_of(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the arguments of each measurement of a round, by name."""
    sizes = ("groups", "tokens", "batch", "parallel", "fsync", "selection")
    same = [f"--{name}={getattr(options, name)}" for name in sizes]
    before = ["--before", options.before]
    if options.waiting:
        few, many = [*same, "--waiting=64"], [*same, f"--waiting={options.waiting}"]
        ways = {"waiting_64": few, f"waiting_{options.waiting}": many}
        return ways | ({"commit_127deda_waiting_64": [*few, *before]} if options.before else {})
    ways = {"now": same}
    if options.before:
        ways["commit_127deda"] = [*same, *before]
    if options.raw:
        ways["xadd"] = [*same, "--raw"]
    if options.atropos:
        ways["atroposlib"] = [*same, "--atropos", options.atropos]
    return ways


def _compare(options: argparse.Namespace) -> dict[str, object]:
    """Run each way in turn, `options.rounds` times; return medians and rounds by way."""
    ways = _round_of(options)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    settings = {*vars(options), "cores"}
    for _ in range(options.rounds):
        for name, arguments in ways.items():
            command = [sys.executable, "-m", "benchmarks.replay_throughput", *arguments]
            printed = json.loads(subprocess.check_output(command, text=True))
            rounds[name].append(
                {
                    key: value
                    for key, value in printed.items()
                    if key not in settings and not isinstance(value, (str, bool))
                }
            )
    return {
        name: {
            "median": {key: statistics.median(r[key] for r in all_) for key in all_[0]},
            "rounds": all_,
        }
        for name, all_ in rounds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=512, help="of a trajectory")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--fsync", choices=("everysec", "always", "no"), default="everysec")
    parser.add_argument("--before", default="", help="a checkout of commit 127deda")
    parser.add_argument("--raw", action="store_true", help="XADD alone, without the service")
    parser.add_argument("--atropos", default="", help="a python that has atroposlib and uvicorn")
    parser.add_argument("--waiting", type=int, default=0, help="groups that wait beside a lease")
    parser.add_argument(
        "--selection", choices=("fifo", "uniform"), default="fifo", help="order of these leases"
    )
    parser.add_argument("--rounds", type=int, default=0, help="measure all ways in turn")
    options = parser.parse_args()
    facts = vars(options) | {"before": bool(options.before), "atropos": bool(options.atropos)}
    machine = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
    }
    head = {"benchmark": "replay_throughput", **facts, **machine}
    print_figures(head, _figures(options))


def _figures(options: argparse.Namespace) -> dict[str, object]:
    if options.rounds:
        return _compare(options)
    if options.atropos:
        return dict(_atropos(options))
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(Path(directory), fsync=options.fsync, **_NO_REWRITE)
        server.start()
        try:
            return dict(_rates(server, options))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
