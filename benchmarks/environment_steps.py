"""Measure steps per second of the environment service, which runs in a process of its own.

python -m benchmarks.environment_steps --sessions 32 --episodes 40     unary gRPC, with a tool
python -m benchmarks.environment_steps --stream --seconds 4            one stream, an echo
python -m benchmarks.environment_steps --in-process                    ChatEnv.step alone
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import grpc
from dialoop.chat import ChatHistory, History, Message
from dialoop.environments import ChatEnv, Given, StepCounter
from dialoop.v1 import chat_pb2
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1.environment_service_pb2_grpc import EnvironmentServiceStub

from benchmarks.servers.figures import print_figures

ROOT = Path(__file__).resolve().parents[1]
STEPS_PER_EPISODE = 8


def echo() -> ChatEnv:
    """Make the smallest environment: no tool, no reward, eight steps."""
    return ChatEnv(name="echo", transforms=(StepCounter(STEPS_PER_EPISODE),))


def _launch() -> tuple[subprocess.Popen[str], str]:
    environments = "arithmetic,benchmarks.environment_steps:echo"
    variables = {
        "DIALOOP_ENVIRONMENT_PORT": "0",
        "DIALOOP_ENVIRONMENT_ENVIRONMENTS": environments,
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "dialoop_services.environment"],
        env={**os.environ, **variables},
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


async def _stream(address: str, sessions: int, seconds: float) -> dict[str, float]:
    """Let every session ask again as soon as it is answered, all of them on one stream."""
    took_s: list[float] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = EnvironmentServiceStub(channel)
        for n in range(sessions):
            await stub.CreateSession(
                pb.CreateSessionRequest(session_id=f"s{n}", environment="echo")
            )
        call = stub.Interact()
        players = [_Player(f"s{n}") for n in range(sessions)]
        started = time.perf_counter()
        for n, player in enumerate(players):
            await call.write(player.next(n))
        while players:
            answer = await call.read()
            n = int(answer.request_id)
            players[n].take_answer(took_s)
            if time.perf_counter() - started > seconds:
                break
            await call.write(players[n].next(n))
        wall_s = time.perf_counter() - started
        call.cancel()
    took_s.sort()
    return {
        "sessions": sessions,
        "steps": len(took_s),
        "steps_per_s": round(len(took_s) / wall_s, 1),
        "step_p50_ms": round(took_s[len(took_s) // 2] * 1e3, 2),
        "step_p99_ms": round(took_s[int(len(took_s) * 0.99)] * 1e3, 2),
    }


class _Player:
    """One session of the stream: a reset, then steps until the episode ends."""

    def __init__(self, session: str) -> None:
        self._session = session
        self._episode, self._index = 0, STEPS_PER_EPISODE
        self._asked_at = 0.0

    def next(self, number: int) -> pb.InteractRequest:
        self._asked_at = time.perf_counter()
        if self._index == STEPS_PER_EPISODE:
            self._episode, self._index = self._episode + 1, -1
            reset = pb.ResetRequest(session_id=self._session, episode=self._episode, query="hi")
            return pb.InteractRequest(request_id=str(number), reset=reset)
        step = _step(self._session, self._episode, self._index, "An answer of some words.")
        return pb.InteractRequest(request_id=str(number), step=step)

    def take_answer(self, took_s: list[float]) -> None:
        if self._index >= 0:
            took_s.append(time.perf_counter() - self._asked_at)
        self._index += 1


async def _in_process(steps: int) -> dict[str, float]:
    environment = echo()
    task = environment.task_from(Given(query="hi"))
    episode = environment.reset(task, 0).episode
    message = Message(role="assistant", content="An answer of some words.")
    answered = ChatHistory(response=History((message,)))
    started = time.perf_counter()
    for _ in range(steps):
        await environment.step(episode, answered)
    return {"steps": steps, "step_us": round((time.perf_counter() - started) / steps * 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--in-process", action="store_true")
    options = parser.parse_args()
    if options.in_process:
        figures = asyncio.run(_in_process(20_000))
        print_figures({"benchmark": "environment_steps_in_process"}, figures)
        return
    process, address = _launch()
    try:
        if options.stream:
            figures = asyncio.run(_stream(address, options.sessions, options.seconds))
        else:
            figures = asyncio.run(_measure(address, options.sessions, options.episodes))
    finally:
        process.terminate()
        process.wait()
    name = "environment_steps_stream" if options.stream else "environment_steps"
    print_figures({"benchmark": name}, figures)


if __name__ == "__main__":
    main()
