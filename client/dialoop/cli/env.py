"""`dialoop env`: write an environment, check that it does what it must, list those there are."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.cli.console import say
from dialoop.cli.env_template import TEMPLATE
from dialoop.cli.play import from_here, options_of
from dialoop.cli.running_stacks import require_addresses
from dialoop.clients.connection import Dialoop
from dialoop.conformance.checks import Finding, check_environment
from dialoop.environments.loading import BUILT_IN, load_environment
from dialoop.errors import InvalidInput
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason

if TYPE_CHECKING:
    import argparse

    from dialoop.clients.environment import EnvironmentInfo

READY_MADE = (
    "dialoop.tasks.column_addition:column_addition",
    "dialoop.tasks.countdown:countdown",
    "dialoop.tasks.gsm8k:gsm8k",
    "dialoop.tasks.ifeval:ifeval",
    "dialoop.tasks.maths:maths",
    "dialoop.tasks.mlgym:mlgym",
    "dialoop.tasks.reasoning_gym:reasoning_gym",
)


def new(given: argparse.Namespace) -> int:
    """0 when NAME.py was written."""
    name = given.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise InvalidInput(
            f"'{name}' is no name for a Python file.",
            remedy="Use small letters, digits and underscores, as in word_count.",
        )
    path = Path(f"{name}.py")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.replace("{name}", name))
    except FileExistsError:
        raise InvalidInput(f"{path} is there already.", remedy="Choose another name.") from None
    say(f"{path} is written. Try it, then make it yours:")
    say(f"  dialoop env check {name}:environment")
    say(f"  dialoop env play {name}:environment")
    return 0


def check(given: argparse.Namespace) -> int:
    """0 when the environment does all it must, 1 when it does not."""
    if given.tasks < 1:
        raise InvalidInput("--tasks is below 1.", remedy="Play at least one task of each split.")
    from_here()
    environment = load_environment(given.environment, options_of(given.option))
    findings = asyncio.run(check_environment(environment, answers=given.say, num_tasks=given.tasks))
    for finding in findings:
        say(_line(finding))
    wrong = sum(not finding.is_ok for finding in findings)
    say(
        f"{environment.name}: " + (f"{wrong} of {len(findings)} failed" if wrong else "all is well")
    )
    return 1 if wrong else 0


def list_environments(given: argparse.Namespace) -> int:
    """0 when they were printed: a service's own, or else those that come with Dialoop."""
    address = given.address
    if given.run:
        address = address or require_addresses(given.root / given.run)["environment"]
    if address:
        for info in asyncio.run(_served(address)):
            splits = ", ".join(f"{split.name} {split.num_tasks}" for split in info.splits)
            say(f"{info.name:20} {info.description} ({splits or 'questions of the caller'})")
        return 0
    for name, function in BUILT_IN.items():
        say(f"{name:44} {_first_line(function)}")
    for use in READY_MADE:
        say(f"{use:44} {_first_line_at(use)}")
    return 0


async def _served(address: str) -> tuple[EnvironmentInfo, ...]:
    token = os.environ.get("DIALOOP_TOKEN", "")
    async with Dialoop(environment=address, token=token) as dialoop:
        return await dialoop.environment.list_environments()


def _line(finding: Finding) -> str:
    if finding.is_ok:
        return f"ok    {finding.check:15} {finding.note}".rstrip()
    return f"FAIL  {finding.check:15} {finding.problem}\n{'':22}{finding.remedy}".rstrip()


def _first_line(function: object) -> str:
    return (function.__doc__ or "").partition("\n")[0]


def _first_line_at(use: str) -> str:
    return _first_line(load_attribute(use, what="environment", reason=Reason.ENVIRONMENT_NOT_FOUND))
