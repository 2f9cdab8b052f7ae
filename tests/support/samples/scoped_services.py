"""Every service of the protos with methods that are not implemented, and tokens of some scopes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import dialoop.v1
import grpc
from dialoop.v1 import scope_pb2
from dialoop.wire.scopes import SCOPES
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime import ServerSettings, load
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

OWN, ADMIN = "own", "admin"
PROTOS = sorted(path.stem for path in Path(dialoop.v1.__path__[0]).glob("*_service_pb2.py"))


def descriptors() -> list[ServiceDescriptor]:
    """Every service of the protos."""
    files = [__import__(f"dialoop.v1.{name}", fromlist=["DESCRIPTOR"]) for name in PROTOS]
    return [s for file in files for s in file.DESCRIPTOR.services_by_name.values()]


def scope_in_proto(rpc: MethodDescriptor) -> str:
    number = rpc.GetOptions().Extensions[scope_pb2.scope]
    return next((name for name, scope in SCOPES.items() if scope == number), "")


def write_tokens(path: Path, secrets: dict[str, Iterable[str]], **more: str) -> Path:
    """A file in which each secret has its scopes; written beside and moved, as a mount does it."""
    lines = []
    for number, (secret, scopes) in enumerate(secrets.items()):
        lines += [
            f"[tokens.t{number}]",
            f'sha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"',
            f"scopes = {json.dumps(list(scopes))}",
            *(f"{key} = {value}" for key, value in more.items()),
        ]
    beside = path.with_suffix(".new")
    beside.write_text("\n".join(lines))
    beside.replace(path)
    return path


@asynccontextmanager
async def serve(
    token_file: Path, services: Iterable[ServiceDescriptor], **settings: Any
) -> AsyncIterator[GrpcServer]:
    """A server of the services whose methods all answer UNIMPLEMENTED."""
    server = GrpcServer(load(ServerSettings, token=OWN, token_file=token_file, **settings))
    for described in services:
        module = __import__(
            f"{described.file.name.removesuffix('.proto').replace('/', '.')}_pb2_grpc",
            fromlist=["*"],
        )
        register = getattr(module, f"add_{described.name}Servicer_to_server")
        server.add(register, getattr(module, f"{described.name}Servicer")(), described.full_name)
    async with server:
        yield server


async def grpc_status(channel: grpc.aio.Channel, rpc: MethodDescriptor, token: str) -> str:
    path = f"/{rpc.containing_service.full_name}/{rpc.name}"
    metadata = [("authorization", f"Bearer {token}")]
    request: Any = iter([b""]) if rpc.client_streaming else b""
    sent, got = (("unary", "stream")[s] for s in (rpc.client_streaming, rpc.server_streaming))
    call = getattr(channel, f"{sent}_{got}")(path)(request, metadata=metadata)
    try:
        await (call.read() if rpc.server_streaming else call)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    code = await call.code()
    return str(code.name)
