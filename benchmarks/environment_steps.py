"""Steps per second of the environment service over unary gRPC, the service in its own process.

python benchmarks/environment_steps.py --sessions 32 --episodes 40
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time

import grpc
from dialoop.v1 import chat_pb2
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1.environment_service_pb2_grpc import EnvironmentServiceStub


def _launch() -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "services.environment"],
        env=dict(os.environ, DIALOOP_ENVIRONMENT_PORT="0"),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "address=" in line:
            return process, line.rpartition("address=")[2].strip().rstrip("]")
    raise RuntimeError("the service did not start")


def _step(session: str, episode: int, index: int, text: str) -> pb.StepRequest:
    message = chat_pb2.Message(role="assistant", content=text)
    history = chat_pb2.ChatHistory(response=chat_pb2.History(messages=[message]))
    return pb.StepRequest(session_id=session, episode=episode, step_index=index, history=history)


async def _play(
    stub: EnvironmentServiceStub, session: str, key: str, episodes: int, took_s: list[float]
) -> None:
    texts = (f"<request><Calculator>{key}<call>", "Result=0<submit>")
    await stub.CreateSession(pb.CreateSessionRequest(session_id=session, environment="arithmetic"))
    for episode in range(1, episodes + 1):
        await stub.Reset(
            pb.ResetRequest(session_id=session, episode=episode, split="train", task_key=key)
        )
        for index, text in enumerate(texts):
            started = time.perf_counter()
            await stub.Step(_step(session, episode, index, text))
            took_s.append(time.perf_counter() - started)


async def _measure(address: str, sessions: int, episodes: int) -> dict[str, float]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = EnvironmentServiceStub(channel)
        tasks = pb.ListTasksRequest(environment="arithmetic", split="train", page_size=1)
        key = (await stub.ListTasks(tasks)).tasks[0].key
        took_s: list[float] = []
        started = time.perf_counter()
        async with asyncio.TaskGroup() as players:
            for n in range(sessions):
                players.create_task(_play(stub, f"s{n}", key, episodes, took_s))
        wall_s = time.perf_counter() - started
    took_s.sort()
    return {
        "sessions": sessions,
        "steps": len(took_s),
        "steps_per_s": round(len(took_s) / wall_s, 1),
        "requests_per_s": round(len(took_s) * 1.5 / wall_s, 1),
        "step_p50_ms": round(took_s[len(took_s) // 2] * 1e3, 2),
        "step_p99_ms": round(took_s[int(len(took_s) * 0.99)] * 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--episodes", type=int, default=40)
    options = parser.parse_args()
    process, address = _launch()
    try:
        figures = asyncio.run(_measure(address, options.sessions, options.episodes))
    finally:
        process.terminate()
        process.wait()
    print(json.dumps({"benchmark": "environment_steps", **figures}))


if __name__ == "__main__":
    main()
