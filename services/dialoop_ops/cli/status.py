"""Run `dialoop status` and `dialoop watch`: what a stack's services do, and who waits for whom.

`status` looks once. `watch` looks every second until Ctrl-C or until the stack has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import AsyncIterator

from dialoop.clients.replay import ReplayStats
from dialoop.clients.tls import rest_scheme
from dialoop.clients.trainer import TrainerStatus
from dialoop.running_stacks import Stack, find_stack, named_stack

from dialoop_ops.cli.console import rich_console, say
from dialoop_ops.cli.stack import choose_stack
from dialoop_ops.now import Now, Watcher
from dialoop_ops.now.snapshot import ages_by_place, groups_line
from dialoop_ops.runs import RunIndex
from dialoop_ops.runs.overview import Overview, overview_of

_EVERY_S = 1.0


def status(arguments: argparse.Namespace) -> int:
    """Print the state of a stack; return 0 when every service answers."""
    stack = _stack_of(arguments)
    now = asyncio.run(_look_once(stack))
    if arguments.json:
        say(json.dumps(now.as_json()))
    else:
        console = f", console http://{stack.console}/" if stack.console else ""
        say(f"{_heading(stack)}{console}")
        if not stack.addresses:
            say("is starting or stopping; its services have no addresses yet")
        for line in lines_of(now):
            say(f"  {line}")
    return 0 if stack.addresses and now.is_healthy else 1


def watch(arguments: argparse.Namespace) -> int:
    """Show the state of a stack every second; return 0 when the stack has ended, or on Ctrl-C."""
    stack = _stack_of(arguments)
    try:
        asyncio.run(_watch(stack, as_json=arguments.json))
    except KeyboardInterrupt:
        return 0
    if not arguments.json:
        say(f"The stack of {stack.run_dir} has ended.")
    return 0


def _stack_of(arguments: argparse.Namespace) -> Stack:
    """Return the stack on the machine that DIALOOP_SERVICES names, or else one of runs/."""
    named = named_stack(arguments.root / arguments.run)
    return named or choose_stack(arguments.root, arguments.run)


def _heading(stack: Stack) -> str:
    if stack.pid:
        return f"{stack.run_dir}, pid {stack.pid}"
    return f"services at {stack.addresses['trainer'].rpartition(':')[0]}"


async def _watch(stack: Stack, *, as_json: bool) -> None:
    from rich.live import Live
    from rich.text import Text

    from dialoop_ops.cli.overview import screen_of

    console = rich_console()
    if as_json or not console.is_terminal:
        async for now in _looks(stack):
            say(json.dumps(now.as_json()) if as_json else "\n".join([*lines_of(now), ""]))
        return
    index = RunIndex(stack.run_dir) if stack.run_dir.is_dir() else None
    with Live(console=console, auto_refresh=False) as live:
        async for now in _looks(stack):
            clock = time.strftime("%H:%M:%S", time.localtime(now.time))
            lines = [f"{_heading(stack)}, {clock}", *lines_of(now)]
            if index is None:  # the run's files are on another machine
                live.update(Text("\n".join(lines)), refresh=True)
                continue
            overview = await asyncio.to_thread(_read_on, index)
            screen = screen_of(stack.run_dir.name, overview, lines, now.alarms)
            live.update(screen, refresh=True)


def _read_on(index: RunIndex) -> Overview:
    index.refresh()
    return overview_of(index)


async def _looks(stack: Stack) -> AsyncIterator[Now]:
    """Yield a look every second, until the stack has ended; it may start or change meanwhile."""
    current: Stack | None = stack
    while current is not None and current.pid == stack.pid:
        async with Watcher(current, token=_token()) as watcher:
            addresses = current.addresses
            while current is not None and current.addresses == addresses:
                yield await watcher.look()
                await asyncio.sleep(_EVERY_S)
                current = find_stack(stack.run_dir) if stack.pid else stack


async def _look_once(stack: Stack) -> Now:
    async with Watcher(stack, token=_token()) as watcher:
        return await watcher.look()


def _token() -> str:
    return os.environ.get("DIALOOP_TOKEN", "")


def lines_of(now: Now) -> list[str]:
    """Return a line for each service, for training, for the queue, and for whatever waits."""
    lines = []
    for service in now.services:
        rest = f"   {rest_scheme()}://{service.rest_address}" if service.rest_address else ""
        silent = f" for {service.silent_s:.0f} s" if service.silent_s >= 1.0 else ""
        restarts = service.process.get("num_restarts", 0)
        again = f", started again {restarts} times" if restarts else ""
        incarnation = f", {service.incarnation}" if service.incarnation else ""
        health = f"{service.health}{silent}{incarnation}{again}"
        lines.append(f"{service.name:<12} {service.address:<22} {health}{rest}")
    lines.append(f"training:  {training_line(now.trainer) if now.trainer else 'no answer'}")
    lines.append(f"queue:     {queue_line(now.queue) if now.queue else 'no answer'}")
    if now.queue and (ages := ages_line(now.queue)):
        lines.append(f"oldest:    {ages}")
    if now.sampled_tokens_per_s is not None:
        lines.append(f"sampling:  {now.sampled_tokens_per_s:.0f} tokens/s")
    lines += [f"busy:      {name} {share:.0%}" for name, share in now.busy_shares.items()]
    lines += [f"waits:     {each}" for each in now.blocked if each.seconds >= 1.0]
    lines += [f"ALARM:     {alarm}" for alarm in now.alarms]
    return lines


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
    offered, groups = stats.training.num_tasks_offered, groups_line(stats.training)
    return f"{offered} tasks offered; groups: {groups}; {stats.credits} credits"


def ages_line(stats: ReplayStats) -> str:
    """Return for how long the oldest groups wait at each place; empty where none waits."""
    ages = ages_by_place(stats.training)
    ages |= {f"{place} (evaluation)": s for place, s in ages_by_place(stats.evaluation).items()}
    return ", ".join(f"{place} {seconds:.0f} s" for place, seconds in ages.items())
