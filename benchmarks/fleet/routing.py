"""Measure the prefix cache of two replicas, routed as collectors do it, and in turn.

python -m benchmarks.fleet.routing --engine vllm --groups 12 --turns 6

Starts two replicas of the tiny model. Groups of four play conversations in which each turn adds a
message of the policy and one of the environment. They are played three times, with other words:
by one replica alone, by both as collectors route them, and by both in turn. Hit rate is the share
of prompt tokens whose keys the engine had, as each replica counts it in its metrics.

Prints one JSON line, and fails where the routed hit rate is below 0.9 of that of one replica.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from dialoop.chat import History, Message
from dialoop.clients.channel import Channel
from dialoop.clients.inference import InferenceClient
from dialoop.clients.retry import RetryPolicy
from dialoop.trajectory import SamplingParams
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_ops.stack.processes.ports import choose_ports
from dialoop_services.collector.replicas import GroupPolicy, Replicas

from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor

NUM_MEMBERS, NUM_NEW_TOKENS, NUM_WORDS = 4, 24, 40
LEAST_SHARE = 0.9
COUNTERS = {
    "cached": 'dialoop_prompt_tokens_total{keys="cached"}',
    "computed": 'dialoop_prompt_tokens_total{keys="computed"}',
    "queue_s": "dialoop_sample_queue_seconds_total",
    "samples": "dialoop_samples_total",
}


class Noted:
    """A replica that notes which groups it answered, by the first message of their prompts."""

    def __init__(self, name: str, client: InferenceClient, groups: dict[str, set[str]]) -> None:
        self.name, self.client, self.groups = name, client, groups

    async def generate(self, history: History, **question: Any) -> Any:
        """Answer, and note whose question it was."""
        self.groups[history[0].text].add(self.name)
        return await self.client.generate(history, **question)


class InTurn:
    """Replicas that are asked one after the other, whatever they have seen."""

    def __init__(self, policies: list[Any]) -> None:
        self.next = itertools.cycle(policies)

    async def generate(self, history: History, **question: Any) -> Any:
        """Ask the next replica."""
        return await next(self.next).generate(history, **question)


def words(chance: random.Random) -> str:
    """Text that no other message has."""
    return " ".join(str(chance.randrange(10_000)) for _ in range(NUM_WORDS))


async def play_group(policy: GroupPolicy | InTurn, num_turns: int, chance: random.Random) -> None:
    """Play one group: its members share the first prompt, and go on by themselves."""
    prompt = History((Message(role="user", content=words(chance)),))
    sampling = SamplingParams(max_new_tokens=NUM_NEW_TOKENS)
    firsts = await policy.generate(prompt, sampling=sampling, num_samples=NUM_MEMBERS)

    async def go_on(sample: Any, texts: list[str]) -> None:
        context = sample.sequence
        for turn, text in enumerate(texts, start=1):
            full = sample.history.require_full()
            (sample,) = await policy.generate(
                full.append(Message(role="user", content=text)),
                context=context,
                num_context_messages=len(full),
                sampling=sampling,
                turn=turn,
            )
            context = context.extended_by(sample.sequence)

    texts = [[words(chance) for _ in range(num_turns - 1)] for _ in firsts]
    await asyncio.gather(*map(go_on, firsts, texts))


async def play(
    policy_of: Any, options: argparse.Namespace, doors: dict[str, int], seed: int
) -> dict[str, Any]:
    """Play all groups; return the hit rate and the queue time that the replicas counted."""
    before, began_at = {name: counts(port) for name, port in doors.items()}, time.monotonic()
    room = asyncio.Semaphore(options.groups_in_flight)

    async def one_group(number: int) -> None:
        async with room:
            chance = random.Random(f"{seed} {number}")
            await play_group(policy_of(f"group-{number}"), options.turns, chance)

    await asyncio.gather(*map(one_group, range(options.groups)))
    seconds = time.monotonic() - began_at
    after = {name: counts(port) for name, port in doors.items()}
    growth = {n: {key: after[n][key] - before[n][key] for key in COUNTERS} for n in doors}
    total = {key: sum(each[key] for each in growth.values()) for key in COUNTERS}
    return {
        "hit_rate": round(total["cached"] / (total["cached"] + total["computed"]), 4),
        "prompt_tokens": int(total["cached"] + total["computed"]),
        "queue_ms_per_sample": round(1000 * total["queue_s"] / total["samples"], 2),
        "samples_by_replica": {name: int(each["samples"]) for name, each in growth.items()},
        "seconds": round(seconds, 1),
    }


def counts(port: int) -> dict[str, float]:
    """Return the counters of a replica's metrics, summed over other labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return {
        key: sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if re.match(re.escape(name), line)
        )
        for key, name in COUNTERS.items()
    }


def start(options: argparse.Namespace, folder: Path, name: str, ports: dict[str, int]) -> Any:
    """Start a replica, whose log stands in the folder."""
    (folder / name).mkdir()
    own = {
        "PORT": ports[name],
        "REST_PORT": ports[f"{name}_rest"],
        "MODEL_DIR": folder / "model",
        "WEIGHTS_ROOT": folder / name,
        "ENGINE": options.engine,
        "MAX_MODEL_LEN": 2048,
        "KV_CACHE_MIB": 256,
        "NUM_THREADS": 1,
    }
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "dialoop_services.inference"],
            env=os.environ | {f"DIALOOP_INFERENCE_{key}": str(v) for key, v in own.items()},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


async def measure(options: argparse.Namespace, ports: dict[str, int]) -> dict[str, Any]:
    """Play by one replica, by two that are routed, and by two in turn."""
    once, names = RetryPolicy(max_attempts=1), ("a", "b")
    doors = {name: ports[f"{name}_rest"] for name in names}
    async with AsyncExitStack() as exits:
        clients = {}
        for name in names:
            channel = Channel(f"127.0.0.1:{ports[name]}", retry=once)
            clients[name] = InferenceClient(await exits.enter_async_context(channel))
            await channel.wait_until_connected(timeout_s=600)
        figures: dict[str, Any] = {}
        for seed, way in enumerate(("one", "routed", "in_turn")):
            groups: dict[str, set[str]] = defaultdict(set)
            noted: dict[str, Any] = {n: Noted(n, clients[n], groups) for n in names}
            fleet = Replicas({"a": noted["a"]} if way == "one" else noted, once)
            turns = InTurn(list(noted.values()))
            policy_of = (lambda _, t=turns: t) if way == "in_turn" else fleet.of_group
            figures[way] = await play(policy_of, options, doors, seed)
            figures[way]["groups_at_one_replica"] = sum(len(g) == 1 for g in groups.values())
    return figures


def main() -> None:
    """Measure, print one JSON line, and hold the gate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--groups-in-flight", type=int, default=6)
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        model = make_tiny_model(folder / "model", seed=0)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
        ports = choose_ports(dict.fromkeys(("a", "b", "a_rest", "b_rest"), 0))
        replicas = [start(options, folder, name, ports) for name in ("a", "b")]
        try:
            figures = asyncio.run(measure(options, ports))
        except BaseException:
            for log in folder.glob("*.log"):
                sys.stderr.write(log.read_text(errors="replace")[-3000:])
            raise
        finally:
            for replica in replicas:
                replica.terminate()
            for replica in replicas:
                replica.wait()
    share = figures["routed"]["hit_rate"] / max(figures["one"]["hit_rate"], 1e-9)
    facts = {"processor": processor(), "engine": options.engine, "groups": options.groups}
    facts |= {"members": NUM_MEMBERS, "turns": options.turns}
    print_figures(facts, figures | {"routed_of_one": round(share, 4)}, indent=None)
    if share < LEAST_SHARE:
        raise SystemExit(f"The routed hit rate is {share:.3f} of that of one replica.")


if __name__ == "__main__":
    main()
