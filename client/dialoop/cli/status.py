"""Run `dialoop status`: which services answer, how far training is, what waits in the queue."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING

import grpc

from dialoop.cli.console import say
from dialoop.cli.stack import choose_stack
from dialoop.clients.channel import Channel
from dialoop.clients.replay import ReplayClient
from dialoop.clients.retry import RetryPolicy
from dialoop.clients.trainer import TrainerClient
from dialoop.errors import DialoopError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from dialoop.cli.running_stacks import Stack
    from dialoop.clients.replay import ReplayStats
    from dialoop.clients.trainer import TrainerStatus

    Check = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]

_TIMEOUT_S = 3.0
# grpc.health.v1.HealthCheckResponse with status SERVING, as it travels.
_SERVING = b"\x08\x01"


def status(arguments: argparse.Namespace) -> int:
    """Print the state of a stack; return 0 when every service answers."""
    stack = choose_stack(arguments.root, arguments.run)
    say(f"{stack.run_dir}, pid {stack.pid}")
    if not stack.addresses:
        say("is starting or stopping; its services have no addresses yet")
        return 1
    return asyncio.run(_report(stack))


async def _report(stack: Stack) -> int:
    names = list(stack.addresses)
    healths = await asyncio.gather(*(_health(stack.addresses[name]) for name in names))
    for name, health in zip(names, healths, strict=True):
        at = f"   http://{stack.rest[name]}" if name in stack.rest else ""
        say(f"  {name:<12} {stack.addresses[name]:<22} {health}{at}")
    await _details(stack)
    return 0 if all(health == "serving" for health in healths) else 1


async def _health(address: str) -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        check: Check = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            answer = await check(b"", timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return "does not answer"
    return "serving" if answer == _SERVING else "is not ready"


async def _details(stack: Stack) -> None:
    """Print what the trainer and the replay service report."""
    run_id = json.loads((stack.run_dir / "run.json").read_text("utf-8"))["run_id"]
    async with _channel(stack.addresses, "trainer") as to_trainer:
        try:
            say(f"  training:  {training_line(await TrainerClient(to_trainer).get_status())}")
        except DialoopError as error:
            say(f"  training:  {error}")
    async with _channel(stack.addresses, "replay") as to_replay:
        try:
            say(f"  queue:     {queue_line(await ReplayClient(to_replay).get_stats(run_id))}")
        except DialoopError as error:
            say(f"  queue:     {error}")


def _channel(addresses: Mapping[str, str], name: str) -> Channel:
    token = os.environ.get("DIALOOP_TOKEN", "")
    return Channel(addresses[name], token=token, retry=RetryPolicy(max_attempts=1))


def training_line(trainer: TrainerStatus) -> str:
    """Return one line on how far training is."""
    parts = [
        trainer.phase.name.lower().replace("_", " "),
        f"{trainer.num_train_steps} of {trainer.max_train_steps} train steps",
        f"policy {trainer.policy_version or 'not published yet'}",
    ]
    if "train/reward" in trainer.metrics:
        parts.append(f"reward {trainer.metrics['train/reward']:.2f}")
    return ", ".join([*parts, trainer.failure] if trainer.failure else parts)


def queue_line(stats: ReplayStats) -> str:
    """Return one line on the groups, in the order in which they pass through the queue."""
    counts = stats.training
    return (
        f"{counts.num_tasks_offered} tasks offered; groups: {counts.num_groups_leased} playing, "
        f"{counts.num_groups_unscored} unscored, {counts.num_groups_scored} scored, "
        f"{counts.num_groups_training} training, "
        f"{counts.num_groups_trained + counts.num_groups_consumed} trained, "
        f"{sum(counts.num_groups_dropped.values())} dropped; {stats.credits} credits"
    )
