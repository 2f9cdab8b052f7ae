"""The REST application: every rpc of the servicers at its route, and the service's own pages.

app = rest_app([(servicer, pool.FindServiceByName("dialoop.v1.EnvironmentService"))], options)

An endpoint decodes the request, calls the very method that gRPC calls, and encodes the answer as
JSON or `application/x-protobuf`. Errors are those of gRPC as problem documents.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import WebSocketRoute

from dialoop_services.rest.docs_page import docs_page
from dialoop_services.rest.endpoint import Endpoint
from dialoop_services.rest.guard import Guard, send_problem
from dialoop_services.rest.http_routes import HttpAnswer, HttpEndpoint, HttpRoute
from dialoop_services.rest.openapi import openapi
from dialoop_services.rest.problems import (
    MethodNotAllowed,
    RouteNotFound,
    problem_body,
    problem_headers,
)
from dialoop_services.rest.routes import Route, routes_of
from dialoop_services.rest.schema import Models, comments
from dialoop_services.rest.socket_routes import SocketEndpoint
from dialoop_services.runtime import metrics as prometheus

if TYPE_CHECKING:
    from dialoop.errors import DialoopError
    from google.protobuf.descriptor import ServiceDescriptor

    from dialoop_services.rest.guard import App, Refuse, Scope, Send
    from dialoop_services.rest.socket_routes import SocketRoute
    from dialoop_services.runtime.calls import Calls


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
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    models = Models(comments())
    routes = [(route, servicer) for servicer, d in servicers for route in routes_of(d)]
    _require_distinct([route for route, _ in routes])
    for route, servicer in routes:
        endpoint: Any = Endpoint(
            route,
            getattr(servicer, route.rpc.name),
            models=models,
            calls=options.calls,
            max_body_bytes=options.max_body_bytes,
        )
        app.router.add_route(route.path, endpoint, methods=[route.method])
    _add_further(app, options)
    document = openapi(
        [route for route, _ in routes],
        models,
        needs_token=bool(options.token),
        further=options.further,
    )
    app.openapi = lambda: document  # type: ignore[method-assign]
    _add_pages(app, document, options)
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


def _add_pages(app: FastAPI, document: dict[str, Any], options: RestOptions) -> None:
    page = docs_page(document)

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

    async def described(_: Request) -> Response:
        return JSONResponse(document)

    async def readable(_: Request) -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'"  # the page loads nothing
        return HTMLResponse(page, headers={"content-security-policy": policy})

    pages: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/healthz": health,
        "/readyz": ready,
        "/metrics": measured,
        "/openapi.json": described,
        "/docs": readable,
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
