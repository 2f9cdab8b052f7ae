"""The REST application: every rpc of the servicers at its route, and the service's pages.

app = rest_app([(servicer, pool.FindServiceByName("dialoop.v1.EnvironmentService"))], options)

An endpoint decodes the request, calls the method that gRPC calls too, and encodes the answer as
JSON or `application/x-protobuf`. Errors are those of gRPC, as problem documents. The OpenAPI
document is at /openapi.json and Swagger UI at /docs. This process serves their files, so that pages
load nothing from other hosts.
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
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route as StarletteRoute
from starlette.routing import WebSocketRoute
from starlette.staticfiles import StaticFiles

from dialoop_services.rest.connections import LimitedConnection, noting_requests
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
from dialoop_services.rest.socket_routes import SocketEndpoint, SocketRoute
from dialoop_services.runtime import metrics as prometheus
from dialoop_services.runtime.listening import ConnectionLimits

if TYPE_CHECKING:
    import socket

    from dialoop.errors import DialoopError
    from google.protobuf.descriptor import ServiceDescriptor

    from dialoop_services.rest.guard import App, Refuse, Scope, Send
    from dialoop_services.rest.middleware import Middleware
    from dialoop_services.rest.requests import BodyLimits
    from dialoop_services.runtime.access.auth import Token
    from dialoop_services.runtime.calls import Calls

_KEEP_ALIVE_S = 75
_OTHER_APIS = {
    "/v1/responses": "OpenAI's Responses are not served. Use Chat Completions, in openai-agents "
    'with set_default_openai_api("chat_completions") or an OpenAIChatCompletionsModel.',
    "/v1/messages": "Anthropic's Messages are not served. Use a client of OpenAI's Chat "
    "Completions, or a proxy that translates to them, such as LiteLLM.",
}
"""What to use instead of routes that agents call by default, by the end of their path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestOptions:
    """Settings of the application, and what it shows of its service."""

    token: Token
    bodies: BodyLimits
    calls: Calls
    metrics: prometheus.Metrics
    # Service name -> whether it serves; called for every /readyz.
    serving: Callable[[], Mapping[str, bool]]
    # Part of the service -> facts about it, which /readyz shows.
    details: Callable[[], Mapping[str, Mapping[str, str]]] = dict
    # Routes beside those of the rpcs.
    http_routes: Sequence[HttpRoute] = ()
    socket_routes: Sequence[SocketRoute] = ()
    middleware: Middleware | None = None


def rest_app(servicers: Sequence[tuple[Any, ServiceDescriptor]], options: RestOptions) -> App:
    """Return the application behind its guard."""
    app = Starlette(exception_handlers={404: _no_route, 405: _no_method})
    app.router.redirect_slashes = False
    routes = [(route, servicer) for servicer, d in servicers for route in routes_of(d)]
    _require_distinct([route for route, _ in routes])
    guarded: Any = app  # Starlette spells ASGI's types with other names
    for route, servicer in routes:
        endpoint: Any = Endpoint(
            route,
            getattr(servicer, route.rpc.name),
            calls=options.calls,
            token=options.token,
            bodies=options.bodies,
            middleware=options.middleware,
        )
        app.router.add_route(route.path, endpoint, methods=[route.method])
    _add_other_routes(app, options)
    described = [route for route, _ in routes]
    document = partial(
        openapi,
        described,
        models(),
        needs_token=options.token.is_set,
        http_routes=options.http_routes,
        middleware=options.middleware,
    )
    _add_docs(app, title_of(described), document)
    _add_states(app, options)
    refuse = _refuse_as_route(options.http_routes)
    own_keys = tuple({route.own_prefix for route in options.http_routes if route.admits})
    return Guard(guarded, options.token, refuse, own_keys=own_keys)


def _add_other_routes(app: Starlette, options: RestOptions) -> None:
    for route in options.http_routes:
        endpoint: Any = HttpEndpoint(
            route, calls=options.calls, token=options.token, bodies=options.bodies
        )
        app.router.add_route(route.path, endpoint, methods=[route.method])
    for socket in options.socket_routes:
        served: Any = SocketEndpoint(socket, calls=options.calls, token=options.token)
        app.router.routes.append(WebSocketRoute(socket.path, served))


def _refuse_as_route(http_routes: Sequence[HttpRoute]) -> Refuse:
    """Return a function that refuses a request in the protocol of its route."""

    async def refuse(scope: Scope, send: Send, error: DialoopError) -> None:
        for route in http_routes:
            if route.has(scope["path"]):
                await HttpAnswer(send, route.errors).fail(error)
                return
        await send_problem(send, error)

    return refuse


def _add_docs(app: Starlette, title: str, document: Callable[[], dict[str, Any]]) -> None:
    """Serve the document, and Swagger UI with its files."""
    page = get_swagger_ui_html(
        title=title,
        openapi_url="/openapi.json",
        swagger_js_url=f"{ASSETS}swagger-ui-bundle.js",
        swagger_css_url=f"{ASSETS}swagger-ui.css",
        swagger_favicon_url=f"{ASSETS}favicon.png",
        swagger_ui_parameters={
            "validatorUrl": None,  # else the page sends the document to another host
            "persistAuthorization": True,  # the token stays when the page is loaded again
            "tryItOutEnabled": True,
        },
    )
    (script,) = re.findall(rb"<script>(.*?)</script>", page.body, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    page.headers["content-security-policy"] = (
        f"default-src 'none'; connect-src 'self'; img-src 'self' data:; "
        f"script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'"
    )

    async def docs(_: Request) -> Response:
        return page

    # Made at its first request, so that the service starts sooner, and once: it needs no token.
    written = cache(lambda: JSONResponse(document()))

    async def show_document(_: Request) -> Response:
        return written()

    async def root(_: Request) -> Response:
        return RedirectResponse("/docs")

    app.router.add_route("/", root, methods=["GET"])
    app.router.add_route("/docs", docs, methods=["GET"])
    app.router.add_route("/openapi.json", show_document, methods=["GET"])
    app.mount(ASSETS, StaticFiles(packages=[("fastapi_offline", "static")]))


def _add_states(app: Starlette, options: RestOptions) -> None:
    """Serve the pages that probes and Prometheus read."""

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

    async def show_metrics(_: Request) -> Response:
        return Response(options.metrics.exposition(), media_type=prometheus.CONTENT_TYPE)

    pages: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/healthz": health,
        "/readyz": ready,
        "/metrics": show_metrics,
    }
    for path, page_of in pages.items():
        app.router.add_route(path, page_of, methods=["GET"])


def _require_distinct(routes: Sequence[Route]) -> None:
    places = [(route.method, route.path) for route in routes]
    assert len(set(places)) == len(places), "two rpcs of one server at the same route"


async def _no_route(request: Request, _: Exception) -> Response:
    path = request.scope["path"]
    remedies = (text for end, text in _OTHER_APIS.items() if path.endswith(end))
    remedy = next(remedies, "Look for it in /docs.")
    return _problem(RouteNotFound("There is no such route.", remedy=remedy))


async def _no_method(request: Request, _: Exception) -> Response:
    refusal = MethodNotAllowed(
        "This route has another method.", remedy="Use a method that the `allow` header names."
    )
    # Starlette names the methods of the first route of the path alone.
    path, allowed = request.scope["path"], set[str]()
    for route in request.app.routes:
        if isinstance(route, StarletteRoute) and route.path_regex.match(path):
            allowed |= route.methods or set()
    return _problem(refusal, {"allow": ", ".join(sorted(allowed))})


def _problem(error: DialoopError, headers: Mapping[str, str] | None = None) -> Response:
    own = {name.decode(): value.decode() for name, value in problem_headers(error)}
    return Response(
        problem_body(error),
        status_code=int(error.http_status),
        headers=own | dict(headers or {}),
    )


class RestServer:
    """uvicorn on the event loop of the gRPC server; it serves from `open` until `close`.

    It leaves signals to the service, and drains together with the gRPC server.
    """

    def __init__(
        self,
        app: App,
        *,
        drain_s: float,
        max_socket_bytes: int = 0,
        limits: ConnectionLimits | None = None,
        tls: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Prepare the server; `max_socket_bytes` bounds a WebSocket message, 0 serves none.

        tls: uvicorn's options of certificates.
        """
        asgi: Any = noting_requests(app)
        self._limits = (limits or ConnectionLimits()).within_descriptors()
        protocol: Any = partial(LimitedConnection, set(), self._limits)
        self._config = uvicorn.Config(
            asgi,
            http=protocol,
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
            **tls,
        )
        # We do not call `serve`: it handles signals, which belong to the service's StopSignal.
        self._server = uvicorn.Server(self._config)
        self._ticking: asyncio.Task[None] | None = None

    async def open(self, bound: socket.socket) -> None:
        """Serve on a bound socket, which this server owns from now on."""
        try:
            self._config.load()
            self._server.lifespan = self._config.lifespan_class(self._config)
            await self._server.startup(sockets=[])
            self._server.servers.append(await self._listen(bound))
        except BaseException:
            bound.close()
            raise
        self._ticking = asyncio.create_task(self._server.main_loop())

    async def _listen(self, bound: socket.socket) -> asyncio.Server:
        """Listen as uvicorn would, which gives each caller a minute for the handshake of TLS."""
        kind: Any = self._config.http_protocol_class
        make = partial(
            kind,
            config=self._config,
            server_state=self._server.server_state,
            app_state=self._server.lifespan.state,
        )
        return await asyncio.get_running_loop().create_server(
            make,
            sock=bound,
            ssl=self._config.ssl,
            ssl_handshake_timeout=self._limits.head_s if self._config.ssl else None,
            backlog=self._config.backlog,
        )

    async def close(self) -> None:
        """Stop accepting connections, answer the calls in flight within the drain, then end."""
        self._server.should_exit = True
        if self._ticking is not None:
            await self._ticking
            await self._server.shutdown()
