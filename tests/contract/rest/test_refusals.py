"""Who the REST server lets in, and what it refuses, in one clear error that changes nothing."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
from dialoop.v1 import environment_service_pb2 as pb

from tests.support.rest_world import NO_TLS, http_of, refusal, service, service_url
from tests.support.waiting import PATIENCE_S

TOKEN = "right"
SESSION = {"session_id": "s", "environment": "arithmetic"}


@asynccontextmanager
async def environment(**settings):
    token = settings.setdefault("token", TOKEN)
    async with service("environment", **settings) as server, http_of(server, token) as http:
        yield http


@pytest.fixture(scope="module")
def shared_url() -> Iterator[str]:
    with service_url("environment", token=TOKEN) as url:
        yield url


def client(url: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S, verify=NO_TLS)


async def num_sessions(http: httpx.AsyncClient, session: str = "s") -> int:
    return int((await http.get(f"/v1/sessions/{session}")).status_code == 200)


@pytest.mark.parametrize(
    "authorization", [None, "Bearer wrong", "right", "Bearer rightt", "Basic right"]
)
async def test_a_missing_or_wrong_token_is_refused_and_changes_nothing(shared_url, authorization):
    async with client(shared_url) as http:
        async with httpx.AsyncClient(base_url=http.base_url) as stranger:
            headers = {"authorization": authorization} if authorization is not None else {}
            response = await stranger.post("/v1/sessions", json=SESSION, headers=headers)
            assert refusal(response) == (401, "UNAUTHENTICATED")
            assert response.headers["www-authenticate"] == "Bearer"
            assert (await stranger.get("/metrics")).status_code == 401
        assert not await num_sessions(http)


async def test_health_and_documents_need_no_token(shared_url):
    async with (
        client(shared_url) as http,
        httpx.AsyncClient(base_url=http.base_url) as stranger,
    ):
        assert (await stranger.get("/healthz")).json() == {"status": "ALIVE"}
        ready = (await stranger.get("/readyz")).json()
        assert ready["status"] == "SERVING"
        assert ready["services"]["dialoop.v1.EnvironmentService"] == "SERVING"
        assert "/v1/sessions/{session_id}/step" in (await stranger.get("/openapi.json")).text


async def test_the_docs_page_loads_all_that_it_needs_from_the_service(shared_url):
    async with (
        client(shared_url) as http,
        httpx.AsyncClient(base_url=http.base_url) as stranger,
    ):
        answer = await stranger.get("/docs")
        assert "url: '/openapi.json'" in answer.text
        links = re.findall(r"""(?:src|href)=["']([^"']+)""", answer.text)
        assert len(links) == 3
        for link in links:
            assert link.startswith("/docs/assets/")
            assert (await stranger.get(link)).status_code == 200
        assert "SwaggerUIBundle" in (await stranger.get("/docs/assets/swagger-ui-bundle.js")).text
        policy = answer.headers["content-security-policy"]
        (script,) = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'self' 'sha256-{digest}';" in policy
        assert policy.startswith("default-src 'none'; connect-src 'self';")
        lost = await stranger.get("/docs/assets/nothing.js")
        assert refusal(lost) == (404, "ROUTE_NOT_FOUND")


async def test_a_service_that_does_not_serve_is_not_ready():
    async with service("environment") as server, http_of(server) as http:
        await server.set_serving(False, "dialoop.v1.EnvironmentService")
        response = await http.get("/readyz")
        assert (response.status_code, response.json()["status"]) == (503, "NOT_SERVING")


STEP = {"episode": 1, "history": {"response": {"messages": [{"role": "assistant"}]}}}


@pytest.mark.parametrize(
    ("path", "body", "expected", "field"),
    [
        ("/v1/nope", SESSION, (404, "ROUTE_NOT_FOUND"), None),
        ("/v1/sessions/", SESSION, (404, "ROUTE_NOT_FOUND"), None),
        ("/v1/environments", SESSION, (405, "METHOD_NOT_ALLOWED"), None),
        ("/v1/sessions", SESSION | {"x": 1}, (400, "UNKNOWN_FIELD"), "x"),
        ("/v1/sessions", SESSION | {"session_id": 3}, (400, "INVALID_FIELD"), "session_id"),
        ("/v1/sessions", SESSION | {"ttl_s": "5"}, (400, "INVALID_FIELD"), "ttl_s"),
        ("/v1/sessions/s/reset", {"episode": 2**63}, (400, "INVALID_FIELD"), "episode"),
        ("/v1/sessions/s/reset", {"session_id": "t"}, (400, "UNKNOWN_FIELD"), "session_id"),
        (
            "/v1/sessions/s/step",
            STEP | {"history": {"response": {"messages": [{"role": 1}]}}},
            (400, "INVALID_FIELD"),
            "history.response.messages.0.role",
        ),
        (
            "/v1/sessions/s/step",
            STEP | {"history": {"full": {"messages": [{"content": "a", "parts": {}}]}}},
            (400, "INVALID_FIELD"),
            "history.full.messages.0",
        ),
    ],
)
async def test_what_does_not_fit_a_route_is_one_clear_error(
    shared_url, path, body, expected, field
):
    async with client(shared_url) as http:
        response = await http.post(path, json=body)
        assert refusal(response) == expected
        if field is not None:
            assert response.json()["fields"] == [field]
            assert field in response.json()["detail"]
        if expected[0] == 405:
            assert "GET" in response.headers["allow"]
        assert not await num_sessions(http)


@pytest.mark.parametrize(
    ("content", "kind", "expected"),
    [
        (b"{", "application/json", (400, "INVALID_JSON")),
        (b"[]", "application/json", (400, "INVALID_FIELD")),
        (b'{"session_id": "\\ud800"}', "application/json", (400, "INVALID_JSON")),
        (b'{"ttl_s": NaN}', "application/json", (400, "INVALID_FIELD")),
        (b"\xff\xff", "application/x-protobuf", (400, "INVALID_PROTOBUF")),
        (b"session_id=s", "application/x-www-form-urlencoded", (415, "UNSUPPORTED_MEDIA_TYPE")),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused(shared_url, content, kind, expected):
    async with client(shared_url) as http:
        response = await http.post("/v1/sessions", content=content, headers={"content-type": kind})
        assert refusal(response) == expected


@pytest.mark.parametrize(
    "query", ["page_size=x", "nope=1", "page_size=1&page_size=2", "one_epoch=3"]
)
async def test_a_wrong_query_is_refused(shared_url, query):
    async with client(shared_url) as http:
        response = await http.get(f"/v1/environments/arithmetic/tasks?split=train&{query}")
        assert refusal(response)[0] == 400
        assert response.json()["fields"] == [query.partition("=")[0]]


async def test_a_body_that_contradicts_its_path_is_refused(shared_url):
    async with client(shared_url) as http:
        body = pb.ResetRequest(session_id="t").SerializeToString()
        headers = {"content-type": "application/x-protobuf"}
        response = await http.post("/v1/sessions/s/reset", content=body, headers=headers)
        assert refusal(response) == (400, "PATH_MISMATCH")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_a_page_of_another_origin_may_change_nothing(shared_url, method, origin):
    async with client(shared_url) as http:
        path = "/v1/sessions" if method == "POST" else "/v1/sessions/s"
        response = await http.request(method, path, headers={"origin": origin})
        assert refusal(response) == (403, "FOREIGN_ORIGIN")
        read = await http.get("/v1/environments", headers={"origin": origin})
        assert read.status_code == 200
        assert not [name for name in read.headers if name.startswith("access-control")]


async def test_a_page_of_this_origin_may_call(shared_url):
    async with client(shared_url) as http:
        origin = str(http.base_url).rstrip("/")
        response = await http.post(
            "/v1/sessions", json=SESSION | {"session_id": "own"}, headers={"origin": origin}
        )
        assert response.status_code == 200


async def test_without_a_token_only_loopback_names_are_answered():
    async with environment(token="") as http:
        for host, status in (
            ("localhost:1", 200),
            ("LOCALHOST", 200),
            ("localhost.", 200),
            ("[::1]:1", 200),
            ("[::1]", 200),
            ("127.0.0.2:80", 200),
            ("evil.example", 403),
            ("localhost:1.evil.example", 403),
            ("[::1].evil.example", 403),
            ("[localhost]", 403),
            ("localhost@evil.example", 403),
            ("127.0.0.1.evil.example:1", 403),
        ):
            response = await http.get("/v1/environments", headers={"host": host})
            assert response.status_code == status, host


def zip_zeros(size: int) -> bytes:
    return gzip.compress(b" " * size)


async def test_a_zipped_body_is_read(shared_url):
    async with client(shared_url) as http:
        content = gzip.compress(json.dumps(SESSION | {"session_id": "zipped"}).encode())
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        response = await http.post("/v1/sessions", content=content, headers=headers)
        assert response.json()["session_id"] == "zipped"


@pytest.mark.parametrize(
    ("content", "encoding", "expected"),
    [
        (b"x" * 5000, "identity", (413, "MESSAGE_TOO_LARGE")),
        (zip_zeros(5000), "gzip", (413, "MESSAGE_TOO_LARGE")),
        (zip_zeros(50_000_000), "gzip", (413, "MESSAGE_TOO_LARGE")),
        (b"no gzip", "gzip", (400, "BAD_GZIP")),
        (gzip.compress(b"{}")[:-3], "gzip", (400, "BAD_GZIP")),
        (gzip.compress(b"{}") + b"more", "gzip", (400, "BAD_GZIP")),
        (b"{}", "br", (415, "UNSUPPORTED_ENCODING")),
    ],
    ids=["large", "zipped", "bomb", "no-gzip", "cut", "trailing", "brotli"],
)
async def test_large_and_badly_packed_bodies_are_refused(content, encoding, expected):
    async with environment(max_message_bytes=4096) as http:
        headers = {"content-encoding": encoding}
        response = await http.post("/v1/sessions", content=content, headers=headers)
        assert refusal(response) == expected
        assert (await http.get("/healthz")).status_code == 200


async def test_a_body_without_a_length_is_cut_off_at_the_limit():
    async def endless():
        for _ in range(64):
            yield b" " * 1024

    async with environment(max_message_bytes=4096) as http:
        response = await http.post("/v1/sessions", content=endless())
        assert refusal(response) == (413, "MESSAGE_TOO_LARGE")


HOST = b"Host: 127.0.0.1\r\n"


@pytest.mark.parametrize(
    ("line", "head", "expected"),
    [
        (b"GET /healthz HTTP/1.1", b"", 400),
        (b"GET /healthz HTTP/1.1", HOST + HOST, 400),
        (b"GET /healthz HTTP/1.1", b"Host: 127.0.0.1/x\r\n", 400),
        (b"GET http://127.0.0.1/healthz HTTP/1.1", HOST, 200),
        (b"GET http://elsewhere/healthz HTTP/1.1", HOST, 400),
        (b"GET /healthz HTTP/1.0", b"", 200),
        (b"GET /healthz HTTP/2.0", HOST, 505),
        (b"BREW /healthz HTTP/1.1", HOST, 501),
        (b"PATCH /healthz HTTP/1.1", HOST, 405),
        (b"GET /" + b"x" * (1 << 16) + b" HTTP/1.1", HOST, 414),
        (b"GET /healthz HTTP/1.1", HOST + b"x: " + b"x" * (1 << 16) + b"\r\n", 431),
    ],
)
async def test_a_request_names_its_host_once_and_a_version_that_is_served(
    shared_url, line, head, expected
):
    url = httpx.URL(shared_url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(line + b"\r\n" + head + b"\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert int((await reader.readline()).split()[1]) == expected
    writer.close()


async def test_a_refusal_names_all_methods_and_encodings_of_its_route(shared_url):
    async with client(shared_url) as http:
        other = await http.put("/v1/sessions/x", json={})
        assert (other.status_code, other.headers["allow"]) == (405, "DELETE, GET, HEAD")
        packed = await http.post("/v1/sessions", content=b"{}", headers={"content-encoding": "br"})
        assert (packed.status_code, packed.headers["accept-encoding"]) == (415, "gzip")


@pytest.mark.parametrize(
    "body",
    [
        b'{"session_id": "a", "session_id": "b", "environment": "arithmetic"}',
        b'{"session_id": "a", "environment": "arithmetic", "x": {"y": 1, "y": 1}}',
        b'{"z": [%s 1], "y": 1, "y": 2}' % (b"1, " * 100_000),
    ],
    ids=["twice", "deeper", "beside many numbers"],
)
async def test_a_key_that_stands_twice_is_refused(shared_url, body):
    async with client(shared_url) as http:
        answer = await http.post("/v1/sessions", content=body)
        assert refusal(answer) == (400, "INVALID_JSON")
        assert not await num_sessions(http, "a")
        assert not await num_sessions(http, "b")
