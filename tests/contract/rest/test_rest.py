"""The REST server of real services: their own pages, streams, deadlines, the end."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
import socket
import subprocess
import sys

import httpx
import pytest
from dialoop.errors import InvalidConfig
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1 import environment_service_pb2_grpc as stubs
from dialoop.v1 import replay_service_pb2
from dialoop_services.hosting import GrpcServer
from dialoop_services.rest import requests
from dialoop_services.runtime import ServerSettings, load
from google.protobuf.proto import parse_length_prefixed

from tests.support.rest_world import http_of, refusal, service
from tests.support.waiting import PATIENCE_S

SESSION = {"session_id": "s", "environment": "arithmetic"}


async def test_gzip_bombs_do_not_delay_the_other_requests(monkeypatch):
    """Between two slices of at most 64 KiB everybody else has a turn, on any machine."""
    unpack, turns, slices = requests._decompress_slice, 0, []

    def record_slice(unpacking, chunk):
        content = unpack(unpacking, chunk)
        slices.append((turns, len(content)))
        return content

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(requests, "_decompress_slice", record_slice)
    bomb = gzip.compress(b" " * 200_000_000)
    headers = {"content-encoding": "gzip"}
    async with service("environment") as server, http_of(server) as http:
        await http.post("/v1/sessions", json=SESSION)
        others = asyncio.create_task(take_turns())
        bombed = await http.post("/v1/sessions", content=bomb, headers=headers)
        others.cancel()
        assert (await http.get("/v1/sessions/s")).status_code == 200
    assert bombed.status_code == 413
    assert len(slices) > 10
    assert len({turn for turn, _ in slices}) == len(slices)
    assert max(size for _, size in slices) <= 1 << 16


async def test_the_deadline_of_a_caller_is_kept():
    async with service("replay") as server, http_of(server) as http:
        body = {"worker": "w", "max_tasks": 1, "wait_s": 20}
        response = await http.post(
            "/v1/runs/r/tasks/lease", json=body, headers={"x-request-timeout-s": "0.2"}
        )
        assert refusal(response) == (504, "DEADLINE_EXCEEDED")
        for wrong in ("x", "-1", "nan", "inf"):
            headers = {"x-request-timeout-s": wrong}
            assert refusal(await http.get("/v1/runs/r/stats", headers=headers))[0] == 400


class Slow(stubs.EnvironmentServiceServicer):
    """Takes its time, or fails in words that nobody may see."""

    def __init__(self) -> None:
        self.started, self.cancelled = asyncio.Event(), asyncio.Event()

    async def CloseSession(self, request, context):  # noqa: N802
        if request.session_id == "fail":
            raise RuntimeError("secret")
        self.started.set()
        try:
            await asyncio.sleep(float(request.session_id))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return pb.CloseSessionResponse(closed=True)


def slow_server(servicer: Slow, **settings) -> GrpcServer:
    server = GrpcServer(load(ServerSettings, rest_port=0, **settings))
    register = stubs.add_EnvironmentServiceServicer_to_server
    server.add(register, servicer, "dialoop.v1.EnvironmentService")
    return server


async def test_a_caller_who_hangs_up_cancels_the_call():
    servicer = Slow()
    async with slow_server(servicer) as server, http_of(server) as http:
        call = asyncio.create_task(http.delete("/v1/sessions/30"))
        await servicer.started.wait()
        call.cancel()
        await asyncio.wait_for(servicer.cancelled.wait(), PATIENCE_S)
        assert (await http.get("/healthz")).status_code == 200


async def test_leaving_finishes_calls_in_flight_and_takes_no_more():
    servicer = Slow()
    async with slow_server(servicer, drain_s=PATIENCE_S) as server:
        http = http_of(server)
        call = asyncio.create_task(http.delete("/v1/sessions/0.5"))
        await servicer.started.wait()
        address = server.rest_address
    assert (await call).json() == {"closed": True}
    await http.aclose()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{address}/healthz")


async def test_a_drain_that_takes_too_long_ends_with_a_reason():
    servicer = Slow()
    async with slow_server(servicer, drain_s=0.1) as server:
        http = http_of(server)
        call = asyncio.create_task(http.delete("/v1/sessions/30"))
        await servicer.started.wait()
    assert refusal(await call) == (503, "STOPPING")
    await http.aclose()


async def test_the_text_of_an_unexpected_error_stays_in_the_log_with_the_ids(caplog):
    async with slow_server(Slow()) as server, http_of(server) as http:
        with caplog.at_level(logging.ERROR):
            response = await http.delete("/v1/sessions/fail")
    assert refusal(response) == (500, "INTERNAL")
    assert "secret" not in response.text
    (record,) = caplog.records
    assert record.error_id == response.json()["error_id"]


async def test_a_call_is_logged_with_door_and_status(caplog):
    async with service("environment") as server, http_of(server) as http:
        with caplog.at_level(logging.DEBUG, logger="dialoop_services.runtime.calls"):
            await http.get("/v1/sessions/gone")
    assert [(r.door, r.status) for r in caplog.records] == [("rest", "NOT_FOUND")]


async def test_metrics_count_calls_of_both_doors():
    async with service("environment") as server, http_of(server) as http:
        await http.post("/v1/sessions", json=SESSION)
        await http.get("/v1/sessions/gone")
        channel = stubs.grpc.aio.insecure_channel(server.address)
        await stubs.EnvironmentServiceStub(channel).GetSession(pb.GetSessionRequest(session_id="s"))
        await channel.close()
        text = (await http.get("/metrics")).text
    name = "dialoop_calls_total"
    rpc = "EnvironmentService.GetSession"
    assert f'{name}{{door="rest",rpc="{rpc}",status="NOT_FOUND"}} 1.0' in text
    assert f'{name}{{door="grpc",rpc="{rpc}",status="OK"}} 1.0' in text
    assert 'dialoop_calls_running{door="rest"} 0.0' in text
    assert f'dialoop_call_seconds_count{{door="grpc",rpc="{rpc}"}} 1.0' in text


async def test_a_watch_comes_as_lines_as_events_and_as_messages():
    async with service("trainer") as server, http_of(server) as http:
        lines = (await http.get("/v1/policy/events")).text.splitlines()
        assert [json.loads(line)["policy_version"]["number"] for line in lines] == [3, 4]
        headers = {"accept": "text/event-stream"}
        response = await http.get("/v1/policy/events", headers=headers)
        assert response.headers["content-type"] == "text/event-stream"
        events = response.text.strip().split("\n\n")
        assert json.loads(events[1].removeprefix("data: "))["policy_version"]["number"] == 4


async def test_a_watch_goes_on_until_its_caller_leaves():
    async with service("replay") as server, http_of(server) as http:
        headers = {"accept": "application/x-protobuf"}
        url = "/v1/runs/r/events?interval_s=0.02"
        async with http.stream("GET", url, headers=headers) as response:
            chunks = response.aiter_bytes()
            first = parse(await anext(chunks))
            assert first.stats.training.num_tasks_offered == 0
            task = {
                "task_id": "a",
                "environment": "arithmetic",
                "purpose": "PURPOSE_TRAINING",
                "num_trajectories": 1,
            }
            await http.post("/v1/runs/r/tasks", json={"tasks": [task]})
            assert parse(await anext(chunks)).stats.training.num_tasks_offered == 1
        bad = await http.get("/v1/runs/a%20b/events")
        assert refusal(bad) == (400, "BAD_RUN")


def parse(chunk: bytes) -> replay_service_pb2.WatchResponse:
    response = parse_length_prefixed(replay_service_pb2.WatchResponse, io.BytesIO(chunk))
    assert response is not None
    return response


async def test_a_generation_streams_its_tokens_and_ends_with_the_whole_sample():
    prompt = {"messages": [{"role": "user", "content": "1+1"}]}
    stream_request = {"request": {"history": {"prompt": prompt}, "sampling": {"max_new_tokens": 4}}}
    async with service("inference") as server, http_of(server) as http:
        answer = await http.post("/v1/generate_stream", json=stream_request)
        *pieces, last = [json.loads(line) for line in answer.text.splitlines()]
        refused = await http.post("/v1/generate_stream", json={"request": {}})
    (sample,) = last["completed"]["samples"]
    sampled = [token for piece in pieces for token in piece["token_ids"]]
    assert sampled
    columns = {column["name"]: column for column in sample["sequence"]["columns"]}
    assert sampled == columns["token_ids"]["data"][-len(sampled) :]
    assert columns["inference_logprobs"]["shape"] == [len(sampled)]
    assert len(columns["inference_logprobs"]["data"]) == len(sampled)
    assert refusal(refused) == (400, "PROMPT_MISSING")


async def test_a_number_that_is_none_is_left_out():
    async with service("trainer") as server, http_of(server) as http:
        assert (await http.get("/v1/status")).json()["metrics"] == {"train/loss": 0.5}


async def test_a_taken_rest_port_is_named_and_the_other_port_is_free_again():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f"Port {port} on 127.0.0.1 is taken"):
            await slow_server_on(port).__aenter__()


def slow_server_on(port: int) -> GrpcServer:
    return GrpcServer(load(ServerSettings, rest_port=port))


def test_without_the_door_nothing_of_it_is_imported():
    program = (
        "import asyncio, sys\n"
        "from dialoop_services.hosting import GrpcServer\n"
        "from dialoop_services.runtime import ServerSettings\n"
        "import dialoop_services.environment.serving, dialoop_services.replay.__main__\n"
        "async def main():\n"
        "    async with GrpcServer(ServerSettings()):\n"
        "        pass\n"
        "asyncio.run(main())\n"
        "names = {'fastapi', 'starlette', 'uvicorn', 'prometheus_client', 'torch'}\n"
        "bad = names & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=2 * PATIENCE_S)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v1/sessions/%C3%BC%20b", (404, "SESSION_LOST")),  # the rpc itself
        ("GET", "/v1/sessions/", (404, "ROUTE_NOT_FOUND")),
        ("GET", "/v1/sessions/a/b", (404, "ROUTE_NOT_FOUND")),
        ("PUT", "/v1/sessions/s", (405, "METHOD_NOT_ALLOWED")),
    ],
)
async def test_what_no_rpcs_route_matches_is_answered_by_the_application(method, path, expected):
    async with service("environment") as server, http_of(server) as http:
        answer = await http.request(method, path)
        assert refusal(answer) == expected
        assert (await http.head("/v1/environments")).status_code == 200
