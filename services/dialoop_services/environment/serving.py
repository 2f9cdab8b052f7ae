"""The whole service in one context: sessions, servicer, server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dialoop.clients.inference import InferenceClient
from dialoop.environments import load_environment
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.environments.sessions.engine import open_sessions
from dialoop.environments.sessions.records import SessionLimits
from dialoop.v1.environment_service_pb2_grpc import add_EnvironmentServiceServicer_to_server

from dialoop_services.environment.holding import held, watched
from dialoop_services.environment.runs import OwnPolicy, Runs, TextCatalogue
from dialoop_services.environment.servicer import EnvironmentServicer
from dialoop_services.environment.settings import EnvironmentSettings
from dialoop_services.runtime import Connect, GrpcServer, OwnProcess, Server

SERVICE = "dialoop.v1.EnvironmentService"


@asynccontextmanager
async def serving(
    settings: EnvironmentSettings, catalogue: Catalogue | None = None
) -> AsyncIterator[GrpcServer]:
    """A listening server, `server.address`; leaving drains it and ends all sessions.

    Without a catalogue the environments of the settings are loaded first.
    """
    server = GrpcServer(settings)
    async with serving_on(server, settings, catalogue):
        yield server


@asynccontextmanager
async def serving_on(
    server: Server,
    settings: EnvironmentSettings,
    catalogue: Catalogue | None = None,
    *,
    connect: Connect | None = None,
) -> AsyncIterator[None]:
    """The same on a server of any kind, which is entered and left with the sessions.

    `connect` reaches the inference service of the settings; absent: over the network.
    """
    catalogue = catalogue or Catalogue(
        load_environment(entry.use, entry.options) for entry in settings.entries
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
    texts = TextCatalogue.from_entries(settings.text_environments)
    async with (
        held(catalogue),
        open_sessions(catalogue, limits) as sessions,
        _own_policy(settings, connect or OwnProcess(settings).connect) as policy,
    ):
        servicer = EnvironmentServicer(
            catalogue,
            sessions,
            Runs(catalogue, texts, policy),
            max_concurrent_items=settings.max_concurrent_items,
        )
        server.add(add_EnvironmentServiceServicer_to_server, servicer, SERVICE)
        if settings.openenv:
            from dialoop_services.environment.openenv_door import OpenEnvDoor

            OpenEnvDoor(catalogue, sessions).add_to(server)
        for environment in catalogue:
            if facts := environment.traits.facts:
                server.describe(f"environments/{environment.name}", facts)
        async with server, asyncio.TaskGroup() as beside:
            report, interval_s = server.set_serving, settings.health_interval_s
            watching = beside.create_task(watched(catalogue, report, interval_s=interval_s))
            try:
                yield
            finally:
                watching.cancel()


@asynccontextmanager
async def _own_policy(settings: EnvironmentSettings, connect: Connect) -> AsyncIterator[OwnPolicy]:
    if not settings.inference_address:
        yield OwnPolicy(None, settings.model_dir)
        return
    async with connect(settings.inference_address) as channel:
        yield OwnPolicy(InferenceClient(channel), settings.model_dir)
