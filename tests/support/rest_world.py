"""Every service with light twins instead of engines, and the doors to call it through."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import grpc
import httpx
import numpy as np
from dialoop.environments import ArithmeticTasks, ExactResult, arithmetic, tool_environment
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.errors import ERRORS_BY_STATUS, Status
from dialoop.sequences import PolicyVersion
from dialoop.templates.chat_template import ChatTemplate
from dialoop.testing import byte_tokenizer
from dialoop.trajectory import StopReason
from dialoop.v1 import (
    inference_service_pb2_grpc,
    replay_service_pb2_grpc,
    scorer_service_pb2_grpc,
    template_service_pb2_grpc,
    trainer_service_pb2_grpc,
)
from dialoop_services.environment.serving import serving_on
from dialoop_services.environment.settings import EnvironmentSettings
from dialoop_services.hosting import GrpcServer
from dialoop_services.hosting.in_process import InProcessNetwork
from dialoop_services.inference.__main__ import WIRES
from dialoop_services.inference.engine import (
    LoadTimes,
    Sampled,
    Scored,
    TokenChunk,
    VersionSpan,
    require_ids,
)
from dialoop_services.inference.recordings.store import RecordingLimits, RecordingStore
from dialoop_services.inference.rendering import Renderer
from dialoop_services.inference.replica.replica import Replica
from dialoop_services.inference.servicer import InferenceServicer
from dialoop_services.inference.template_servicer import TemplateServicer
from dialoop_services.inference.weights.adapter_files import AdapterLimits, AdapterSpace
from dialoop_services.inference.wires.base import WireHost
from dialoop_services.replay.servicer import ReplayServicer
from dialoop_services.replay.store import QueueLimits
from dialoop_services.rest.routes import Route, routes_of
from dialoop_services.rest.schema import decode, models
from dialoop_services.runtime import ServerSettings, load
from dialoop_services.scorer.reference_batches import ReferenceBatches
from dialoop_services.scorer.scoring import Scoring
from dialoop_services.scorer.servicer import Scorer, ScorerServicer
from google.protobuf import descriptor_pool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.support.queue_model.store import ModelStore
from tests.support.waiting import PATIENCE_S

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Without the authorities of the world, which a client else reads in 24 ms."""

MAIN_3 = PolicyVersion(lineage="main", number=3)


def secret(query: str) -> str:
    raise RuntimeError("secret text")


def failing_environment():
    return tool_environment(
        name="failing", tasks=ArithmeticTasks(), tools=[secret], rewards=[ExactResult()]
    )


class TwinEngine:
    """Answers "7" whatever is asked."""

    name, version, max_model_len, vocab_size = "twin", "1", 200, 258
    policy_version = MAIN_3
    is_alive = True
    adapter_space = AdapterSpace(limits=AdapterLimits(max_adapters=1, max_rank=8), shapes={})

    async def sample(self, prompt_ids, sampling, *, stop, num_samples=1, adapter=None):
        ids = (*byte_tokenizer().encode("7").ids, *byte_tokenizer().end_of_turn_ids[:1])
        spans = (VersionSpan(start=0, length=len(ids), policy_version=MAIN_3),)
        sample = Sampled(
            token_ids=ids,
            logprobs=(-0.1,) * len(ids),
            versions=spans,
            stop_reason=StopReason.STOP,
        )
        return (sample,) * min(num_samples, 4)

    async def stream(self, prompt_ids, sampling, *, stop, on_tokens, adapter=None):
        (sampled,) = await self.sample(prompt_ids, sampling, stop=stop)
        for token, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True):
            on_tokens(TokenChunk(token_ids=(token,), logprobs=(logprob,), policy_version=MAIN_3))
        return sampled

    async def logprobs(self, token_ids, *, adapter=None):
        require_ids(token_ids, vocab_size=self.vocab_size)
        values = np.full(max(len(token_ids) - 1, 0), -0.1, dtype=np.float32)
        return Scored(logprobs=values, policy_version=MAIN_3)

    async def add_adapter(self, adapter):
        """Taken."""

    async def remove_adapter(self, adapter):
        """Given up."""

    async def load_weights(self, path, version, **mode):
        return LoadTimes(pause_s=0.0, load_s=0.0)

    async def pause(self):
        """Nothing runs."""

    async def resume(self):
        """Nothing waits."""

    async def close(self):
        """Nothing is held."""


class FlatReference:
    """Finds everything equally likely."""

    def logprobs_of_sampled(self, sequences, temperatures):
        return [np.full(s.num_model_tokens, -2.0, dtype=np.float32) for s in sequences]

    def logprobs_of_all(self, token_ids, temperatures):
        return [np.full(max(len(ids) - 1, 0), -2.0, dtype=np.float32) for ids in token_ids]


class FixedTrainer(trainer_service_pb2_grpc.TrainerServiceServicer):
    """Stands at one train step."""

    async def GetStatus(self, request, context):  # noqa: N802
        metrics = {"train/loss": 0.5, "train/nan": float("nan")}
        return _pb("GetStatusResponse", phase=3, num_train_steps=7, metrics=metrics)

    async def WatchPolicy(self, request, context):  # noqa: N802
        for number in (3, 4):
            version = {"lineage": "main", "number": number}
            yield _pb("WatchPolicyResponse", policy_version=version)

    async def Publish(self, request, context):  # noqa: N802
        return _pb("PublishResponse", publish_s=0.5)

    async def Checkpoint(self, request, context):  # noqa: N802
        return _pb("CheckpointResponse", path="c", num_train_steps=7)

    async def Pause(self, request, context):  # noqa: N802
        return _pb("TrainerServicePauseResponse")

    async def Resume(self, request, context):  # noqa: N802
        return _pb("TrainerServiceResumeResponse")

    async def Evaluate(self, request, context):  # noqa: N802
        return _pb("EvaluateResponse", mean_reward=0.25, num_trajectories=request.max_tasks)


def _pb(name: str, **fields: Any) -> Message:
    descriptor = descriptor_pool.Default().FindMessageTypeByName(f"dialoop.v1.{name}")
    return GetMessageClass(descriptor)(**fields)


@asynccontextmanager
async def service(name: str, **fields: Any) -> AsyncIterator[GrpcServer]:
    """One service with both doors."""
    settings = settings_of(name, **{"rest_port": 0, "drain_s": 1} | fields)
    server = GrpcServer(settings)
    async with rest_door(name, server, settings):
        yield server


@asynccontextmanager
async def service_in_process(name: str, **fields: Any) -> AsyncIterator[InProcessNetwork]:
    """One service without a server, at its name."""
    settings = settings_of(name, **fields)
    network = InProcessNetwork(token=settings.token.get_secret_value())
    async with rest_door(name, network.server(name, drain_s=1), settings):
        yield network


def settings_of(name: str, **fields: Any) -> ServerSettings:
    return load(EnvironmentSettings if name == "environment" else ServerSettings, **fields)


@asynccontextmanager
async def rest_door(name: str, server: GrpcServer, settings: ServerSettings) -> AsyncIterator[None]:
    """The servicers of a service on a server of either kind."""
    if isinstance(settings, EnvironmentSettings):
        catalogue = Catalogue([arithmetic(), failing_environment()])
        async with serving_on(server, settings, catalogue):
            yield
        return
    async with AsyncExitStack() as exits:
        {"replay": _replay, "inference": _inference, "scorer": _scorer, "trainer": _trainer}[name](
            server, exits
        )
        await exits.enter_async_context(server)
        yield


def _replay(server: GrpcServer, exits: AsyncExitStack) -> None:
    limits = QueueLimits(lease_s=60, max_waiting_groups=1, overflow="reject")
    servicer = ReplayServicer(ModelStore(limits), vocab_size=lambda: 100)
    register = replay_service_pb2_grpc.add_ReplayServiceServicer_to_server
    server.add(register, servicer, "dialoop.v1.ReplayService")
    exits.callback(servicer.stop_waiting)


def _inference(server: GrpcServer, exits: AsyncExitStack) -> None:
    async def report(serving: bool) -> None:
        """Nobody asks."""

    tokenizer = byte_tokenizer()
    renderer = Renderer(tokenizer, ChatTemplate.of(tokenizer))
    replica = Replica(TwinEngine(), weights_root=None, report=report)
    store = RecordingStore(RecordingLimits())
    servicer = InferenceServicer(
        replica, renderer, num_parameters=7, max_new_tokens=20, store=store
    )
    host = WireHost(
        replica=replica, renderer=renderer, store=store, model_name="bytes", max_new_tokens=20
    )
    for route in (route for wire in WIRES for route in wire(host)):
        server.add_route(route)
    register = inference_service_pb2_grpc.add_InferenceServiceServicer_to_server
    server.add(register, servicer, "dialoop.v1.InferenceService")
    register = template_service_pb2_grpc.add_TemplateServiceServicer_to_server
    templates = TemplateServicer(renderer, "bytes", max_model_len=replica.engine.max_model_len)
    server.add(register, templates, "dialoop.v1.TemplateService")


def _scorer(server: GrpcServer, exits: AsyncExitStack) -> None:
    reference = ReferenceBatches(FlatReference)
    scorer = Scorer(Scoring(reference=reference), {"reference": reference})
    register = scorer_service_pb2_grpc.add_ScorerServiceServicer_to_server
    server.add(register, ScorerServicer(scorer), "dialoop.v1.ScorerService")


def _trainer(server: GrpcServer, exits: AsyncExitStack) -> None:
    register = trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server
    server.add(register, FixedTrainer(), "dialoop.v1.TrainerService")


@contextmanager
def service_in_a_thread(name: str, **fields: Any) -> Iterator[GrpcServer]:
    """One service in a thread of its own, with an event loop of its own."""
    servers: list[GrpcServer] = []
    is_up, stopping = threading.Event(), threading.Event()

    async def run() -> None:
        async with service(name, **fields) as server:
            servers.append(server)
            is_up.set()
            await asyncio.to_thread(stopping.wait)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert is_up.wait(PATIENCE_S)
        yield servers[0]
    finally:
        stopping.set()
        thread.join(PATIENCE_S)


@contextmanager
def service_url(name: str, **fields: Any) -> Iterator[str]:
    """The URL of a service that runs in a thread of its own."""
    with service_in_a_thread(name, **fields) as server:
        yield f"http://{server.rest_address}"


def routes(service_name: str) -> dict[str, Route]:
    """The routes of a service (`EnvironmentService`) by rpc."""
    descriptor = descriptor_pool.Default().FindServiceByName(f"dialoop.v1.{service_name}")
    return {route.rpc.name: route for route in routes_of(descriptor)}


class Refusal(tuple):
    """(HTTP status, reason), whichever door it came through."""


class GrpcDoor:
    """Calls by gRPC, or by what stands in its place."""

    def __init__(self, channel: Any, token: str = "") -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    async def __call__(self, rpc: str, request: Message) -> Message | Refusal:
        service_name, _, name = rpc.partition(".")
        answer = GetMessageClass(routes(service_name)[name].rpc.output_type)
        call = self._channel.unary_unary(
            f"/dialoop.v1.{service_name}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return await call(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            kind = ERRORS_BY_STATUS[Status(error.code().value[0])]
            info = error_details_pb2.ErrorInfo()
            rpc_status.from_call(error).details[0].Unpack(info)
            return Refusal((kind.http_status, info.reason))

    async def close(self) -> None:
        await self._channel.close()


class RestServer:
    """Calls by REST, in JSON or in protobuf."""

    def __init__(self, server: GrpcServer, token: str = "", *, binary: bool = False) -> None:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.AsyncClient(
            base_url=f"http://{server.rest_address}",
            headers=headers,
            timeout=PATIENCE_S,
            verify=NO_TLS,
        )
        self._binary = binary
        self._models = models()

    async def __call__(self, rpc: str, request: Message) -> Message | Refusal:
        service_name, _, name = rpc.partition(".")
        route = routes(service_name)[name]
        response = await self.http.request(
            route.method, _path(route, request), **self._arguments_of(route, request)
        )
        if response.status_code != 200:
            assert response.headers["content-type"] == "application/problem+json"
            assert response.json()["status"] == response.status_code
            return Refusal((response.status_code, response.json()["reason"]))
        kind = GetMessageClass(route.rpc.output_type)
        if self._binary:
            assert response.headers["content-type"] == "application/x-protobuf"
            return kind.FromString(response.content)
        model = self._models.model(route.rpc.output_type)
        return decode(model.model_validate_json(response.content), kind)

    def _arguments_of(self, route: Route, request: Message) -> dict[str, Any]:
        fields = self._models.encoder(route.rpc.input_type)(request)
        for path in route.bindings.values():
            *inside, last = path.split(".")
            owner = fields
            for name in inside:
                owner = owner.get(name, {})
            owner.pop(last, None)
        accept = {"accept": "application/x-protobuf"} if self._binary else {}
        if route.reads_query:
            texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in fields.items()}
            return {"params": texts, "headers": accept}
        if self._binary:
            headers = accept | {"content-type": "application/x-protobuf"}
            return {"content": request.SerializeToString(), "headers": headers}
        return {"json": fields}

    async def close(self) -> None:
        await self.http.aclose()


def _path(route: Route, request: Message) -> str:
    path = route.path
    for parameter, field in route.bindings.items():
        value: Any = request
        for name in field.split("."):
            value = getattr(value, name)
        path = path.replace(
            f"{{{parameter}}}", httpx.URL(f"http://h/{value}").raw_path[1:].decode()
        )
    return path


def http_of(server: GrpcServer, token: str = "") -> httpx.AsyncClient:
    """An HTTP client of a server's REST server."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.AsyncClient(
        base_url=f"http://{server.rest_address}",
        headers=headers,
        timeout=PATIENCE_S,
        trust_env=False,
        verify=NO_TLS,
    )


def refusal(response: httpx.Response) -> tuple[int, str]:
    """Status and reason of a problem document that is whole."""
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == response.status_code
    assert problem["detail"]
    assert problem["remedy"]
    return response.status_code, problem["reason"]
