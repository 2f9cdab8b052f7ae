"""Start a whole stack from a config, and yield it once all its services answer.

layout = plan_stack(config, run_dir)
async with running_stack(layout, log):
    layout.address("replay")               # "127.0.0.1:40123", ready
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.running_stacks import STACK_FILE
from dialoop_learning.model.weight_files import weight_files
from dialoop_services.config.derived import VISIBLE
from dialoop_services.runtime.access.principals import ADMIN_TOKEN, DIGEST_MARK, TOKEN

from dialoop_ops.launch.site import Site, this_site
from dialoop_ops.stack.devices import with_data_plane
from dialoop_ops.stack.gpus import driver_lists, hold
from dialoop_ops.stack.layout import Layout, ports_of, without_keys
from dialoop_ops.stack.processes.ports import HOST
from dialoop_ops.stack.processes.redis_server import FoundRedis, find_redis
from dialoop_ops.stack.processes.supervisor import Service, Supervisor, supervise
from dialoop_ops.stack.scaling import Scaling

if TYPE_CHECKING:
    from dialoop_services.config.job import JobConfig
    from dialoop_services.runtime.access.tickets import Authority

    from dialoop_ops.launch.plan import PlannedProcess
    from dialoop_ops.stack.processes.log_stream import LogStream
    from dialoop_ops.stack.run_dir import RunDir

_MODEL_POLL_S = 0.1
_ANNOUNCE_S = 1.0


def plan_stack(
    config: JobConfig, run_dir: RunDir, folder: Path | None = None, site: Site | None = None
) -> Layout:
    """Place the processes, find Redis and choose ports; InvalidConfig when one of them fails.

    The services work in `folder`; None: in the current one. They run on `site`; None: all here.
    """
    site = site or this_site(config)
    config = with_data_plane(config, site.devices)
    redis = find_redis(os.environ) if config.store == "redis" else FoundRedis()
    ports = ports_of(config, with_redis=bool(redis.program))
    password = secrets.token_urlsafe(24)
    url = f"redis://:{password}@{HOST}:{ports['redis']}/0" if redis.program else redis.url
    return Layout(
        config=config,
        run_dir=run_dir,
        folder=folder,
        ports=ports,
        redis_url=url,
        authority=_authority(),
        memory=None if site.hosts else memory_for(config, run_dir),
        devices=site.devices,
        needs=site.needs,
        hosts=site.hosts,
        starters=site.starters,
        grow=site.grow,
        redis_program=redis.program,
    )


def _authority() -> Authority | None:
    """Return who signs the tickets of a stack; None where it has no tokens.

    Where only a file has tokens, nobody knows the stack's own.
    """
    token = os.environ.get(TOKEN, "")
    if token.startswith(DIGEST_MARK):
        raise InvalidConfig(
            f"{TOKEN} is a token's digest, which services of a stack get.",
            reason=Reason.TOKEN_REQUIRED,
            remedy="Set it to the token itself.",
        )
    if not token and os.environ.get("DIALOOP_TOKEN_FILE"):
        token = secrets.token_urlsafe(32)
    if not token:  # anybody on this machine may call, but for what needs an admin token
        return None
    # It imports cryptography, which a stack without tokens does not need.
    from dialoop_services.runtime.access.tickets import Authority

    return Authority.of(token, os.environ.get(ADMIN_TOKEN, ""))


@asynccontextmanager
async def running_stack(layout: Layout, log: LogStream) -> AsyncIterator[Supervisor]:
    """Start everything in the plan; when the context is left, all of it has ended."""
    layout.write_job()
    with (
        without_keys(os.environ),
        _holding_gpus(layout),
        fill_with_latest(layout.memory, layout.run_dir.policies),
    ):
        async with supervise(log) as supervisor:
            with Announcement(layout, supervisor, log) as announcement:
                supervisor.run_beside(announcement.keep_current())
                scaling = Scaling(layout, supervisor, log)
                await _start_all(layout, supervisor)
                announcement.is_ready = True
                announcement.write()
                supervisor.run_beside(scaling.follow())
                if layout.config.console:
                    supervisor.run_beside(_serve_console(layout, supervisor, log))
                yield supervisor


def _holding_gpus(layout: Layout) -> AbstractContextManager[None]:
    """Keep the GPUs of this machine that the plan gives to processes."""
    names = {
        entry for each in layout.devices.values() for entry in each.get(VISIBLE, "").split(",")
    }
    entries, config = names - {""}, layout.config
    gpus = driver_lists() or () if entries else ()
    # Without a driver the names are anybody's, as in a test.
    return hold(entries if gpus else (), gpus, run=config.run, shares=config.resources.overlap)


async def _serve_console(layout: Layout, supervisor: Supervisor, log: LogStream) -> None:
    """Serve the console until the stack stops; the run goes on without one that fails."""
    port = str(layout.ports["console"])
    command = (sys.executable, "-m", "dialoop_ops.stack", "console", "--port", port)
    announced = asyncio.create_task(_announce_console(layout.address("console"), log))
    try:
        code = await supervisor.run_once(
            "console", (*command, "--", str(layout.run_dir.path.resolve()))
        )
    finally:
        announced.cancel()
    log.say("stack", f"The console ended with exit code {code}: {log.last_line('console')}")


async def _announce_console(address: str, log: LogStream) -> None:
    """Print the console's address once a browser can open it."""
    host, _, port = address.rpartition(":")
    while True:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            break
        await asyncio.sleep(_ANNOUNCE_S)
    log.say("stack", f"console: http://{address}/")


class Announcement:
    """stack.json, which `dialoop up`, `status`, `watch`, the console and the SDK read.

    It has the addresses once all services are ready, and at any time what each process does.
    """

    def __init__(self, layout: Layout, supervisor: Supervisor, log: LogStream) -> None:
        self._layout = layout
        self._supervisor = supervisor
        self._log = log
        self._error = ""
        self._path = layout.run_dir.path / STACK_FILE
        self._latest = ""
        self._is_withdrawn = False
        self.is_ready = False

    async def keep_current(self) -> None:
        """Write the file again whenever a process has changed its state."""
        while not self._is_withdrawn:
            self.write()
            await asyncio.sleep(_ANNOUNCE_S)

    def write(self) -> None:
        """Write the file if anything in it is new."""
        layout, services = self._layout, self._layout.services if self.is_ready else ()
        content = {
            "pid": os.getpid(),
            "run_id": layout.run_dir.run_id,
            "addresses": {name: layout.address(name) for name in services},
            "rest_addresses": {name: layout.rest_address(name) for name in services},
            "console": layout.address("console") if services and layout.config.console else "",
            "processes": {each.spec.name: _state_of(each) for each in self._supervisor.services},
        }
        text = json.dumps(content, indent=2) + "\n"
        if text == self._latest or self._is_withdrawn:
            return
        fresh = self._path.with_suffix(".tmp")
        try:
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(self._path)
        except OSError as error:  # `keep_current` tries again
            self._complain(error)
        else:
            self._latest, self._error = text, ""

    def _complain(self, error: OSError) -> None:
        """Say once why the file is not written. A full disk must not end what it supervises."""
        if self._error != str(error):
            self._error = str(error)
            self._log.say("stack", f"{STACK_FILE} cannot be written: {error}", style="yellow")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the file, and never write it again."""
        self._is_withdrawn = True
        self._path.unlink(missing_ok=True)


def _state_of(service: Service) -> dict[str, object]:
    """Return what a process does: its state, its pid, how often it was started again, an alarm."""
    return {
        "state": service.state.name.lower(),
        "pid": service.child.pid if service.child else None,
        "num_restarts": service.num_restarts,
        "alarm": service.alarm,
    }


async def _start_all(layout: Layout, supervisor: Supervisor) -> None:
    """Start each process of the launch plan once those are ready that it waits for."""
    processes = layout.launch_plan().processes
    ready = {process.name: asyncio.Event() for process in processes}

    async def start(process: PlannedProcess) -> None:
        for name in process.after:
            await ready[name].wait()
        if process.needs_model:
            await _model_made(layout)
        await supervisor.start(layout.spec(process.name))
        ready[process.name].set()

    async with asyncio.TaskGroup() as starting:
        for process in processes:
            starting.create_task(start(process))


async def _model_made(layout: Layout) -> None:
    """Wait until the trainer has made the tiny model, which replicas load."""
    while layout.model_to_make() is not None:  # noqa: ASYNC110, another process makes it
        await asyncio.sleep(_MODEL_POLL_S)


MEMORY = Path("/dev/shm")
# Two policies and the one being written. A container may have only 64 MiB.
_NUM_POLICIES = 3
_MIN_BYTES = 32 << 20


def memory_for(config: JobConfig, run_dir: RunDir, *, memory: Path = MEMORY) -> Path | None:
    """Return a folder for the run, always the same; None when memory has no room for policies."""
    if config.inference.data_plane != "shared_memory" or not os.access(memory, os.W_OK):
        return None
    model = run_dir.model(config)
    weights = weight_files(model) if config.model.directory else model.glob("*.safetensors")
    num_bytes = max(_MIN_BYTES, sum(file.stat().st_size for file in weights))
    if shutil.disk_usage(memory).free < _NUM_POLICIES * num_bytes:
        return None
    digest = hashlib.sha256(str(run_dir.path.resolve()).encode()).hexdigest()[:16]
    return memory / f"dialoop-{os.getuid()}-{digest}"


@contextmanager
def fill_with_latest(folder: Path | None, policies: Path) -> Iterator[None]:
    """Keep the folder with only the newest of `policies` in it, and delete it afterwards.

    What a killed stack left in it is deleted first. A replica that starts before the trainer has
    published anything loads the newest policy, as it would from `policies` itself.
    """
    if folder is None:
        yield
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        _copy_latest(policies, folder)
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy_latest(policies: Path, folder: Path) -> None:
    # Whoever killed the stack may have done so before the newest policy was on the disk.
    for name in ("latest.json", "kept.json"):
        try:
            weights = Path(json.loads((policies / name).read_text("utf-8"))["path"])
        except (OSError, ValueError, KeyError):  # none, or a disk damaged it
            continue
        if (policies / weights).is_file():
            (folder / weights).parent.mkdir(parents=True)
            shutil.copyfile(policies / weights, folder / weights)
            shutil.copyfile(policies / name, folder / "latest.json")
            return
