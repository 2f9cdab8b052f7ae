"""`python -m dialoop_services.inference`: serve one replica of the policy."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dialoop.clients.registry import RegistryClient, ServiceInstance
from dialoop.episode import UpdateMode
from dialoop.errors import InvalidConfig
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason
from dialoop.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from dialoop.v1.template_service_pb2_grpc import add_TemplateServiceServicer_to_server
from dialoop_learning.model.weight_files import num_parameters

from dialoop_services.config.derived import AUTO, device_here
from dialoop_services.config.engines import ENGINES, facts_of_engine
from dialoop_services.config.own_data_plane import load_data_plane
from dialoop_services.hosting.hosts import Host, OwnProcess
from dialoop_services.hosting.server import GrpcServer
from dialoop_services.inference.engine import (
    Engine,
    EngineOptions,
    SupportsAdapters,
    SupportsRoutedExperts,
    SupportsSleep,
    SupportsTransfer,
    engine_stopped,
)
from dialoop_services.inference.generate import routing_of
from dialoop_services.inference.recordings.store import RecordingLimits, RecordingStore
from dialoop_services.inference.rendering import Renderer
from dialoop_services.inference.replica.batching import RequestBatches
from dialoop_services.inference.replica.device_lease import lease_device
from dialoop_services.inference.replica.replica import Replica
from dialoop_services.inference.servicer import InferenceServicer
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.inference.template_servicer import TemplateServicer
from dialoop_services.inference.weights.adapter_files import AdapterLimits
from dialoop_services.inference.weights.publications import ModelDigests, Publications
from dialoop_services.inference.wires.base import WireHost
from dialoop_services.inference.wires.openai.routes import openai_routes
from dialoop_services.runtime.fleet import membership, reachable_address
from dialoop_services.runtime.process import RESTARTS_VARIABLE, run
from dialoop_services.runtime.settings import load
from dialoop_services.runtime.shutdown import owns_process

log = logging.getLogger(__name__)

_SERVICE = "dialoop.v1.InferenceService"
WIRES = (openai_routes,)
"""What each wire serves: a function of a WireHost that returns routes."""
ROLE = "inference"


async def serve() -> None:
    """Start the engine, load the newest policy, serve until a stop signal or the engine's end."""
    settings = load(InferenceSettings)
    await serve_in(OwnProcess(settings), settings)


async def serve_in(host: Host, settings: InferenceSettings) -> None:
    """Serve until the host says stop or the engine dies."""
    loads_weights = facts_of_engine(settings.engine).loads_weights
    needed = "config.json" if loads_weights else "tokenizer.json"
    if not (settings.model_dir / needed).is_file():
        raise InvalidConfig(
            f"There is no {needed} in {settings.model_dir}.",
            remedy="Set DIALOOP_INFERENCE_MODEL_DIR to a Hugging Face model directory.",
        )
    own_data_plane = load_data_plane(settings.data_plane)
    renderer = Renderer.of(settings.model_dir)
    server = host.server
    async with (
        _model_digests(settings.model_dir, loads_weights) as model_digests,  # beside the start
        lease_device(settings.device_lock) as lease,
        _engine(settings) as engine,
    ):

        async def report(serving: bool) -> None:
            await server.set_serving(serving, _SERVICE)

        replica = Replica(
            engine,
            weights_root=settings.weights_root,
            report=report,
            update_mode=UpdateMode[settings.update_mode.upper()],
            lease=lease,
            batches=RequestBatches(settings.batch_limits),
            time_limit=settings.time_limit,
            own_data_plane=own_data_plane,
            takes_deltas=settings.deltas != "never",
            awaits_policy=settings.awaits_policy,
            model_digests=await model_digests,
        )
        log.info("The model is loaded.", extra={"engine": engine.name})
        await replica.load_latest()
        _add_servicers(server, replica, renderer, settings)
        async with server:
            await report(not replica.fault)
            async with _membership(host, replica, settings) as announcing:
                await _until_over(
                    server, replica, wake_after_s=settings.wake_after_s, also=announcing
                )


def _add_servicers(
    server: GrpcServer, replica: Replica, renderer: Renderer, settings: InferenceSettings
) -> None:
    loads_weights = facts_of_engine(settings.engine).loads_weights
    store = RecordingStore(
        RecordingLimits(
            max_recordings=settings.max_recordings,
            max_calls=settings.max_recorded_calls,
            time_to_live_s=settings.recording_ttl_s,
        )
    )
    server.show(
        "dialoop_forks",
        "Prompts that could not continue the tokens given with them.",
        "cause",
        lambda: renderer.num_forks,
    )
    server.show(
        "dialoop_prompt_tokens",
        "Tokens of answered prompts: with keys from the engine's prefix cache, or computed.",
        "keys",
        lambda: replica.prompt_tokens,
    )
    server.show(
        "dialoop_samples", "Samples that ended.", "stop_reason", lambda: replica.num_samples
    )
    server.show(
        "dialoop_sample_queue_seconds",
        "Seconds that samples waited in the engine before their first step.",
        "stop_reason",
        lambda: replica.queue_s,
    )
    servicer = InferenceServicer(
        replica,
        renderer,
        num_parameters=num_parameters(settings.model_dir) if loads_weights else 0,
        max_new_tokens=settings.max_new_tokens,
        store=store,
    )
    host = WireHost(
        replica=replica,
        renderer=renderer,
        store=store,
        model_name=settings.model_name,
        max_new_tokens=settings.max_new_tokens,
    )
    for routes_of in WIRES:
        for route in routes_of(host):
            server.add_route(route)
    templates = TemplateServicer(
        renderer, settings.model_dir.name, max_model_len=replica.engine.max_model_len
    )
    server.add(add_InferenceServiceServicer_to_server, servicer, _SERVICE)
    server.add(add_TemplateServiceServicer_to_server, templates, "dialoop.v1.TemplateService")


@asynccontextmanager
async def _membership(
    host: Host, replica: Replica, settings: InferenceSettings
) -> AsyncIterator[tuple[asyncio.Task[None], ...]]:
    """Keep the replica in the registry, if the settings say so; yield what must not end."""
    if settings.discovery != "registry":
        yield ()
        return
    listens_at = host.server.address
    address = settings.advertised_address or reachable_address(listens_at)
    own_name = f"{socket.gethostname()}-{listens_at.rpartition(':')[2]}"
    name = settings.name or host.ticket_name or own_name
    instance = ServiceInstance(
        role=ROLE,
        name=name,
        address=address,
        rest_address=reachable_address(host.server.rest_address),
    )

    def state(instance: ServiceInstance) -> ServiceInstance:
        return replace(
            instance,
            policy_version=replica.engine.policy_version,
            is_ready=not replica.fault,
            load=float(replica.num_requests_running),
        )

    async with host.connect(settings.replay_address, "replay") as channel:
        registry, incarnation = RegistryClient(channel), host.server.incarnation
        async with membership(registry, settings.run, instance, state, incarnation) as announcing:
            yield (announcing,)


async def _until_over(
    server: GrpcServer,
    replica: Replica,
    *,
    wake_after_s: float,
    also: Iterable[asyncio.Task[None]] = (),
) -> None:
    """Wait for the stop signal; raise when the engine dies first, so that a supervisor restarts.

    The same if a task of `also` fails.
    """
    dying = asyncio.create_task(replica.until_engine_dies())
    dying.add_done_callback(lambda _: server.stop())
    following = asyncio.create_task(replica.follow_latest())
    waking = asyncio.create_task(replica.wake_when_left(after_s=wake_after_s))
    watched = (following, waking, *also)
    for task in watched:
        task.add_done_callback(lambda task: server.stop() if _has_failed(task) else None)
    try:
        await server.wait_until_stopped()
        if dying.done():
            raise engine_stopped()
        for task in watched:
            if task.done():
                task.result()
    finally:
        replica.release()  # else requests that wait for a batch would block the server's drain
        dying.cancel()
        following.cancel()
        waking.cancel()


def _has_failed(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is not None


@asynccontextmanager
async def _model_digests(
    model_dir: Path, loads_weights: bool
) -> AsyncIterator[asyncio.Task[ModelDigests]]:
    """Yield the digests that are being read; none of weights that are outside."""
    reading = asyncio.create_task(
        ModelDigests.of(model_dir) if loads_weights else asyncio.sleep(0, ModelDigests())
    )
    try:
        yield reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


@asynccontextmanager
async def _engine(settings: InferenceSettings) -> AsyncIterator[Engine]:
    engine = await _start_engine(settings)
    try:
        _require_capabilities(engine, settings)
        yield engine
    finally:
        await engine.close()


async def _start_engine(settings: InferenceSettings) -> Engine:
    kind: Any = load_attribute(
        facts_of_engine(settings.engine).path,
        what="engine",
        reason=Reason.ENGINE_NOT_FOUND,
        built_in=ENGINES,
    )
    if not callable(getattr(kind, "start", None)):
        raise _unfit(settings, "has no `start`")
    engine: Engine = await kind.start(
        settings.model_dir,
        EngineOptions(
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            kv_cache_bytes=settings.kv_cache_mib << 20,
            dtype=settings.engine_dtype,
            device=device_here() if settings.device == AUTO else settings.device,
            tensor_parallel_size=settings.tensor_parallel_size,
            num_threads=settings.num_threads,
            seed=_seed_of_start(settings),
            adapters=AdapterLimits(
                max_adapters=settings.max_adapters, max_rank=settings.max_adapter_rank
            ),
            weight_transfer=settings.weight_transfer,
            records_experts=settings.record_routed_experts,
            device_lock=settings.device_lock,
            may_fork=owns_process.get(),
            own=settings.engine_options,
        ),
    )
    members = (*Engine.__annotations__, *vars(Engine))
    missing = [name for name in members if name[0] != "_" and not hasattr(engine, name)]
    if missing:
        raise _unfit(settings, f"has no {', '.join(missing)}")
    return engine


def _seed_of_start(settings: InferenceSettings) -> int:
    """Return the seed: the configured one at first, another one for each later start.

    A replica that came back with the same seed would draw the same random numbers once more. It
    knows a later start by the supervisor's count, and by the policy that is published already.
    """
    num_restarts = os.environ.get(RESTARTS_VARIABLE, "0")
    latest = Publications(settings.weights_root).latest()
    if num_restarts == "0" and latest is None:
        return settings.seed
    version = "" if latest is None else str(latest.policy_version)
    digest = hashlib.sha256(f"{settings.seed} {num_restarts} {version}".encode()).digest()
    return int.from_bytes(digest[:4]) >> 1  # a seed of vLLM has 31 bits


def _require_capabilities(engine: Engine, settings: InferenceSettings) -> None:
    """Refuse an engine that lacks what the settings ask of it."""
    needed = (
        (SupportsAdapters, settings.max_adapters, "max_adapters"),
        (SupportsTransfer, settings.weight_transfer, "data_plane"),
        (SupportsSleep, settings.device_lock, "device_lock"),
        (SupportsRoutedExperts, settings.record_routed_experts, "record_routed_experts"),
    )
    for capability, is_needed, key in needed:
        if is_needed and not isinstance(engine, capability):
            raise _unfit(settings, f"is no {capability.__name__}, which {key} needs")
    if settings.record_routed_experts and routing_of(engine) is None:
        raise _unfit(settings, "has no `routing`, which record_routed_experts needs")


def _unfit(settings: InferenceSettings, problem: str) -> InvalidConfig:
    return InvalidConfig(
        f"The engine {settings.engine} {problem}.",
        reason=Reason.ENGINE_NOT_FOUND,
        remedy="See Engine and the Supports... protocols in dialoop_services.inference.engine.",
    )


if __name__ == "__main__":
    run(serve, name="inference", settings=InferenceSettings)
