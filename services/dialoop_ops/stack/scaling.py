"""Grow and shrink collectors and replicas of a running stack: `dialoop scale inference=2`.

The command writes how many there shall be into the run's scale.json; the stack reads it, starts or
stops processes, and writes there why it cannot. A process that is stopped gives its work back.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dialoop.errors import DialoopError, InvalidConfig
from dialoop.running_stacks import SCALE_FILE, SCALED

from dialoop_ops.stack.devices import plan_here
from dialoop_ops.stack.layout import Layout, rest_name, service_of
from dialoop_ops.stack.processes.ports import choose_ports

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dialoop_ops.stack.processes.child import Room, ServiceSpec
    from dialoop_ops.stack.processes.log_stream import LogStream
    from dialoop_ops.stack.processes.supervisor import Supervisor

_POLL_S = 0.5
# A process that was added later and does not start ends no job: it is tried again, with an alarm.
_FAILURES_TO_START = 1_000_000


class Scaling:
    """The numbers of processes that were asked for last, and the tasks that start them."""

    def __init__(self, layout: Layout, supervisor: Supervisor, log: LogStream) -> None:
        self._layout = layout
        self._supervisor = supervisor
        self._log = log
        self._path = layout.run_dir.path / SCALE_FILE
        self._rooms: dict[str, Room] = {}
        self._changing = asyncio.Lock()
        self._path.unlink(missing_ok=True)  # what an earlier stack was asked for is void

    async def follow(self) -> None:
        """Do what scale.json says until cancelled."""
        latest: dict[str, int] = {}
        while True:
            await asyncio.sleep(_POLL_S)
            wanted = _read(self._path)
            if wanted == latest:
                continue
            latest = wanted
            try:
                async with self._changing:
                    for service, count in wanted.items():
                        await self._scale(service, count)
            except DialoopError as error:
                self._log.say("stack", f"Not scaled: {error}", style="yellow")
                _write(self._path, {"wanted": wanted, "error": str(error)})

    def names(self, service: str) -> list[str]:
        """Return the processes of a service that run or start, the first one first."""
        return [
            each.spec.name
            for each in self._supervisor.services
            if service_of(each.spec.name) == service and not each.is_stopping
        ]

    async def _scale(self, service: str, count: int) -> None:
        names = self.names(service)
        if count > len(names):
            self._require_scalable(service)
        for name in list(reversed(names))[: max(0, len(names) - count)]:
            self._log.say("stack", f"stopping {name}, as asked")
            self._supervisor.run_beside(self._stop(name))
        missing = (n for n in _names_of(service) if n not in names)
        for name in itertools.islice(missing, max(0, count - len(names))):
            spec = await self._spec(name, count)
            self._log.say("stack", f"starting {name}, as asked")
            self._supervisor.run_beside(self._supervisor.start(spec))

    def _require_scalable(self, service: str) -> None:
        if self._layout.config.discovery != "registry":
            raise InvalidConfig(
                f"{service} cannot grow: this job has fixed addresses.",
                remedy='Start the job with discovery = "registry".',
            )

    async def _stop(self, name: str) -> None:
        room = self._rooms.pop(name, None)
        await self._supervisor.stop(name)
        if room is not None:
            room.give_back()

    async def _spec(self, name: str, count: int) -> ServiceSpec:
        """Return how to start a process that is added, or one that was stopped before."""
        layout = self._layout
        if name not in layout.starters:
            layout = await self._with(name, count)
        spec = layout.spec(name)
        restart = replace(spec.restart, max_failures_to_start=_FAILURES_TO_START)
        return replace(spec, restart=restart)

    async def _with(self, name: str, count: int) -> Layout:
        """Return the layout with a process that is added; a DialoopError where it has no room."""
        layout, service = self._layout, service_of(name)
        ports = {**layout.ports, **choose_ports({name: 0, rest_name(name): 0})}
        if service not in layout.starters:
            devices = {**layout.devices, name: self._devices_of(name, count)}
            return replace(layout, ports=ports, devices=devices)
        if layout.grow is None:
            raise InvalidConfig(
                f"{service} cannot grow: the launcher placed this job's processes, and a new one "
                "would start on this machine, beside its plan.",
                remedy="Start the job with as many as you need, or start a process by hand on a "
                "machine of the cluster: docs/scale.md says how it joins.",
            )
        self._log.say("stack", f"asking for room for {name}")
        on_moved = partial(self._start_elsewhere, name, count)
        room = self._rooms[name] = await layout.grow(name, on_moved)
        return replace(
            layout,
            ports=ports,
            hosts={**layout.hosts, name: room.host},
            starters={**layout.starters, name: room.starter},
            devices={**layout.devices, name: room.variables},
            needs={**layout.needs, name: room.needs},
        )

    def _start_elsewhere(self, name: str, count: int) -> None:
        """Start a process in a new room, since its machine is gone."""
        self._supervisor.run_beside(self._move(name, count, self._rooms.get(name)))

    async def _move(self, name: str, count: int, room: Room | None) -> None:
        async with self._changing:
            if room is None or self._rooms.get(name) is not room:
                return  # it was stopped meanwhile, as asked
            await self._stop(name)
            try:
                spec = await self._spec(name, count)
            except DialoopError as error:
                self._log.say("stack", f"{name} ended with its machine: {error}", style="yellow")
                return
            self._supervisor.run_beside(self._supervisor.start(spec))

    def _devices_of(self, name: str, count: int) -> Mapping[str, str]:
        """Return the variables that give the process its GPUs, as a plan with it from the start.

        InvalidConfig where the GPUs do not suffice, or where those of others would change.
        """
        config = self._layout.config
        if service_of(name) != "inference":
            return self._layout.devices.get(service_of(name), {})
        section = config.inference.model_copy(update={"num_replicas": count})
        plan = plan_here(config.model_copy(update={"inference": section}), os.environ)
        variables = {each.name: each.variables for each in plan.processes}
        moved = [n for n, v in self._layout.devices.items() if variables.get(n, v) != v]
        if moved:
            raise InvalidConfig(
                f"With {count} replicas {', '.join(moved)} would have other GPUs.",
                remedy="Start the job with that many: dialoop config check shows the plan.",
            )
        return variables.get(name, {})


def _names_of(service: str) -> itertools.chain[str]:
    return itertools.chain([service], (f"{service}-{number}" for number in itertools.count(1)))


def _read(path: Path) -> dict[str, int]:
    try:
        wanted = json.loads(path.read_text("utf-8"))["wanted"]
        return {service: int(wanted[service]) for service in SCALED if service in wanted}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write(path: Path, content: Mapping[str, object]) -> None:
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(content) + "\n", encoding="utf-8")
    fresh.replace(path)
