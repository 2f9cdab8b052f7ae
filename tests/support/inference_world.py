"""A served replica on the tiny model, and how to publish to it."""

from __future__ import annotations

import hashlib
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest
import torch
from dialoop.chat import History, Message
from dialoop.clients.channel import Channel
from dialoop.clients.inference import InferenceClient, WeightsManifest
from dialoop.clients.retry import RetryPolicy
from dialoop.errors import (
    DialoopError,
)
from dialoop.sequences import PolicyVersion
from dialoop.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from dialoop.v1.template_service_pb2_grpc import add_TemplateServiceServicer_to_server
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.config.own_data_plane import load_data_plane
from dialoop_services.hosting.server import GrpcServer
from dialoop_services.inference.engine import Engine, EngineOptions
from dialoop_services.inference.rendering import Renderer
from dialoop_services.inference.replica.device_lease import DeviceLease
from dialoop_services.inference.replica.replica import Replica
from dialoop_services.inference.servicer import InferenceServicer
from dialoop_services.inference.template_servicer import TemplateServicer
from dialoop_services.inference.transformers_engine.engine import TransformersEngine
from dialoop_services.inference.weights.adapter_files import NO_ADAPTERS, AdapterLimits
from dialoop_services.inference.weights.publications import ModelDigests
from dialoop_services.runtime.settings import ServerSettings
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SERVICE = "dialoop.v1.InferenceService"
MAX_MODEL_LEN = 200
_CONSTANT, _AGAINST = 3.0, -20.0
QUESTION = History((Message(role="user", content="35+40"),))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("inference") / "model", seed=0)


def make_endless_model(directory: Path, *, max_model_len: int) -> Path:
    """Write the tiny model with a head of its own that gives the end-of-turn token no chance.

    The first number of each token's embedding is a constant, which the head reads for that token.
    """
    make_tiny_model(directory, seed=0)
    config = json.loads((directory / "config.json").read_text())
    end = config["eos_token_id"]
    config |= {"tie_word_embeddings": False, "max_position_embeddings": max_model_len + 8}
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    head = embeddings.clone()
    embeddings[:, 0] = _CONSTANT
    head[:, 0] = 0.0
    head[end] = 0.0
    head[end, 0] = _AGAINST
    weights["lm_head.weight"] = head
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class World:
    """A replica, its server, and a client of it."""

    def __init__(
        self, replica: Replica, renderer: Renderer, server: GrpcServer, channel: Channel, root: Path
    ) -> None:
        self.replica, self.renderer, self.server, self.root = replica, renderer, server, root
        self.channel = channel
        self.client = InferenceClient(channel)

    async def health(self) -> str:
        async with grpc.aio.insecure_channel(self.server.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))
            return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


@asynccontextmanager
async def world(
    model_dir: Path,
    root: Path,
    *,
    adapters: AdapterLimits = NO_ADAPTERS,
    reads_root: bool = True,
    has_rest: bool = False,
    lease: DeviceLease | None = None,
    data_plane: str = "chunks",
    awaits_policy: bool = False,
    engine: Engine | None = None,
) -> AsyncIterator[World]:
    """A replica that may read `root`, or is on another host; with a REST server if asked."""
    root.mkdir(exist_ok=True)
    engine = engine or await TransformersEngine.start(
        model_dir,
        EngineOptions(max_model_len=MAX_MODEL_LEN, max_num_seqs=16, adapters=adapters),
    )
    server = GrpcServer(ServerSettings(port=0, rest_port=0 if has_rest else None))

    async def report(serving: bool) -> None:
        await server.set_serving(serving, SERVICE)

    weights_root = root if reads_root else None
    replica = Replica(
        engine,
        weights_root=weights_root,
        report=report,
        lease=lease,
        own_data_plane=load_data_plane(data_plane),
        awaits_policy=awaits_policy,
        model_digests=await ModelDigests.of(model_dir),
    )
    await replica.load_latest()
    renderer = Renderer.of(model_dir)
    servicer = InferenceServicer(replica, renderer, num_parameters=7, max_new_tokens=20)
    server.add(add_InferenceServiceServicer_to_server, servicer, SERVICE)
    templates = TemplateServicer(renderer, "tiny", max_model_len=replica.engine.max_model_len)
    server.add(add_TemplateServiceServicer_to_server, templates, "dialoop.v1.TemplateService")
    try:
        async with server, Channel(server.address, retry=RetryPolicy(max_attempts=1)) as channel:
            await report(not replica.fault)
            yield World(replica, renderer, server, channel, root)
    finally:
        await engine.close()


def publish(
    root: Path, model_dir: Path, *, number: int, lineage: str = "main", scale: float = 1.0
) -> WeightsManifest:
    """Other weights, as a trainer would lay them down."""
    torch.manual_seed(number)
    tensors = load_file(model_dir / "model.safetensors")
    noise = {k: t + scale * 0.05 * torch.randn_like(t) for k, t in tensors.items()}
    root.mkdir(exist_ok=True)
    save_file(noise, root / f"{number}.safetensors")
    data = (root / f"{number}.safetensors").read_bytes()
    return WeightsManifest(
        policy_version=PolicyVersion(lineage=lineage, number=number),
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
        path=f"{number}.safetensors",
    )


def point_to(root: Path, manifest: WeightsManifest) -> None:
    version = manifest.policy_version
    pointer = {
        "lineage": version.lineage,
        "number": version.number,
        "path": manifest.path,
        "sha256": manifest.sha256,
        "num_bytes": manifest.num_bytes,
    }
    (root / "latest.json").write_text(json.dumps(pointer))


async def assert_refused(call: object, kind: type[DialoopError], reason: str) -> None:
    with pytest.raises(kind) as caught:
        await call
    assert caught.value.reason == reason
