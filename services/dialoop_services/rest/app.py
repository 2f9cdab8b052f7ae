"""The REST application: every rpc of the servicers at its route, and the service's own pages.

app = rest_app([(servicer, pool.FindServiceByName("dialoop.v1.EnvironmentService"))], options)

An endpoint decodes the request, calls the very method that gRPC calls, and encodes the answer as
JSON or `application/x-protobuf`. Errors are those of gRPC as problem documents. FastAPI serves the
document at /openapi.json and Swagger UI at /docs, whose files come from this process: no page loads
anything from elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import WebSocketRoute
from starlette.staticfiles import StaticFiles

from dialoop_services.rest.endpoint import Endpoint
from dialoop_services.rest.guard import ASSETS, Guard, send_problem
from dialoop_services.rest.http_routes import HttpAnswer, HttpEndpoint, HttpRoute
from dialoop_services.rest.openapi import openapi, title_of
from dialoop_services.rest.problems import (
    MethodNotAllowed,
    RouteNotFound,
    problem_body,
    problem_headers,
)
from dialoop_services.rest.routes import Route, routes_of
from dialoop_services.rest.schema import models
from dialoop_services.rest.socket_routes import SocketEndpoint
from dialoop_services.runtime import metrics as prometheus

if TYPE_CHECKING:
    import socket

    from dialoop.errors import DialoopError
    from google.protobuf.descriptor import ServiceDescriptor

    from dialoop_services.rest.guard import App, Refuse, Scope, Send
    from dialoop_services.rest.socket_routes import SocketRoute
    from dialoop_services.runtime.calls import Calls

_KEEP_ALIVE_S = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class RestOptions:
    """What the application is told."""

    token: str
    max_body_bytes: int
    calls: Calls
    metrics: prometheus.Metrics
    # Service name -> whether it serves; asked on every /readyz.
    serving: Callable[[], Mapping[str, bool]]
    # Part of the service -> facts about it, shown by /readyz.
    details: Callable[[], Mapping[str, Mapping[str, str]]] = dict
    # Routes beside those of the rpcs.
    further: Sequence[HttpRoute] = ()
    sockets: Sequence[SocketRoute] = ()


def rest_app(servicers: Sequence[tuple[Any, ServiceDescriptor]], options: RestOptions) -> App:
    """The application, guarded."""
    # The pages are ours: FastAPI's own load Swagger UI from another host.
    app = FastAPI(docs_url=None, redoc_url=None, redirect_slashes=False)
    routes = [(route, servicer) for servicer, d in servicers for route in routes_of(d)]
    _require_distinct([route for route, _ in routes])
    for route, servicer in routes:
        endpoint: Any = Endpoint(
            route,
            getattr(servicer, route.rpc.name),
            calls=options.calls,
            max_body_bytes=options.max_body_bytes,
        )
        app.router.add_route(route.path, endpoint, methods=[route.method])
    _add_further(app, options)
    described = [route for route, _ in routes]
    # Made when somebody asks for it: a service need not wait for that when it starts.
    app.openapi = cache(  # type: ignore[method-assign]
        partial(
            openapi,
            described,
            models(),
            needs_token=bool(options.token),
            further=options.further,
        )
    )
    _add_docs(app, title_of(described))
    _add_states(app, options)
    app.add_exception_handler(404, _no_route)
    app.add_exception_handler(405, _no_method)
    guarded: Any = app  # FastAPI spells ASGI's types with other names
    return Guard(guarded, options.token, _refusing(options.further))


def _add_further(app: FastAPI, options: RestOptions) -> None:
    for route in options.further:
        endpoint: Any = HttpEndpoint(
            route, calls=options.calls, max_body_bytes=options.max_body_bytes
        )
        app.router.add_route(route.path, endpoint, methods=[route.method])
    for socket in options.sockets:
        served: Any = SocketEndpoint(socket, calls=options.calls)
        app.router.routes.append(WebSocketRoute(socket.path, served))


def _refusing(further: Sequence[HttpRoute]) -> Refuse:
    """Refuse in the words of the route that was asked: a client of it reads no others."""

    async def refuse(scope: Scope, send: Send, error: DialoopError) -> None:
        for route in further:
            if route.has(scope["path"]):
                await HttpAnswer(send, route.errors).fail(error)
                return
        await send_problem(send, error)

    return refuse


def _add_docs(app: FastAPI, title: str) -> None:
    """Serve Swagger UI and its files."""
    page = get_swagger_ui_html(
        title=title,
        openapi_url="/openapi.json",
        swagger_js_url=f"{ASSETS}swagger-ui-bundle.js",
        swagger_css_url=f"{ASSETS}swagger-ui.css",
        swagger_favicon_url=f"{ASSETS}favicon.png",
        swagger_ui_parameters={"validatorUrl": None},  # else another host gets the document
    )
    (script,) = re.findall(rb"<script>(.*?)</script>", page.body, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    page.headers["content-security-policy"] = (
        f"default-src 'none'; connect-src 'self'; img-src 'self' data:; "
        f"script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'"
    )

    async def docs(_: Request) -> Response:
        return page

    app.router.add_route("/docs", docs, methods=["GET"])
    app.mount(ASSETS, StaticFiles(packages=[("fastapi_offline", "static")]))


def _add_states(app: FastAPI, options: RestOptions) -> None:
    """Serve what probes and Prometheus read."""

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ALIVE"})

    async def ready(_: Request) -> Response:
        services = options.serving()
        is_ready = all(services.values())
        states = {name: "SERVING" if up else "NOT_SERVING" for name, up in services.items() if name}
        status = "SERVING" if is_ready else "NOT_SERVING"
        body: dict[str, Any] = {"status": status, "services": states}
        if details := options.details():
            body["details"] = {name: dict(facts) for name, facts in details.items()}
        return JSONResponse(body, status_code=200 if is_ready else 503)

    async def measured(_: Request) -> Response:
        return Response(options.metrics.exposition(), media_type=prometheus.CONTENT_TYPE)

    pages: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/healthz": health,
        "/readyz": ready,
        "/metrics": measured,
    }
    for path, page_of in pages.items():
        app.router.add_route(path, page_of, methods=["GET"])


def _require_distinct(routes: Sequence[Route]) -> None:
    places = [(route.method, route.path) for route in routes]
    assert len(set(places)) == len(places), "two rpcs of one server at the same route"


async def _no_route(request: Request, _: Exception) -> Response:
    return _problem(RouteNotFound("There is no such route.", remedy="/docs lists all routes."))


async def _no_method(request: Request, error: Any) -> Response:
    refusal = MethodNotAllowed(
        "The route is there, with another method.", remedy="Use a method of the `allow` header."
    )
    allowed = dict(error.headers or {}).get("Allow", "")
    return _problem(refusal, {"allow": allowed})


def _problem(error: DialoopError, headers: Mapping[str, str] | None = None) -> Response:
    known = {name.decode(): value.decode() for name, value in problem_headers(error)}
    return Response(
        problem_body(error),
        status_code=int(error.http_status),
        headers=known | dict(headers or {}),
    )


class RestDoor:
    """uvicorn in the loop of the gRPC server: ready at once, drained with it, blind to signals.

    It serves an application from `open` until `close`.
    """

    def __init__(self, app: App, *, drain_s: float, max_socket_bytes: int = 0) -> None:
        """`max_socket_bytes`: of one WebSocket message; 0 where no WebSocket is served."""
        asgi: Any = app
        self._config = uvicorn.Config(
            asgi,
            lifespan="off",
            ws="websockets-sansio" if max_socket_bytes else "none",
            ws_max_size=max_socket_bytes,
            ws_per_message_deflate=False,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(drain_s),
        )
        # Not `serve`, which takes the signals: they belong to the service's StopSignal.
        self._server = uvicorn.Server(self._config)
        self._ticking: asyncio.Task[None] | None = None

    async def open(self, bound: socket.socket) -> None:
        """Serve on a bound socket, which is ours from now on."""
        self._config.load()
        self._server.lifespan = self._config.lifespan_class(self._config)
        await self._server.startup(sockets=[bound])
        self._ticking = asyncio.create_task(self._server.main_loop())

    async def close(self) -> None:
        """Take no more connections, answer what is in flight within the drain, then end."""
        self._server.should_exit = True
        if self._ticking is not None:
            await self._ticking
            await self._server.shutdown()
