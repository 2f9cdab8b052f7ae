"""Clients of other makes: unary, streams, deadlines, cancels, TLS and mutual TLS."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dialoop.v1 import environment_service_pb2 as pb
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from tests.support.rest_world import service
from tests.support.samples.certificates import make_authority, make_certificate

PROGRAMS = Path(__file__).parents[2] / "support" / "programs"
TOKEN = "own"
pytestmark = pytest.mark.heavy(reason="installs clients from PyPI and npm")
CONNECT = ["@connectrpc/connect@2", "@connectrpc/connect-node@2", "@bufbuild/protobuf@2"]
EXPECTED = {
    "unary": "OK",
    "without a token": "UNAUTHENTICATED",
    "not a message": "INVALID_ARGUMENT",
    "of no session": "NOT_FOUND",
    "a stream, then cancelled": "0801",  # SERVING
    "a deadline": "DEADLINE_EXCEEDED",
    "both ways": "OK",
    "cut off": "INVALID_ARGUMENT",
}


@pytest.fixture(scope="module", params=["grpclib", "grpc-js", "connect-node"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "grpclib":
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        own = str(folder / "bin" / "python")
        subprocess.run([own, "-m", "pip", "install", "-q", "grpclib==0.4.9"], check=True)
        return [own, str(PROGRAMS / "grpclib_client.py")]
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    (folder / "package.json").write_text("{}")
    packages, source = {
        "grpc-js": (["@grpc/grpc-js@1"], "grpc_js_client.cjs"),
        "connect-node": (CONNECT, "connect_client.mjs"),
    }[request.param]
    subprocess.run(["npm", "install", "--no-audit", *packages], cwd=folder, check=True)
    (folder / "descriptors.binpb").write_bytes(descriptors().SerializeToString())
    return ["node", str(shutil.copy(PROGRAMS / source, folder))]


def descriptors() -> FileDescriptorSet:
    """Return the files of the services that are called, each after those that it imports."""
    files: dict[str, FileDescriptor] = {}

    def add(file: FileDescriptor) -> None:
        for imported in file.dependencies:
            add(imported)
        files[file.name] = file

    add(pb.DESCRIPTOR)
    add(health_pb2.DESCRIPTOR)
    made = FileDescriptorSet()
    for file in files.values():
        file.CopyToProto(made.file.add())
    return made


def end_of_none() -> Message:
    request = pb.InteractRequest()
    request.end.SetInParent()
    return request


@pytest.mark.parametrize("kind", ["plain", "tls", "mutual tls"])
async def test_a_client_of_another_make_gets_each_status(program, kind, tmp_path):
    authority = make_authority(tmp_path)
    own, theirs = (make_certificate(tmp_path, authority, name) for name in ("server", "client"))
    settings = {"token": TOKEN}
    words: list[Path] = []
    if kind != "plain":
        settings |= {"tls_certificate": own.certificate, "tls_key": own.key}
        words = [authority.certificate]
    if kind == "mutual tls":
        settings |= {"tls_ca": authority.certificate, "tls_mutual": True}
        words += [theirs.certificate, theirs.key]
    async with service("environment", **settings) as server:
        host, _, port = server.address.rpartition(":")
        end = end_of_none().SerializeToString().hex()
        running = await asyncio.create_subprocess_exec(
            *program, end, host, port, TOKEN, *map(str, words), stdout=subprocess.PIPE
        )
        printed, _ = await asyncio.wait_for(running.communicate(), 120)
    assert json.loads(printed) == EXPECTED
