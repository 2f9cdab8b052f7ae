"""`dialoop play`: one episode in the terminal, answered by hand or by a policy."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from rich.text import Text

from dialoop.cli.console import rich_console, say
from dialoop.cli.running_stacks import require_addresses
from dialoop.clients.connection import Dialoop
from dialoop.environments import load_environment
from dialoop.errors import InvalidInput, NotFound, Unavailable
from dialoop.reasons import Reason, reason_of
from dialoop.sequences import Source
from dialoop.testing import ScriptedPolicy
from dialoop.trajectory import SamplingParams
from dialoop.views.display import STYLES

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from dialoop.chat import History, Message
    from dialoop.clients.environment import EnvironmentInfo
    from dialoop.trajectory import Trajectory

_ROLES = {"assistant": Source.MODEL, "tool": Source.TOOL}


class TerminalPlayer:
    """Shows the conversation as it grows, and asks the user for the next answer."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_shown = 0

    def __call__(self, history: History) -> str:
        """What the user types."""
        self.show(history)
        try:
            text = input("assistant> ")
        except EOFError:
            raise Unavailable(
                "The input ended before the episode did.", reason=Reason.INPUT_ENDED
            ) from None
        self._num_shown += 1  # it stands on the terminal already
        return text

    def show(self, history: History) -> None:
        """Print the messages that are new."""
        for message in history[self._num_shown :]:
            self._console.print(_line(message), soft_wrap=True)
        self._num_shown = len(history)


def play(given: argparse.Namespace) -> int:
    """0 when the episode was played to its end."""
    from_here()
    if given.run:
        addresses = require_addresses(given.root / given.run)
        given.address = given.address or addresses["environment"]
        given.inference = given.inference or addresses["inference"]
    by_policy = given.by == "policy" or (given.by is None and bool(given.inference))
    if by_policy and not given.inference:
        raise InvalidInput(
            "A policy needs an inference service.", remedy="Give --inference or --run."
        )
    return asyncio.run(_play(given, by_policy=by_policy))


def from_here() -> None:
    """Let environments named by import path be found in the current folder."""
    sys.path.insert(0, str(os.getcwd()))  # noqa: PTH109 - as Python itself does


async def _play(given: argparse.Namespace, *, by_policy: bool) -> int:
    player = TerminalPlayer(rich_console())
    environment = given.address or load_environment(given.environment, options_of(given.option))
    policy = given.inference if by_policy else ScriptedPolicy(player)
    token = os.environ.get("DIALOOP_TOKEN", "")
    async with Dialoop(environment=environment, inference=policy, token=token) as dialoop:
        name = given.environment if given.address else environment.name
        info = await dialoop.environment.get_environment(name)
        if not by_policy:
            say(_how_to(info))
        sampling = SamplingParams(
            stop=info.stop,
            temperature=given.temperature,
            max_new_tokens=given.max_new_tokens,
        )
        task = await dialoop.task(name, given.task, split=given.split, sampling=sampling)
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
    return line.append(message.text, style=STYLES[_ROLES.get(message.role, Source.PROMPT)])


def _conclude(trajectory: Trajectory) -> int:
    """Say how it ended; a failure is an error, and never a reward of 0."""
    for failure in trajectory.failures:
        if failure.reason.endswith("_NOT_FOUND"):
            raise NotFound(failure.message, reason=reason_of(failure.reason))
        raise Unavailable(
            f"{failure.owner.name.capitalize()} failed: {failure.message}",
            reason=reason_of(failure.reason),
        )
    rewards = {r.name: r.value * r.weight for turn in trajectory.turns for r in turn.rewards}
    parts = ", ".join(f"{name} {value:g}" for name, value in rewards.items())
    say(f"{trajectory.done_reason.name.lower()}: reward {trajectory.reward:g} ({parts or 'none'})")
    return 0


def options_of(given: list[str]) -> dict[str, Any]:
    """NAME=VALUE arguments as a dict; VALUE is JSON, or text where it is none."""
    options: dict[str, Any] = {}
    for option in given:
        name, equals, value = option.partition("=")
        if not (name and equals):
            raise InvalidInput(f"--option {option} is not NAME=VALUE.")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options
