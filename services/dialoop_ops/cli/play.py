"""Run `dialoop play`: one episode in the terminal, answered by hand or by a policy."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from dialoop.clients.connection import Dialoop
from dialoop.environments import load_environment
from dialoop.errors import InvalidInput, NotFound, Unavailable
from dialoop.reasons import Reason, reason_of
from dialoop.running_stacks import require_addresses
from dialoop.sequences import Source
from dialoop.testing import ScriptedPolicy
from dialoop.trajectory import SamplingParams, Trajectory
from rich.text import Text

from dialoop_ops.cli.console import rich_console, say
from dialoop_ops.runs.display import STYLES, visible

if TYPE_CHECKING:
    import argparse

    from dialoop.chat import History, Message
    from dialoop.clients.environment import EnvironmentInfo
    from rich.console import Console

_ROLES = {"assistant": Source.MODEL, "tool": Source.TOOL}


class TerminalPlayer:
    """Shows the conversation as it grows, and asks the user for the next answer."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_shown = 0

    def __call__(self, history: History) -> str:
        """Return what the user types."""
        self.show(history)
        try:
            text = input("assistant> ")
        except EOFError:
            raise Unavailable(
                "The input ended before the episode did.", reason=Reason.INPUT_ENDED
            ) from None
        self._num_shown += 1  # the terminal shows it already
        return text

    def show(self, history: History) -> None:
        """Print the messages that are new."""
        for message in history[self._num_shown :]:
            self._console.print(_line(message), soft_wrap=True)
        self._num_shown = len(history)


def play(arguments: argparse.Namespace) -> int:
    """Play the episode to its end and return 0."""
    import_from_here()
    if arguments.run:
        addresses = require_addresses(arguments.root / arguments.run)
        arguments.address = arguments.address or addresses["environment"]
        arguments.inference = arguments.inference or addresses["inference"]
    by_policy = arguments.by == "policy" or (arguments.by is None and bool(arguments.inference))
    if by_policy and not arguments.inference:
        raise InvalidInput(
            "--by policy needs an inference service.", remedy="Add --inference or --run."
        )
    return asyncio.run(_play(arguments, by_policy=by_policy))


def import_from_here() -> None:
    """Let Python import environments from the current folder."""
    sys.path.insert(0, str(os.getcwd()))  # noqa: PTH109 - as Python itself does


async def _play(arguments: argparse.Namespace, *, by_policy: bool) -> int:
    player = TerminalPlayer(rich_console())
    environment = arguments.address or load_environment(
        arguments.environment, options_of(arguments.option)
    )
    policy = arguments.inference if by_policy else ScriptedPolicy(player)
    async with Dialoop(environment=environment, inference=policy) as dialoop:
        name = arguments.environment if arguments.address else environment.name
        info = await dialoop.environment.get_environment(name)
        if not by_policy:
            say(_how_to(info))
        sampling = SamplingParams(
            stop=info.stop,
            temperature=arguments.temperature,
            max_new_tokens=arguments.max_new_tokens,
        )
        task = await dialoop.task(name, arguments.task, split=arguments.split, sampling=sampling)
        trajectory = await dialoop.play(task)
    player.show(trajectory.history)
    return _conclude(trajectory)


def _how_to(info: EnvironmentInfo) -> str:
    parts = [f"{info.name} {info.version}: {info.description}"]
    if info.tools:
        parts.append(f"tools: {', '.join(info.tools)}")
    if info.stop:
        parts.append(f"an answer ends at: {' '.join(info.stop)}")
    return "\n".join(parts)


def _line(message: Message) -> Text:
    line = Text(f"{message.role}: ", style="dim")
    return line.append(visible(message.text), style=STYLES[_ROLES.get(message.role, Source.PROMPT)])


def _conclude(trajectory: Trajectory) -> int:
    """Print how the episode ended; raise its failure if there is one."""
    for failure in trajectory.failures:
        if failure.reason.endswith("_NOT_FOUND"):
            raise NotFound(failure.message, reason=reason_of(failure.reason))
        raise Unavailable(
            f"{failure.owner.name.capitalize()} failed: {failure.message}",
            reason=reason_of(failure.reason),
        )
    rewards = {
        r.name: r.recorded for turn in trajectory.turns for r in turn.rewards if not r.absent
    }
    parts = ", ".join(f"{name} {value:g}" for name, value in rewards.items())
    say(f"{trajectory.done_reason.name.lower()}: reward {trajectory.reward:g} ({parts or 'none'})")
    return 0


def options_of(words: list[str]) -> dict[str, Any]:
    """Return NAME=VALUE arguments as a dict; VALUE is JSON, or text where it is not."""
    options: dict[str, Any] = {}
    for option in words:
        name, equals, value = option.partition("=")
        if not (name and equals):
            raise InvalidInput(f"--option {option} is not NAME=VALUE: write it as --option seed=7.")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options
