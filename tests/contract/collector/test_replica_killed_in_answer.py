"""A replica's process is killed at token 1,500 of 2,000: another goes on after what arrived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialoop.clients.channel import Channel
from dialoop.clients.inference import InferenceClient, SampleChunk
from dialoop.clients.retry import RetryPolicy
from dialoop.sequences import Source
from dialoop.trajectory import SamplingParams
from dialoop_ops.stack.processes.ports import choose_ports
from dialoop_services.collector.replicas import Replicas
from dialoop_services.collector.routing import RoutingCounts, rank

from tests.support.inference_world import QUESTION, make_endless_model, publish
from tests.support.stack_jobs import ROOT

NUM_TOKENS, KILLED_AT = 2000, 1500
MAX_MODEL_LEN = NUM_TOKENS + 100


class Replica:
    """A replica in a process of its own; it is killed once so many tokens have come from it."""

    def __init__(self, client: InferenceClient, process: subprocess.Popen[bytes]) -> None:
        self.client, self.process = client, process
        self.killed_at: int | None = None

    async def generate_stream(self, *arguments: Any, **named: Any) -> AsyncIterator[SampleChunk]:
        num_tokens = 0
        async with aclosing(self.client.generate_stream(*arguments, **named)) as chunks:
            async for chunk in chunks:
                yield chunk
                num_tokens += len(chunk.token_ids)
                if self.killed_at is not None and num_tokens >= self.killed_at:
                    os.kill(self.process.pid, signal.SIGKILL)


def start(model_dir: Path, root: Path, port: int) -> subprocess.Popen[bytes]:
    """Start a replica, whose log stands beside `root`."""
    own = {
        "PORT": port,
        "MODEL_DIR": model_dir,
        "WEIGHTS_ROOT": root,
        "ENGINE": "transformers",
        "MAX_MODEL_LEN": MAX_MODEL_LEN,
        "NUM_THREADS": 1,
    }
    variables = {f"DIALOOP_INFERENCE_{key}": str(value) for key, value in own.items()}
    root.mkdir()
    with (root.parent / f"{root.name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "dialoop_services.inference"],
            cwd=ROOT,
            env=os.environ | variables,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.heavy(reason="two replicas in processes of their own, and an answer of 2,000 tokens")
@pytest.mark.timeout(600)
async def test_killed_at_token_1500_of_2000_at_most_5_percent_is_sampled_again(
    tmp_path: Path,
) -> None:
    model_dir = make_endless_model(tmp_path / "model", max_model_len=MAX_MODEL_LEN)
    ports = choose_ports({"a": 0, "b": 0})
    with ExitStack() as ends:
        replicas: dict[str, Replica] = {}
        for name, port in ports.items():
            process = start(model_dir, tmp_path / name, port)
            ends.callback(process.wait)
            ends.callback(process.kill)
            replicas[name] = Replica(await _client_of(port), process)
        counts = RoutingCounts()
        fleet: Any = Replicas(replicas, RetryPolicy(max_attempts=3), counts)  # type: ignore[arg-type]
        group = fleet.of_group("g")
        # The survivor serves a newer policy than the one that is killed.
        survivor, dying = _sides(fleet)
        newer = publish(tmp_path / survivor, model_dir, number=1, scale=0.02)
        await replicas[survivor].client.load_weights(newer)
        before = (await replicas[survivor].client.get_policy()).num_sampled_tokens
        replicas[dying].killed_at = KILLED_AT
        (sample,) = await group.generate(
            QUESTION, sampling=SamplingParams(max_new_tokens=NUM_TOKENS)
        )
        assert replicas[dying].process.wait(timeout=10) == -signal.SIGKILL
        after = (await replicas[survivor].client.get_policy()).num_sampled_tokens
        kept = counts.num_kept_tokens[survivor]
        spans = [
            (segment.length, str(segment.policy_version))
            for segment in sample.sequence.segments
            if segment.source is Source.MODEL
        ]
        assert spans == [(kept, "base-0"), (NUM_TOKENS - kept, "main-1")]
        assert after - before == NUM_TOKENS - kept
        assert after - before <= NUM_TOKENS - KILLED_AT + 0.05 * NUM_TOKENS
        own = sample.sequence.inference_logprobs
        mask = sample.sequence.response_mask()[1:]
        ids = sample.sequence.token_ids.tolist()
        newest = (await replicas[survivor].client.logprobs([ids]))[0][mask]
        assert np.abs(newest - own)[kept:].max() < 1e-4
        # A fresh process has the first weights of the killed one.
        port = choose_ports({"again": 0})["again"]
        process = start(model_dir, tmp_path / "again", port)
        ends.callback(process.wait)
        ends.callback(process.kill)
        first = (await (await _client_of(port)).logprobs([ids]))[0][mask]
        assert np.abs(first - own)[:kept].max() < 1e-4


async def _client_of(port: int) -> InferenceClient:
    channel = Channel(f"127.0.0.1:{port}", retry=RetryPolicy(max_attempts=1))
    await channel.wait_until_connected(timeout_s=240)
    return InferenceClient(channel)


def _sides(fleet: Replicas) -> tuple[str, str]:
    """Return the names of the replica that will go on, and of the group's first one."""
    first, second = rank("g", fleet._replicas)
    return second.name, first.name
