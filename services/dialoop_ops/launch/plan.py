"""Define the launch plan: the processes of a job as values, with all that a launcher needs.

plan = LaunchPlan(run="demo", processes=(PlannedProcess(name="replay", role="replay", ...), ...))
plan.process("inference-1").command        # ("python", "-m", "dialoop_services.inference")

Every launcher reads the same plan. None decides for itself what a process is started with, what it
waits for, or when it is started again.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dialoop_services.runtime.exit_reason import CONFIG_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What one process needs of its machine; 0 processors or GiB: nothing is reserved."""

    gpus: int = 0
    processors: int = 0
    memory_gib: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRule:
    """When a process that ended is started again, and what ends the job instead.

    A process that was ready once is started again as often as it ends, after waits that double up
    to `max_wait_s`. One that ends `max_failures_to_start` times before it was ready ends the job.
    So does one that ends `max_same_ends` times in a row, never a minute after it was ready, by the
    same error of its own, and an exit code in `fatal_exit_codes`, which is a mistake in the
    settings.
    """

    first_wait_s: float = 0.5
    max_wait_s: float = 30.0
    max_failures_to_start: int = 2
    max_same_ends: int = 5
    fatal_exit_codes: tuple[int, ...] = (CONFIG_ERROR,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """One process: what starts it, what it needs, and what it waits for.

    `variables` stand beside those that its machine has. `after` names the processes that must be
    ready first. With `needs_model` the tiny model has to be there too, which the trainer makes. On
    several nodes it is one process of each, all started and ended together, by `command_on`.
    """

    name: str
    role: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    rest_address: str = ""
    needs: Needs = Needs()
    num_nodes: int = 1
    after: tuple[str, ...] = ()
    needs_model: bool = False
    restart: RestartRule = RestartRule()
    ready_timeout_s: float = 120.0
    hang_timeout_s: float = 60.0
    stop_grace_s: float = 20.0
    stop_rank: int = 0

    def as_shell(self) -> str:
        """Return the process as shell writes it: a comment, its variables, its command.

        One of several nodes is a line for each.
        """
        waits = ", ".join((*self.after, *(("the model",) if self.needs_model else ())))
        head = f"# {self.name}: {self.needs.gpus} GPUs" + (f", after {waits}" if waits else "")
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        if self.num_nodes == 1:
            return "\n".join((head, " \\\n  ".join((*variables, shlex.join(self.command))), ""))
        head += f", on each of {self.num_nodes} machines"
        lines = [
            f"# {self.name}, machine {node}:\n{shlex.join(command_on(node, self.command))}"
            for node in range(self.num_nodes)
        ]
        return "\n".join((head, f"export {' '.join(variables)}", *lines, ""))


def command_on(node: int, command: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a process of several nodes on one of them, counted from 0."""
    return (*command, "--node", str(node))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """All processes of a run."""

    run: str
    processes: tuple[PlannedProcess, ...]

    def process(self, name: str) -> PlannedProcess:
        """Return the process of that name."""
        return next(each for each in self.processes if each.name == name)
