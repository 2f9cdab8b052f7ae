"""Run `dialoop env`: write an environment, check it, or list environments."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from dataclasses import asdict
from pathlib import Path

from dialoop.clients.connection import Dialoop
from dialoop.clients.environment import EnvironmentInfo
from dialoop.environments.loading import BUILT_IN, load_environment
from dialoop.errors import InvalidInput
from dialoop.extras import offered_paths
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason
from dialoop.running_stacks import require_addresses

from dialoop_ops.cli.console import say, say_json
from dialoop_ops.cli.env_template import JOB_TEMPLATE, TEMPLATE
from dialoop_ops.cli.play import import_from_here, options_of
from dialoop_ops.conformance.environment.checks import Finding, check_environment

READY_MADE = (
    "dialoop.tasks.column_addition:column_addition",
    "dialoop.tasks.countdown:countdown",
    "dialoop.tasks.gsm8k:gsm8k",
    "dialoop.tasks.ifeval:ifeval",
    "dialoop.tasks.maths:maths",
    "dialoop_extras.mlgym:mlgym",
    "dialoop.tasks.reasoning_gym:reasoning_gym",
)


def new(arguments: argparse.Namespace) -> int:
    """Write NAME.py and the job NAME.toml, and return 0."""
    name = arguments.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise InvalidInput(
            f"'{name}' cannot be the name of a Python file.",
            remedy="Use lower-case letters, digits and underscores, as in word_count.",
        )
    texts = {Path(f"{name}.py"): TEMPLATE, Path(f"{name}.toml"): JOB_TEMPLATE}
    for path in texts:
        if path.exists():
            raise InvalidInput(f"{path} exists already.", remedy="Choose another name.")
    for path, text in texts.items():
        path.write_text(text.replace("{name}", name), encoding="utf-8")
    if arguments.json:
        say_json({"environment": f"{name}:environment", "files": [str(path) for path in texts]})
        return 0
    say(f"{' and '.join(map(str, texts))} are written. Try them, then make them yours:")
    say(f"  dialoop env check {name}:environment")
    say(f"  dialoop env play {name}:environment")
    say(f"  dialoop train {name}.toml")
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Check an environment; return 0 when all checks pass, else 1."""
    if arguments.tasks < 1:
        raise InvalidInput(
            f"--tasks is {arguments.tasks}.", remedy="Use 1 or more: it plays tasks of each split."
        )
    import_from_here()
    environment = load_environment(arguments.environment, options_of(arguments.option))
    findings = asyncio.run(
        check_environment(environment, answers=arguments.say, num_tasks=arguments.tasks)
    )
    wrong = sum(not finding.is_ok for finding in findings)
    if arguments.json:
        say(json.dumps([asdict(finding) for finding in findings], indent=2))
        return 1 if wrong else 0
    for finding in findings:
        say(_line(finding))
    say(
        f"{environment.name}: " + (f"{wrong} of {len(findings)} failed" if wrong else "all is well")
    )
    return 1 if wrong else 0


def list_environments(arguments: argparse.Namespace) -> int:
    """Print a service's environments, or else those that come with Dialoop; return 0."""
    rows = _environments(arguments)
    if arguments.json:
        names = ("name", "description")
        say(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
        return 0
    width = max((len(name) for name, _ in rows), default=0)
    for name, description in rows:
        say(f"{name:{width}} {description}")
    return 0


def _environments(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Return each environment's name, or the path to use it by, and what it is."""
    address = arguments.address
    if arguments.run:
        address = address or require_addresses(arguments.root / arguments.run)["environment"]
    if address:
        rows = []
        for info in asyncio.run(_ask_service(address)):
            splits = ", ".join(f"{split.name} {split.num_tasks}" for split in info.splits)
            text = f"{info.description} ({splits or 'questions of the caller'})"
            rows.append((info.name, text))
        return rows
    return [
        *((name, _first_line(function)) for name, function in BUILT_IN.items()),
        *((name, _first_line_at(use)) for name, use in offered_paths("environments").items()),
        *((use, _first_line_at(use)) for use in READY_MADE),
    ]


async def _ask_service(address: str) -> tuple[EnvironmentInfo, ...]:
    async with Dialoop(environment=address) as dialoop:
        return await dialoop.environment.list_environments()


def _line(finding: Finding) -> str:
    if finding.is_ok:
        return f"ok    {finding.check:15} {finding.note}".rstrip()
    return f"FAIL  {finding.check:15} {finding.problem}\n{'':22}{finding.remedy}".rstrip()


def _first_line(function: object) -> str:
    return (function.__doc__ or "").partition("\n")[0]


def _first_line_at(use: str) -> str:
    return _first_line(load_attribute(use, what="environment", reason=Reason.ENVIRONMENT_NOT_FOUND))
