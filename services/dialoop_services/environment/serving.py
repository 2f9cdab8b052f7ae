"""The whole service in one context: sessions, servicer, server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from dialoop.environments import Environment, Managed, load_environment
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.environments.sessions.engine import SessionEngine, open_sessions
from dialoop.environments.sessions.records import SessionLimits
from dialoop.errors import InvalidConfig
from dialoop.extras import offered
from dialoop.reasons import Reason
from dialoop.v1.environment_service_pb2_grpc import add_EnvironmentServiceServicer_to_server

from dialoop_services.environment.servicer import EnvironmentServicer
from dialoop_services.environment.settings import EnvironmentSettings
from dialoop_services.hosting import Connect, GrpcServer, OwnProcess

log = logging.getLogger(__name__)

SERVICE = "dialoop.v1.EnvironmentService"

Report = Callable[[bool, str], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEnvironments:
    """What extras add services to: the server before it starts, and what it serves."""

    server: GrpcServer
    settings: EnvironmentSettings
    catalogue: Catalogue
    sessions: SessionEngine
    connect: Connect


ServeExtra = Callable[[ServedEnvironments], AbstractAsyncContextManager[None]]
"""What the entry point `environment_service` names: it adds to the server, and releases on exit."""


@asynccontextmanager
async def serving(
    settings: EnvironmentSettings, catalogue: Catalogue | None = None
) -> AsyncIterator[GrpcServer]:
    """Yield a listening server (`server.address`). Leaving drains it and ends all sessions.

    Without a catalogue this loads the environments of the settings.
    """
    server = GrpcServer(settings)
    async with serving_on(server, settings, catalogue):
        yield server


@asynccontextmanager
async def serving_on(
    server: GrpcServer,
    settings: EnvironmentSettings,
    catalogue: Catalogue | None = None,
    *,
    connect: Connect | None = None,
) -> AsyncIterator[None]:
    """Serve on a server of any kind, which is entered and left together with the sessions.

    `connect` reaches the inference service of the settings; without it the network does. Raise
    InvalidConfig when a managed environment cannot have what it needs.
    """
    catalogue = catalogue or Catalogue(
        load_environment(
            entry.use,
            entry.options,
            tools_in_prompt=entry.tools_in_prompt,
            model_dir=settings.model_dir,
        )
        for entry in settings.entries
    )
    limits = SessionLimits(
        ttl_s=settings.ttl_s,
        max_ttl_s=settings.max_ttl_s,
        capacity=settings.capacity,
        step_timeout_s=settings.step_timeout_s,
        abandon_s=settings.abandon_s,
        max_working=settings.max_working_steps,
        reap_interval_s=settings.reap_interval_s,
    )
    extras = _extras(settings)
    async with AsyncExitStack() as exits:
        for environment in catalogue:
            if isinstance(environment, Managed):
                await environment.acquire()
                exits.push_async_callback(environment.release)
        sessions = await exits.enter_async_context(open_sessions(catalogue, limits))
        servicer = EnvironmentServicer(
            catalogue, sessions, max_concurrent_items=settings.max_concurrent_items
        )
        server.add(add_EnvironmentServiceServicer_to_server, servicer, SERVICE)
        served = ServedEnvironments(
            server=server,
            settings=settings,
            catalogue=catalogue,
            sessions=sessions,
            connect=connect or OwnProcess(settings).connect,
        )
        for extra in extras:
            await exits.enter_async_context(extra(served))
        for environment in catalogue:
            if facts := environment.traits.facts:
                server.describe(f"environments/{environment.name}", facts)
        async with server, asyncio.TaskGroup() as tasks:
            report, interval_s = server.set_serving, settings.health_interval_s
            watching = tasks.create_task(watch_health(catalogue, report, interval_s=interval_s))
            try:
                yield
            finally:
                watching.cancel()


async def watch_health(
    environments: Iterable[Environment], report: Report, *, interval_s: float
) -> None:
    """Report, under `environments/<name>`, each managed environment that works or stops working."""
    managed = [e for e in environments if isinstance(e, Managed)]
    problems: dict[str, str] = {}
    while True:
        for environment in managed:
            name = f"environments/{environment.name}"
            problem = environment.problem()
            if problems.get(name, "") != problem:
                if problem:
                    log.error("%s cannot work: %s", name, problem)
                await report(not problem, name)
                problems[name] = problem
        await asyncio.sleep(interval_s)


def _extras(settings: EnvironmentSettings) -> tuple[ServeExtra, ...]:
    extras: tuple[ServeExtra, ...] = offered("environment_service")
    usual = EnvironmentSettings.model_fields["text_environments"].default
    has_texts = settings.text_environments != usual
    for is_wanted, what, wheel in (
        (settings.openenv, "OpenEnv's clients", "dialoop-extras[openenv]"),
        (has_texts, "Text environments", "dialoop-extras"),
    ):
        if is_wanted and not extras:
            raise InvalidConfig(
                f"{what} are served by dialoop-extras, which is not installed.",
                reason=Reason.PACKAGE_MISSING,
                remedy=f'Run: pip install "{wheel}"',
            )
    return extras
