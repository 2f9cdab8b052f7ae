"""Every route and method, called with random bytes and with messages that are almost right.

DIALOOP_FUZZ_SEED chooses another seed; a failure prints the seed and the call.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from dialoop_services.hosting import GrpcServer
from dialoop_services.rest.routes import Route, routes_of
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.support.rest_world import http_of, service

SERVICES = {
    "environment": ("EnvironmentService", "RunService"),
    "replay": ("ReplayService", "RegistryService"),
    "inference": ("InferenceService", "TemplateService"),
    "scorer": ("ScorerService",),
    "trainer": ("TrainerService",),
}
SEED = int(os.environ.get("DIALOOP_FUZZ_SEED", "16"))
CALL_S = 0.5
MAX_DEPTH = 5
WORDS = (
    "",
    "a",
    "s",
    "r",
    "main",
    "arithmetic",
    "default",
    "chatml",
    "bytes",
    "{}",
    "\0",
    "ü" * 99,
)
WORDS += ("../x", "a:b", "{{ 9 ** 9 }}", "[1]", '{"a": 1}', "x" * 5000, "nan", "\u202e")
NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    2**31 - 1,
    -(2**31),
    2**53,
    2**63 - 1,
    -(2**63),
    0.5,
    1e308,
    -1e-300,
)
NUMBERS += (float("nan"), float("inf"))
PROTOBUF = {"content-type": "application/x-protobuf"}
# What a caller may be told; the others are the service's own mistakes.
GRPC_MISTAKES = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DATA_LOSS,
}
# A send that meets the end of its call; the service drains what is sent for a second alone.
OF_THE_CLIENT = "Internal error from Core"
HTTP_SERVER_ERRORS = {501, 503, 504}  # documented: not served, not now, not in time


def spread(value: float, bits: int, *, signed: bool) -> int:
    """A whole number of so many bits."""
    whole = int(value) if value == value and abs(value) < 2**63 else 1
    return (whole + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) if signed else whole % 2**bits


@dataclass
class Fuzzer:
    """Makes requests from one stream of random numbers."""

    random: random.Random
    statuses: Counter[str] = field(default_factory=Counter)
    mistakes: list[str] = field(default_factory=list)

    def message(self, kind: type[Message], depth: int = 0) -> Message:
        made = kind()
        for item in made.DESCRIPTOR.fields:
            if self.random.random() < (0.3 if depth else 0.1):
                continue
            if item.message_type is not None and depth >= MAX_DEPTH:
                continue
            self._fill(made, item, depth)
        return made

    def _fill(self, made: Any, item: FieldDescriptor, depth: int) -> None:
        is_map = item.message_type is not None and item.message_type.GetOptions().map_entry
        if is_map:
            fields = item.message_type.fields_by_name
            key, value = self._value(fields["key"]), fields["value"]
            if value.message_type is None:
                getattr(made, item.name)[key] = self._value(value)
            else:
                kind = GetMessageClass(value.message_type)
                getattr(made, item.name)[key].CopyFrom(self.message(kind, depth + 1))
        elif item.message_type is not None:
            kind = GetMessageClass(item.message_type)
            if item.is_repeated:
                for _ in range(self.random.choice((0, 1, 1, 2))):
                    getattr(made, item.name).append(self.message(kind, depth + 1))
            else:
                getattr(made, item.name).CopyFrom(self.message(kind, depth + 1))
        elif item.is_repeated:
            getattr(made, item.name).extend(
                self._value(item) for _ in range(self.random.choice((0, 1, 3)))
            )
        else:
            setattr(made, item.name, self._value(item))

    def _value(self, item: FieldDescriptor) -> Any:
        kinds = FieldDescriptor
        if item.type == kinds.TYPE_ENUM:
            return self.random.choice([*item.enum_type.values_by_number, 77])
        if item.type == kinds.TYPE_BOOL:
            return self.random.random() < 0.5
        if item.type == kinds.TYPE_STRING:
            return self.random.choice(WORDS)
        if item.type == kinds.TYPE_BYTES:
            return self.random.randbytes(self.random.choice((0, 1, 4, 8, 33)))
        number = self.random.choice(NUMBERS)
        if item.type == kinds.TYPE_DOUBLE:
            return float(number)
        if item.type == kinds.TYPE_FLOAT:
            return float(number) if abs(number) < 1e38 or number != number else 1e38
        bits = 32 if item.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_UINT32) else 64
        signed = item.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_INT64)
        return spread(number, bits, signed=signed)

    def content(self, kind: type[Message]) -> bytes:
        """Random bytes, or a message, or one with some bytes changed, cut or added."""
        choice = self.random.random()
        if choice < 0.2:
            return self.random.randbytes(self.random.choice((0, 1, 7, 60, 5000)))
        made = bytearray(self.message(kind).SerializeToString())
        if self.random.random() < 0.1:
            made *= self._longer(len(made))
        if choice < 0.6:
            return bytes(made)
        for _ in range(self.random.choice((1, 2, 8))):
            at = self.random.randrange(len(made) + 1)
            made[at : at + self.random.choice((0, 0, 1, 4))] = self.random.randbytes(
                self.random.choice((0, 1, 1, 3))
            )
        return bytes(made)

    def _longer(self, num_bytes: int) -> int:
        """How often to repeat it, so that its items are counted, or that a thread reads it."""
        return 1 + self.random.choice((1 << 14, 1 << 16)) // max(1, num_bytes)

    def json(self, kind: type[Message]) -> bytes:
        """A message as JSON, or one with some bytes changed."""
        from google.protobuf.json_format import MessageToJson

        made = bytearray(
            MessageToJson(self.message(kind), preserving_proto_field_name=True).encode()
        )
        if self.random.random() < 0.1:
            made += b" " * self._longer(1)
        if self.random.random() < 0.5:
            for _ in range(self.random.choice((1, 3))):
                made[self.random.randrange(len(made))] = self.random.choice(b'{}[]",:019ae\0\xff')
        return bytes(made)

    async def call_grpc(self, channel: grpc.aio.Channel, rpc: MethodDescriptor) -> None:
        path = f"/{rpc.containing_service.full_name}/{rpc.name}"
        content = self.content(GetMessageClass(rpc.input_type))
        kind = ("stream" if rpc.client_streaming else "unary") + (
            "_stream" if rpc.server_streaming else "_unary"
        )
        request = iter([content, content]) if rpc.client_streaming else content
        status = grpc.StatusCode.OK
        try:
            call = getattr(channel, kind)(path)(request, timeout=CALL_S)
            if rpc.server_streaming:
                for _ in range(3):
                    if await call.read() is grpc.aio.EOF:
                        break
                call.cancel()
            else:
                await call
        except grpc.aio.AioRpcError as error:
            status = error.code()
            if status in GRPC_MISTAKES and error.details() != OF_THE_CLIENT:
                self.mistakes.append(f"{path} {content!r}: {status.name} {error.details()}")
        except asyncio.CancelledError:
            status = grpc.StatusCode.CANCELLED
        self.statuses[status.name] += 1

    async def call_rest(self, http: httpx.AsyncClient, route: Route) -> None:
        path = route.path
        for parameter in route.bindings:
            word = self.random.choice(("s", "r", "chatml", "%00", "..%2fx", "a%20b", "x" * 300))
            path = path.replace(f"{{{parameter}}}", word)
        kind = GetMessageClass(route.rpc.input_type)
        is_binary = self.random.random() < 0.5
        headers = {"x-request-timeout-s": str(CALL_S)} | (PROTOBUF if is_binary else {})
        content = self.content(kind) if is_binary else self.json(kind)
        try:
            if route.reads_query:
                raw = self.random.choice((b"", b"a=1", b"%ff=%00", content.hex().encode()[:200]))
                answer = await http.request(route.method, f"{path}?{raw.decode()}")
            else:
                answer = await http.request(route.method, path, content=content, headers=headers)
        except httpx.TimeoutException:
            self.statuses["no end"] += 1  # a stream of events
            return
        self.statuses[str(answer.status_code)] += 1
        is_problem = answer.status_code < 400 or "reason" in answer.json()
        if answer.status_code >= 500 and answer.status_code not in HTTP_SERVER_ERRORS:
            is_problem = False
        if not is_problem:
            self.mistakes.append(
                f"{route.method} {path} {content!r}: {answer.status_code} {answer.text[:300]}"
            )


async def fuzz(
    num_calls: int, *, seed: int, names: Iterable[str] = SERVICES
) -> tuple[Fuzzer, list[int]]:
    """Call all methods of services in turn; return what came back, and memory on the way."""
    fuzzer = Fuzzer(random.Random(seed))
    process, memory = psutil.Process(), []
    async with AsyncExitStack() as exits:
        targets: list[tuple[GrpcServer, grpc.aio.Channel, httpx.AsyncClient, MethodDescriptor]] = []
        routes: dict[str, Route] = {}
        for name in names:
            server = await exits.enter_async_context(service(name))
            channel = await exits.enter_async_context(grpc.aio.insecure_channel(server.address))
            http = await exits.enter_async_context(http_of(server))
            http.timeout = httpx.Timeout(4 * CALL_S)
            for full_name in SERVICES[name]:
                described = descriptor_pool.Default().FindServiceByName(f"dialoop.v1.{full_name}")
                targets += [(server, channel, http, rpc) for rpc in described.methods]
                routes |= {route.rpc.full_name: route for route in routes_of(described)}
        places = asyncio.Semaphore(8)

        async def call(index: int) -> None:
            _, channel, http, rpc = targets[index % len(targets)]
            route = routes.get(rpc.full_name)
            async with places:
                if route is not None and fuzzer.random.random() < 0.5:
                    await fuzzer.call_rest(http, route)
                else:
                    await fuzzer.call_grpc(channel, rpc)

        size = 500
        for begin in range(0, num_calls, size):
            await asyncio.gather(*map(call, range(begin, min(begin + size, num_calls))))
            memory.append(process.memory_info().rss)
        for _, _, http, _ in targets:
            assert (await http.get("/healthz")).status_code == 200
    return fuzzer, memory


def test_every_service_of_the_protos_is_called() -> None:
    names = [name for of_place in SERVICES.values() for name in of_place]
    protos = (Path(__file__).parents[3] / "proto").rglob("*.proto")
    texts = [path.read_text("utf-8") for path in protos]
    assert sorted(names) == sorted(re.findall(r"^service (\w+)", "\n".join(texts), re.M))


async def test_no_bytes_make_a_service_fail():
    fuzzer, _ = await fuzz(800, seed=SEED)
    assert not fuzzer.mistakes, (SEED, len(fuzzer.mistakes), *fuzzer.mistakes[:5])
    assert fuzzer.statuses["OK"] > 10  # some calls do something
    assert fuzzer.statuses["INVALID_ARGUMENT"] > 100
    assert sum(fuzzer.statuses.values()) == 800


@pytest.mark.heavy(reason="10,000 calls of each")
@pytest.mark.parametrize("name", SERVICES)
async def test_ten_thousand_calls_neither_fail_nor_fill_memory(name):
    fuzzer, memory = await fuzz(10_000, seed=SEED + 1, names=[name])
    assert not fuzzer.mistakes, (SEED, len(fuzzer.mistakes), *fuzzer.mistakes[:5])
    assert sum(fuzzer.statuses.values()) == 10_000
    assert memory[-1] < memory[len(memory) // 2] * 1.05 + (8 << 20), memory
