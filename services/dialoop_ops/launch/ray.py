"""Run a job on Ray: placement groups, and an actor for each process, which starts it.

`ray_site` connects and reserves room for everything; a trainer of several nodes comes first. The
supervisor of the local stack stays what it is: it starts, watches and restarts processes by the
plan, through the actors. Logs and status are those of the local stack.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dialoop.errors import InvalidConfig, Unavailable
from dialoop.reasons import Reason
from dialoop_services.config.job import JobConfig
from dialoop_services.runtime.access.principals import TOKEN, without_tokens
from dialoop_services.runtime.exit_reason import CONFIG_ERROR

from dialoop_ops.launch.plan import Needs, command_on
from dialoop_ops.launch.ray_worker import RayWorker
from dialoop_ops.launch.site import (
    ClusterNode,
    Site,
    components_of,
    further_nodes,
    require_room,
    threads_on,
)
from dialoop_ops.stack.devices import needs_elsewhere
from dialoop_ops.stack.layout import service_of
from dialoop_ops.stack.processes.child import Room, StartOrder

_OBJECT_STORE_BYTES = 80 << 20
_POLL_S = 0.25
_ANSWER_S = 60.0
_LAST_WORDS_S = 30.0
"""How long the other nodes of a process have to end by themselves after the first."""
_FORWARDED = ("DIALOOP_", "HF_", "VLLM_", "NCCL_", "GLOO_", "OMP_", "TOKENIZERS_", "REDIS_URL")
"""Prefixes of this process's variables that its processes get on other nodes too."""
_LOST = -signal.SIGKILL
"""Exit code of a process whose node, or whose actor, is gone."""


@contextmanager
def ray_site(config: JobConfig) -> Iterator[Site]:
    """Connect to Ray, reserve room for all processes, and yield where they are.

    Raises Unavailable (NO_RAY) without Ray or without an answer of the cluster, and InvalidConfig
    (PLAN_TOO_LARGE) with the arithmetic where it is too small.
    """
    ray = _import_ray()
    options = config.launch.ray
    _connect(ray, options.address)
    try:
        nodes = _nodes_of(ray)
        require_room(components_of(config), nodes)
        require_a_raylet_each(config, nodes)
        places = _reserve(ray, config)
        os.environ[TOKEN] = os.environ.get(TOKEN) or secrets.token_urlsafe(32)  # empty is none
        yield _place(ray, config, places)
    finally:
        ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise Unavailable(
            "Ray is not installed.",
            reason=Reason.NO_RAY,
            remedy='Run pip install "dialoop-ops[ray]" here and on all nodes, or leave --on out.',
        ) from error
    return ray


def _connect(ray: Any, address: str) -> None:
    """Connect to a running cluster, or start one here."""
    own = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            configure_logging=False,
            **({} if address else own),
        )
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise Unavailable(
            f"No Ray cluster answers at {address or 'this machine'}: {error}.",
            reason=Reason.NO_RAY,
            remedy="Start it with `ray start --head`, or correct address in [launch.ray].",
        ) from error


def _nodes_of(ray: Any) -> list[ClusterNode]:
    """Return the living nodes of the cluster."""
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [
        ClusterNode(
            processors=int(each.get("CPU", 0)),
            memory_gib=each.get("memory", 0) / 2**30,
            gpus=int(each.get("GPU", 0)),
        )
        for each in resources
    ]


def bundles_of(config: JobConfig) -> list[dict[str, float]]:
    """Return the resources of each bundle: the head, further nodes that train, replicas."""
    return [_bundle(needs) for needs in components_of(config).values()]


def needs_this_machine(config: JobConfig, environment: Mapping[str, str]) -> bool:
    """Return whether the head has to be here: with a folder, or a Redis, that no other reaches."""
    starts_redis = config.store == "redis" and not environment.get("REDIS_URL")
    return starts_redis or not config.launch.shared_folder


def require_a_raylet_each(config: JobConfig, nodes: Sequence[ClusterNode]) -> None:
    """Raise InvalidConfig (PLAN_TOO_LARGE) where a node of the trainer could never have a raylet.

    Nodes of one trainer lie on as many raylets: two on one machine would be one node to users.
    """
    components, names = components_of(config), ("trainer", *further_nodes(config))
    least = components[names[-1]]
    fitting = sum(
        node.processors >= least.processors
        and node.memory_gib >= least.memory_gib
        and node.gpus >= least.gpus
        for node in nodes
    )
    if missing := names[fitting:]:
        raise InvalidConfig(
            f"Each of the trainer's {len(names)} nodes takes a raylet of its own with "
            f"{json.dumps(_bundle(least))}, and {fitting} of the cluster's {len(nodes)} have as "
            f"much: there is none for {', '.join(missing)}.",
            reason=Reason.PLAN_TOO_LARGE,
            remedy="Lower num_nodes in [train], or what [resources.trainer] asks for, or add nodes "
            "to the cluster.",
        )


def _reserve(ray: Any, config: JobConfig) -> dict[str, tuple[Any, int]]:
    """Return the placement group and the bundle in it of each component."""
    bundles = dict(zip(components_of(config), bundles_of(config), strict=True))
    if needs_this_machine(config, os.environ):
        bundles["trainer"] |= _this_node(ray)
    nodes, limit_s = ("trainer", *further_nodes(config)), config.launch.ray.place_within_s
    parts = {"PACK": [*bundles]}
    if len(nodes) > 1:  # a group has one strategy, and replicas may lie beside the trainer
        parts = {"STRICT_SPREAD": [*nodes], "PACK": [name for name in bundles if name not in nodes]}
    places: dict[str, tuple[Any, int]] = {}
    for strategy, names in parts.items():
        asked = [bundles[name] for name in names]
        group = ray.util.placement_group(asked, strategy=strategy)
        if not group.wait(limit_s):
            each = ", each on a raylet of its own" if strategy == "STRICT_SPREAD" else ""
            raise _no_room(
                asked,
                limit_s,
                "The trainer runs on this machine, unless there is a shared folder and a Redis "
                "that REDIS_URL names.",
                names=f"{', '.join(names)}{each}",
            )
        places |= {name: (group, index) for index, name in enumerate(names)}
    return places


def _this_node(ray: Any) -> dict[str, float]:
    """Return the resource that only the node of this process has."""
    return {f"node:{ray.util.get_node_ip_address()}": 0.001}


def _no_room(
    bundles: Sequence[Mapping[str, float]], limit_s: float, more: str, *, names: str
) -> Unavailable:
    return Unavailable(
        f"Ray had no room within {limit_s:g} s for what was asked for at once: {names}: "
        f"{json.dumps(bundles)}.",
        reason=Reason.NO_RAY,
        remedy=f"Wait for other jobs, or raise place_within_s in [launch.ray]. {more}",
    )


def _bundle(needs: Needs) -> dict[str, float]:
    # A bundle of nothing is refused; without [resources] nothing is kept for a process.
    bundle: dict[str, float] = {"CPU": needs.processors or 0.01}
    if needs.gpus:
        bundle["GPU"] = needs.gpus
    if needs.memory_gib:
        bundle["memory"] = int(needs.memory_gib * 2**30)
    return bundle


def _place(ray: Any, config: JobConfig, places: Mapping[str, tuple[Any, int]]) -> Site:
    """Start an actor for each process, and return the site with the address of each node."""
    needs = needs_elsewhere(config)
    of_one: dict[str, RayStarter] = {}
    for name in needs:
        group, index = places.get(name, places["trainer"])
        of_one[name] = RayStarter(ray, name, needs[name], group, bundle=index)
    starters: dict[str, RayStarter | RayNodes] = {**of_one}
    if nodes := further_nodes(config):
        starters["trainer"] = RayNodes([of_one[name] for name in ("trainer", *nodes)])
        for name in nodes:
            del starters[name]
    return Site(
        hosts={name: starter.host() for name, starter in starters.items()},
        starters={name: starter.start for name, starter in starters.items()},
        devices={name: threads_on(config, name, each) for name, each in needs.items()},
        needs=needs,
        grow=partial(_grow, ray, config),
    )


async def _grow(ray: Any, config: JobConfig, name: str, on_moved: Callable[[], None]) -> Room:
    """Reserve room for one process more, in a placement group of its own."""
    needs, limit_s = needs_elsewhere(config)[service_of(name)], config.launch.ray.place_within_s
    bundle = _bundle(needs)
    if service_of(name) != "inference" and not config.launch.shared_folder:
        bundle |= _this_node(ray)  # it writes into the run's folder
    group = ray.util.placement_group([bundle])
    starter = RayStarter(ray, name, needs, group, on_moved=on_moved)
    give_back = partial(ray.util.remove_placement_group, group)
    try:
        async with asyncio.timeout(limit_s):
            while not await asyncio.to_thread(group.wait, _POLL_S):
                pass
        host = await asyncio.to_thread(starter.host)
    except ray.exceptions.RayError as error:
        give_back()
        raise Unavailable(
            f"Ray could not start {name}: {error}",
            reason=Reason.NO_RAY,
            remedy="Ask again, or look at the cluster with `ray status`.",
        ) from error
    except TimeoutError as error:
        give_back()
        raise _no_room([bundle], limit_s, "Or ask for fewer.", names=name) from error
    return Room(
        host=host,
        starter=starter.start,
        variables=threads_on(config, name, needs),
        needs=needs,
        give_back=give_back,
    )


class RayStarter:
    """Starts a process again and again in its bundle of a group, with a new actor each time.

    When the bundle has moved to another machine, it calls `on_moved`; without one, a start raises
    MovedError.
    """

    def __init__(
        self,
        ray: Any,
        name: str,
        needs: Needs,
        group: Any,
        *,
        bundle: int = 0,
        on_moved: Callable[[], None] | None = None,
    ) -> None:
        self._ray = ray
        self._name, self._needs = name, needs
        self._group, self._bundle = group, bundle
        self._on_moved = on_moved
        self._host = ""
        self._next: Any = None

    def host(self) -> str:
        """Return the address of the node on which the process will be."""
        if not self._host:
            self._next = self._actor()
            self._host = self._ray.get(self._next.host.remote(), timeout=_ANSWER_S)
        return self._host

    async def start(self, order: StartOrder) -> RayProcess:
        """Start the command in the bundle."""
        actor, self._next = self._next or self._actor(), None
        order.log.parent.mkdir(parents=True, exist_ok=True)
        process = RayProcess(self._ray, actor, order.log)
        try:
            host = await asyncio.wait_for(_answer(actor.host.remote()), _ANSWER_S)
            if self._host and host != self._host:
                moved = MovedError(self._name, self._host, host)
                if self._on_moved is None:
                    raise moved
                process.lose(str(moved))
                self._on_moved()
                return process
            variables = _variables_to_forward() | dict(order.environment)
            await process.start(order.command, variables, order.folder)
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            why = str(error) or f"it has had no room for it for {_ANSWER_S:g} s."
            process.lose(f"Ray could not start {self._name}: {why}")
        return process

    def _actor(self) -> Any:
        needs = self._needs
        strategies = self._ray.util.scheduling_strategies
        return (
            self._ray.remote(RayWorker)
            .options(
                num_cpus=needs.processors,
                num_gpus=needs.gpus,
                max_restarts=0,  # the supervisor's rule says when it is started again
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=self._bundle
                ),
            )
            .remote()
        )


class MovedError(Unavailable):
    """A process came back on another machine, where the others do not look for it."""

    def __init__(self, name: str, before: str, now: str) -> None:
        super().__init__(
            f"{name} was on {before}, and Ray has room for it on {now} only.",
            reason=Reason.MOVED,
            remedy="The job starts again from its checkpoint.",
        )


class RayProcess:
    """A process on a node of Ray, as the supervisor sees it."""

    def __init__(self, ray: Any, actor: Any, log: Path) -> None:
        self._ray = ray
        self._actor = actor
        self._log = log
        self.exit_code: int | None = None
        """None while it runs; negative when a signal ended it."""
        self.pid = 0

    async def start(
        self, command: tuple[str, ...], environment: Mapping[str, str], folder: Path | None
    ) -> None:
        """Start the command through the actor."""
        ports = [int(environment[name]) for name in environment if _is_port(name)]
        place = None if folder is None else str(folder)
        self.pid = await _answer(
            self._actor.start.remote(list(command), dict(environment), place, ports)
        )

    async def wait(self) -> int:
        """Pass its output on until it has ended, and return its exit code."""
        while self.exit_code is None:
            try:
                code, output = await _answer(self._actor.poll.remote())
            except self._ray.exceptions.RayError as error:
                self.lose(f"Its node, or Ray's actor of it, is gone: {type(error).__name__}.")
                break
            self._write(output)
            if code is not None:
                self.exit_code = code
                break
            await asyncio.sleep(_POLL_S)
        with suppress(Exception):  # it may be gone already
            self._ray.kill(self._actor)
        assert self.exit_code is not None
        return self.exit_code

    def terminate(self) -> None:
        """Ask it to end."""
        self._actor.send.remote(int(signal.SIGTERM))

    def kill(self) -> None:
        """Kill it and all that it started."""
        self._actor.send.remote(int(signal.SIGKILL))

    def lose(self, why: str) -> None:
        """Note that it has ended without a word of its own."""
        self._write(f"{why}\n".encode())
        self.exit_code = _LOST

    def _write(self, output: bytes) -> None:
        if output:
            with self._log.open("ab") as file:
                file.write(output)


class RayNodes:
    """Starts a process of several nodes, one actor for each, which all end together."""

    def __init__(self, starters: Sequence[RayStarter]) -> None:
        self._starters = starters

    def host(self) -> str:
        """Return the address of the first node, at which the others meet it."""
        return self._starters[0].host()

    async def start(self, order: StartOrder) -> RayNodesProcess:
        """Start the command on each node with its number."""
        orders = (
            replace(order, command=command_on(node, order.command))
            for node in range(len(self._starters))
        )
        starts = (starter.start(each) for starter, each in zip(self._starters, orders, strict=True))
        return RayNodesProcess(await asyncio.gather(*starts))


class RayNodesProcess:
    """The processes of several nodes, as the supervisor sees them: one, which ends with any."""

    def __init__(self, processes: Sequence[RayProcess]) -> None:
        self._processes = processes
        self._end = asyncio.create_task(self._end_together())

    @property
    def pid(self) -> int:
        """Return the id of the first node's process."""
        return self._processes[0].pid

    @property
    def exit_code(self) -> int | None:
        """Return None while all run."""
        return self._end.result() if self._end.done() else None

    async def wait(self) -> int:
        """Wait until all have ended, and return the code of the first that failed, or 0."""
        return await asyncio.shield(self._end)

    def terminate(self) -> None:
        """Ask all to end."""
        for process in self._processes:
            process.terminate()

    def kill(self) -> None:
        """Kill them and all that they started."""
        for process in self._processes:
            process.kill()

    async def _end_together(self) -> int:
        codes: list[int] = []

        async def end(process: RayProcess) -> None:
            codes.append(await process.wait())

        ends = [asyncio.create_task(end(process)) for process in self._processes]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        _, running = await asyncio.wait(ends, timeout=_LAST_WORDS_S)
        if running:
            self.kill()
        await asyncio.gather(*ends)
        return CONFIG_ERROR if CONFIG_ERROR in codes else next(filter(None, codes), 0)


async def _answer(reference: Any) -> Any:
    return await reference


def _is_port(name: str) -> bool:
    return name.startswith("DIALOOP_") and name.endswith("_PORT")


def _variables_to_forward() -> dict[str, str]:
    mine = without_tokens(os.environ)
    return {name: value for name, value in mine.items() if name.startswith(_FORWARDED)}
