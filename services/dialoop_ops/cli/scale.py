"""`dialoop scale collector=4 inference=+1`: grow or shrink a running stack, and wait for it."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path

from dialoop.errors import InvalidConfig, Unavailable
from dialoop.reasons import Reason
from dialoop.running_stacks import SCALE_FILE, SCALED, Stack, find_stack

from dialoop_ops.cli.console import say, say_json
from dialoop_ops.cli.stack import choose_stack

_COUNT = re.compile(r"(?P<service>[a-z]+)=(?P<sign>[+-]?)(?P<count>\d{1,4})")
_POLL_S = 0.2


def scale(arguments: argparse.Namespace) -> int:
    """Ask a stack for so many processes of a service, and return once it has them."""
    stack = choose_stack(arguments.root, arguments.run)
    wanted = wanted_counts(arguments.counts, num_present(stack))
    path = stack.run_dir / SCALE_FILE
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps({"wanted": wanted}) + "\n", encoding="utf-8")
    fresh.replace(path)
    deadline = time.monotonic() + arguments.timeout
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        if problem := _problem_of(path):
            raise InvalidConfig(problem, remedy="The log of the stack says the same.")
        now = find_stack(stack.run_dir)
        if now is None or now.pid != stack.pid:
            raise Unavailable(f"{stack.run_dir} has ended.", reason=Reason.NO_STACK)
        present, ready = num_present(now), num_present(now, states=("ready",))
        if all(present[s] == ready[s] == count for s, count in wanted.items()):
            if arguments.json:
                say_json({"run_dir": str(stack.run_dir), "counts": wanted})
            else:
                say(f"{stack.run_dir} has " + ", ".join(f"{c} {s}" for s, c in wanted.items()))
            return 0
    raise Unavailable(
        f"{stack.run_dir} is not scaled within {arguments.timeout:g} s.",
        remedy="`dialoop status` shows what its processes do; their logs are in the run's folder.",
    )


def wanted_counts(words: list[str], present: Mapping[str, int]) -> dict[str, int]:
    """Return the number for each named service; "+1" counts from what is there.

    wanted_counts(["inference=+1"], {"collector": 1, "inference": 2})   # {"inference": 3}
    """
    wanted = {}
    for word in words:
        match = _COUNT.fullmatch(word)
        if match is None or match["service"] not in SCALED:
            raise InvalidConfig(
                f"'{word}' is no number of a service that can grow.",
                remedy=f"Give {' or '.join(f'{s}=2' for s in SCALED)}; +1 and -1 count from now.",
            )
        service, count = match["service"], int(match["count"])
        if match["sign"]:
            count = present[service] + (count if match["sign"] == "+" else -count)
        if count < 1:
            raise InvalidConfig(
                f"'{word}' leaves {count} processes of {service}.", remedy="Leave at least one."
            )
        wanted[service] = count
    return wanted


def num_present(
    stack: Stack, *, states: tuple[str, ...] = ("starting", "ready", "waiting_to_restart")
) -> dict[str, int]:
    """Return how many processes of each service are in one of these states."""
    return {
        service: sum(
            name.partition("-")[0] == service and process["state"] in states
            for name, process in stack.processes.items()
        )
        for service in SCALED
    }


def _problem_of(path: Path) -> str:
    """Return why the stack could not do what was asked; empty while it may."""
    try:
        return str(json.loads(path.read_text("utf-8")).get("error", ""))
    except (OSError, ValueError):
        return ""
