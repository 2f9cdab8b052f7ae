"""Run every service in this process, without Redis and ports: for notebooks and tests.

async with in_process() as dialoop:             # or: with blocking_in_process() as dialoop
    task = await dialoop.task("arithmetic", num_trajectories=4)
    group = await dialoop.play_group(task)

The config is that of `dialoop train` as a mapping, say {"model": {"directory": "..."}}; an
environment of a notebook's own is {"environment": {"use": "__main__:environment", "name": "..."}}.
The engine is transformers and the queue is in memory. Nothing is trained, and no collector plays,
unless the config says {"train": {"num_steps": ...}}. Agents call the policy over HTTP, so a replica
gets a port on 127.0.0.1 where the config names an agent.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dialoop import BlockingDialoop, Dialoop
from dialoop.clients.blocking.loop import BackgroundLoop
from dialoop.clients.trainer import Phase
from dialoop.errors import DialoopError, InvalidConfig, Unavailable
from dialoop.reasons import Reason
from dialoop_services.config.engines import facts_of_engine
from dialoop_services.config.file import (
    LoadedConfig,
    override_in,
    parse_config,
    read_values,
)
from dialoop_services.hosting.in_process import InProcessNetwork
from dialoop_services.runtime.cores import threads_of
from dialoop_services.runtime.exit_reason import known_error
from dialoop_services.runtime.settings import load

from dialoop_ops.stack import preflight
from dialoop_ops.stack.layout import (
    SETTINGS,
    STOP_ORDER,
    Layout,
    replica_names,
    rest_name,
    service_of,
    variables_of_tables,
)
from dialoop_ops.stack.processes.ports import choose_ports
from dialoop_ops.stack.report import summary
from dialoop_ops.stack.report.observer import PhaseClock
from dialoop_ops.stack.run_dir import RunDir, open_run

if TYPE_CHECKING:
    from dialoop.clients.channel import Channel
    from dialoop.clients.registry import ServiceInstance
    from dialoop.clients.retry import RetryPolicy
    from dialoop_services.config.job import JobConfig
    from dialoop_services.hosting.hosts import Connect
    from dialoop_services.hosting.server import GrpcServer


log = logging.getLogger(__name__)

_STARTED_IN_S = 120.0
_STOPPED_IN_S = 30.0
_ENDS_IN_S = 10.0
_POLL_S = 0.2
_REACHABLE = ("environment", "inference", "replay", "scorer", "trainer")


@asynccontextmanager
async def in_process(
    config: Mapping[str, Any] | None = None, *, folder: str | Path | None = None
) -> AsyncIterator[Dialoop]:
    """Run every service until the context is left; call them through the Dialoop that it yields.

    Weights, checkpoints and metrics go to `folder`/<run>; without a folder they are deleted at the
    end. InvalidConfig for a config that needs other processes.
    """
    serving = {"run": "in-process", "train": {"num_steps": 0}, "evaluation": {"num_tasks": 0}}
    job = read_job({**serving, **(config or {})}).config
    with ExitStack() as exits:
        if folder is None:
            folder = exits.enter_context(tempfile.TemporaryDirectory(prefix="dialoop-"))
        run_dir = exits.enter_context(open_run(Path(folder), job, fresh=False, reuse=True))
        async with _running(job, run_dir) as (services, dialoop):
            yield dialoop
            services.require_no_failure()


async def train_in_process(
    loaded: LoadedConfig, *, folder: Path, fresh: bool = False
) -> dict[str, Any]:
    """Run a whole job in this process, write its summary.json and return what that holds.

    `loaded` is from `read_job`. Raise Unavailable (JOB_FAILED) when the trainer fails.
    """
    job = loaded.config
    with modules_of(loaded.folder), open_run(folder, job, fresh=fresh) as run_dir:
        clock = PhaseClock(run_dir.path)
        async with _running(job, run_dir) as (services, dialoop):
            clock.record("starting")
            await _until_done(services, dialoop, clock)
            # Now nothing writes to the queue any more.
            await services.stop("collector", "scorer")
            stats = await dialoop.replay.get_stats(run_dir.run_id)
        clock.record("stopping")
        rescoring = await asyncio.to_thread(_rescore, job, run_dir)
        clock.record("re-scoring")
        return summary.conclude(
            run_dir,
            job,
            stats=stats,
            rescoring=rescoring,
            seconds_by_phase=clock.seconds,
            num_sampled_tokens=clock.num_sampled_tokens,
        )


async def _until_done(services: _Services, dialoop: Dialoop, clock: PhaseClock) -> None:
    """Wait until training is done."""
    while True:
        try:
            status = await dialoop.trainer.get_status()
        except DialoopError:  # its server closes before its task has ended with the cause
            await services.require_running()
            raise
        services.require_no_failure()
        policy = await dialoop.inference.get_policy()
        clock.record(status.phase.name.lower(), policy.num_sampled_tokens)
        if status.phase is Phase.DONE:
            return
        if status.phase is Phase.FAILED:
            await services.require_running()  # its task ends with the cause
            raise Unavailable(f"Training failed: {status.failure}", reason=Reason.JOB_FAILED)
        await asyncio.sleep(_POLL_S)


def _rescore(job: JobConfig, run_dir: RunDir) -> dict[str, Any]:
    options = summary.rescoring_options(job)
    if not options:
        return dict(summary.NOT_RESCORED)
    from dialoop_ops.policies.rescore import rescore

    return rescore(run_dir.path, run_dir.model(job), **options)


@asynccontextmanager
async def _running(job: JobConfig, run_dir: RunDir) -> AsyncIterator[tuple[_Services, Dialoop]]:
    """Yield the services and a client of them; all of them have ended when this is left."""
    async with AsyncExitStack() as exits:
        services = _Services(_LayoutOfNames(config=job, run_dir=run_dir, ports=_rest_ports(job)))
        exits.push_async_callback(services.stop)
        await services.start()
        _freeze_garbage(exits)
        channels = {name: services.network.connect(name) for name in _REACHABLE}
        for channel in channels.values():
            exits.push_async_callback(channel.close)
        yield (
            services,
            Dialoop(
                environment=channels["environment"],
                inference=channels["inference"],
                replay=channels["replay"],
                scorer=channels["scorer"],
                trainer=channels["trainer"],
            ),
        )


def _freeze_garbage(exits: AsyncExitStack) -> None:
    """Exempt the objects that exist now from garbage collection, until `exits` closes.

    Torch and transformers hold 400,000 objects. Walking them took 8% of the CPU of training a tiny
    model, and stopped all services during each collection.
    """
    gc.collect()
    gc.freeze()
    exits.callback(gc.unfreeze)


@contextmanager
def blocking_in_process(
    config: Mapping[str, Any] | None = None, *, folder: str | Path | None = None
) -> Iterator[BlockingDialoop]:
    """Run every service as `in_process` does, on an event loop in a background thread."""
    with BackgroundLoop() as loop:
        context = in_process(config, folder=folder)
        dialoop = loop.run(context.__aenter__())
        try:
            yield BlockingDialoop.of_dialoop(dialoop, loop)
        finally:
            loop.run(context.__aexit__(None, None, None))


def _rest_ports(job: JobConfig) -> dict[str, int]:
    """Choose a port for the REST server of each replica, which agents alone need."""
    if not any(section.agent for section in job.all_environments):
        return {}
    return choose_ports({rest_name(name): 0 for name in replica_names(job)})


class _LayoutOfNames(Layout):
    """A layout whose addresses are names."""

    def address(self, name: str) -> str:
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """The server and the connections that a service gets."""

    server: GrpcServer
    connect: Connect
    ticket_name: str = ""


def _mains() -> dict[str, Callable[..., Coroutine[Any, Any, None]]]:
    """Return what serves each service; imported here, since it imports torch."""
    from dialoop_services.collector.__main__ import serve_in as collector
    from dialoop_services.environment.__main__ import serve_in as environment
    from dialoop_services.inference.__main__ import serve_in as inference
    from dialoop_services.replay.__main__ import serve_in as replay
    from dialoop_services.scorer.__main__ import serve_in as scorer
    from dialoop_services.trainer.__main__ import serve_in as trainer

    return {
        "collector": collector,
        "environment": environment,
        "inference": inference,
        "replay": replay,
        "scorer": scorer,
        "trainer": trainer,
    }


class _Services:
    """The tasks in which the services run, from the first start to the last end."""

    def __init__(self, layout: Layout) -> None:
        self.network = InProcessNetwork()
        self._layout = layout
        self._servers: dict[str, GrpcServer] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Start all services; raise what keeps one from starting."""
        layout = self._layout
        await asyncio.to_thread(_make_model, layout)
        # One after the other, since transformers cannot load two models in one process at a time.
        # Without training no episodes are needed.
        collector = ("collector",) if layout.config.train.num_steps else ()
        for name in ("replay", "environment", *layout.replicas, "trainer", "scorer", *collector):
            self._begin(name)
            await self._until_up(name)

    async def stop(self, *names: str) -> None:
        """End these services, or all; those that make work for others end first."""
        order = sorted(self._tasks, key=lambda name: STOP_ORDER.index(service_of(name)))
        for name in (name for name in order if not names or name in names):
            self._servers[name].stop()
            _, late = await asyncio.wait([self._tasks[name]], timeout=_STOPPED_IN_S)
            for task in late:
                log.warning("Service %s does not end and is cancelled.", name)
                task.cancel()
                await asyncio.wait([task])

    def require_no_failure(self) -> None:
        """Raise the error of a service that ended by itself: Dialoop's own, if there is one."""
        for task in self._tasks.values():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise known_error(error) or error

    async def require_running(self) -> None:
        """Raise the error of the first service that ends, if one does soon."""
        await asyncio.wait(
            self._tasks.values(), timeout=_ENDS_IN_S, return_when=asyncio.FIRST_COMPLETED
        )
        self.require_no_failure()

    def _begin(self, name: str) -> None:
        service = service_of(name)
        settings = load(SETTINGS[service], **self._layout.values_of(name))
        serve_in = _mains()[service]
        rest_port = self._layout.ports.get(rest_name(name))
        self._servers[name] = server = self.network.server(name, rest_port=rest_port)
        host = _Host(server=server, connect=self._connect)
        self._tasks[name] = asyncio.create_task(serve_in(host, settings))

    def _connect(
        self, address: str, to: str | ServiceInstance, *, retry: RetryPolicy | None = None
    ) -> Channel:
        return self.network.connect(address, to, retry=retry)

    async def _until_up(self, name: str) -> None:
        """Wait until a service listens; raise what keeps it from listening."""
        listening = asyncio.create_task(self._listening(name))
        waited: list[asyncio.Task[None]] = [listening, *self._tasks.values()]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            self.require_no_failure()
            await listening
        finally:
            listening.cancel()

    async def _listening(self, name: str) -> None:
        async with self.network.connect(name) as channel:
            await channel.wait_until_connected(timeout_s=_STARTED_IN_S)


def read_job(config: Mapping[str, Any] | str | Path) -> LoadedConfig:
    """Return a config with what one process needs; InvalidConfig when it says otherwise.

    The config is a mapping, or the path of a job file.
    """
    folder, source = Path.cwd(), "the config"
    if not isinstance(config, Mapping):
        folder, source = (folder / config).parent, str(config)
        config = read_values(Path(config))
    with modules_of(folder):
        job = preflight.check(_job(config, source))
    return LoadedConfig(config=job, origins={}, folder=folder)


@contextmanager
def modules_of(folder: Path) -> Iterator[None]:
    """Let Python find the modules of a folder until the context is left."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _job(config: Mapping[str, Any], source: str) -> JobConfig:
    needed = {"engine": "transformers", "store": "memory"}
    for key, value in needed.items():
        chosen = config.get(key, value)
        fits = facts_of_engine(str(chosen)).in_process if key == "engine" else chosen == value
        if not fits:
            raise InvalidConfig(
                f'{key} is "{config[key]}", which needs other processes than this one.',
                remedy=f'Leave it out, or run `dialoop up` with {key} = "{config[key]}".',
            )
    for key in ("num_processes", "num_nodes"):
        if config.get("train", {}).get(key, 1) > 1:
            raise InvalidConfig(
                f"train.{key} is above 1, and everything runs in this one process.",
                remedy=f"Leave train.{key} out, or run `dialoop train`.",
            )
    values = deepcopy({**needed, **config})
    for override in variables_of_tables(os.environ):
        override_in(values, override)
    return parse_config(values, source=source)


def _make_model(layout: Layout) -> None:
    directory = layout.model_to_make()
    if directory is None:
        return
    import torch
    from dialoop_learning.model.tiny import make_tiny_model

    # A worker keeps the number of threads with which it begins, and sums depend on that number.
    torch.set_num_threads(threads_of(layout.config.train.num_threads))
    make_tiny_model(directory, seed=layout.config.seed)
