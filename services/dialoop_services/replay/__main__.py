"""`python -m dialoop_services.replay`: serve the queue."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

from dialoop.errors import InvalidConfig, Unavailable
from dialoop.reasons import Reason
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1.registry_service_pb2_grpc import add_RegistryServiceServicer_to_server
from dialoop.v1.replay_service_pb2_grpc import add_ReplayServiceServicer_to_server

from dialoop_services.hosting.hosts import Host, OwnProcess
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.registry_servicer import RegistryServicer
from dialoop_services.replay.servicer import ReplayServicer
from dialoop_services.replay.settings import ReplaySettings
from dialoop_services.replay.store import QueueStore
from dialoop_services.replay.unsaved_redis import unsaved_redis
from dialoop_services.runtime.logs import LogSettings
from dialoop_services.runtime.process import run
from dialoop_services.runtime.settings import load

log = logging.getLogger(__name__)

_STATES = ("leased", "unscored", "scored", "training")
_DEPTH_EVERY_S = 5.0


async def serve() -> None:
    """Serve until told to stop."""
    settings = load(ReplaySettings)
    await serve_in(OwnProcess(settings), settings)


async def serve_in(host: Host, settings: ReplaySettings) -> None:
    """Serve until the host stops the service."""
    server = host.server
    async with AsyncExitStack() as exits:
        if settings.store == "memory":
            redis = unsaved_redis(settings.run_dir, on_end=server.stop)
            url = await exits.enter_async_context(redis)
            settings = settings.model_copy(update={"redis_url": url})
        store = await open_store(settings)
        exits.push_async_callback(store.close)
        servicer = ReplayServicer(
            store, vocab_size=settings.read_vocab_size, poll_s=settings.poll_s
        )
        server.show(
            "dialoop_overflow",
            "Groups that were dropped because max_waiting_groups were waiting.",
            "reason",
            lambda: servicer.num_overflowed,
        )
        depth: dict[str, float] = {}
        server.show(
            "dialoop_groups",
            "Training groups of the run that DIALOOP_RUN names, by their state in the queue.",
            "state",
            lambda: depth,
            is_gauge=True,
        )
        if run_id := LogSettings().run:
            measuring = asyncio.create_task(_keep_depth(store, run_id, depth))
            exits.callback(measuring.cancel)
        server.add(add_ReplayServiceServicer_to_server, servicer, "dialoop.v1.ReplayService")
        registry = RegistryServicer(store)
        server.add(add_RegistryServiceServicer_to_server, registry, "dialoop.v1.RegistryService")
        async with server:
            await server.wait_until_stopped()
            servicer.stop_waiting()
            registry.stop_waiting()


async def _keep_depth(store: QueueStore, run_id: str, depth: dict[str, float]) -> None:
    """Keep the number of groups in each state up to date, until cancelled."""
    request = pb.GetStatsRequest(run=run_id)
    while True:
        try:
            counts = (await store.apply(request, pb.GetStatsResponse)).stats.training
        except Unavailable:
            depth.clear()  # what is not known is not shown
        else:
            depth.update({state: getattr(counts, f"num_groups_{state}") for state in _STATES})
        await asyncio.sleep(_DEPTH_EVERY_S)


async def open_store(settings: ReplaySettings) -> QueueStore:
    """Return the configured store after reaching it once.

    Raise InvalidConfig for what is no URL, and (STORE_UNAVAILABLE) when Redis does not answer.
    """
    try:
        store = RedisStore(settings.redis_url, settings.limits, timeout_s=settings.redis_timeout_s)
    except ValueError as error:
        raise InvalidConfig(
            "DIALOOP_REPLAY_REDIS_URL is not a Redis URL.",
            remedy="Give redis://host:port/0, rediss://... or unix:///path.",
        ) from error
    try:
        await store.check()
    except Unavailable as error:
        await store.close()
        raise InvalidConfig(
            f"Redis does not answer at {_without_password(settings.redis_url)} "
            f"({type(error.__cause__).__name__}).",
            reason=Reason.STORE_UNAVAILABLE,
            remedy="Start Redis, or correct DIALOOP_REPLAY_REDIS_URL.",
        ) from error
    log.info("Using %s.", store.description)
    return store


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


if __name__ == "__main__":
    run(serve, name="replay", settings=ReplaySettings)
