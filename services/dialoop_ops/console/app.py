"""The console's routes: the page, and JSON about runs.

GET only reads. POST puts dead letters back into a running queue, and pauses and resumes training.
What asks or changes a running stack does so with the caller's own token.
`console_app(runs, live, token=Token(""))` makes the application. Errors are problem documents, as
those of the services.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from importlib import resources
from typing import TYPE_CHECKING, Any

from dialoop.errors import DialoopError, InvalidInput
from dialoop.reasons import Reason
from dialoop_services.rest.guard import Guard
from dialoop_services.rest.problems import (
    BodyTooLarge,
    MethodNotAllowed,
    RouteNotFound,
    UnsupportedMediaType,
    problem_body,
    problem_headers,
)
from dialoop_services.runtime.access.auth import Token, credentials_of
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from dialoop_ops.console.answers import (
    describe_publishes,
    describe_run,
    describe_trajectory,
    names_of,
    series_of,
    to_json,
)
from dialoop_ops.console.live_runs import LOOK_EVERY_S, LiveRuns
from dialoop_ops.runs import Filters
from dialoop_ops.runs.forks import fork_tree
from dialoop_ops.runs.overview import overview_of
from dialoop_ops.runs.run_config import compare_configs, flat_config
from dialoop_ops.runs.token_numbers import MAX_TOKENS, token_page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from pathlib import Path

    from dialoop_services.rest.guard import App, Receive, Scope, Send
    from starlette.requests import Request

    from dialoop_ops.console.watched_runs import WatchedRuns

ASSETS = "/assets/"
_MAX_GROUP = 64
_MAX_BODY_BYTES = 64 * 1024
_PAGING = ("sort", "offset", "limit")
_TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".svg": "image/svg+xml",
}
_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        b"img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
]


def console_app(runs: WatchedRuns, live: LiveRuns, *, token: Token) -> App:
    """Return the application behind the services' guard; the page itself needs no token."""
    routes = _Routes(runs)
    one_run = "/api/runs/{run}"
    one_trajectory = f"{one_run}/trajectories/{{number}}"
    served: dict[str, Callable[[Request], Any]] = {
        "/api/runs": routes.runs,
        f"{one_run}/overview": routes.overview,
        f"{one_run}/choices": routes.choices,
        f"{one_run}/trajectories": routes.trajectories,
        one_trajectory: routes.trajectory,
        f"{one_trajectory}/tokens": routes.tokens,
        f"{one_trajectory}/group": routes.group,
        f"{one_trajectory}/forks": routes.forks,
        f"{one_run}/metrics": routes.metrics,
        f"{one_run}/publishes": routes.publishes,
        "/api/curves": routes.curves,
        "/api/config": routes.config,
    }
    acting = _LiveRoutes(runs, live)
    acts: dict[str, Callable[[Request], Awaitable[Any]]] = {
        f"{one_run}/requeue": acting.requeue,
        f"{one_run}/pause": acting.pause,
        f"{one_run}/resume": acting.resume,
    }
    app: Any = Starlette(
        routes=[
            *(Route(path, _answering(make)) for path, make in served.items()),
            Route(f"{one_run}/now", acting.now),
            Route(f"{one_run}/queue", _answering_async(acting.queue)),
            *(Route(p, _answering_async(act), methods=["POST"]) for p, act in acts.items()),
            *(Route(path, _serving(*content)) for path, content in page_files().items()),
        ],
        exception_handlers={
            DialoopError: _refuse,
            404: lambda _, __: _problem(_NO_ROUTE),
            405: lambda _, __: _problem(_OTHER_METHOD),
        },
    )
    app.router.redirect_slashes = False
    return _with_headers(Guard(app, token, assets=ASSETS))


_NO_ROUTE = RouteNotFound("The console has no such route.", remedy="Open / in a browser.")
_OTHER_METHOD = MethodNotAllowed(
    "The route has another method.", remedy="Use POST for requeue, pause and resume, else GET."
)


class _Routes:
    """What each route answers, as values for JSON."""

    def __init__(self, runs: WatchedRuns) -> None:
        self._runs = runs

    def runs(self, _: Request) -> Any:
        """List the runs with what they are and how far their indexes are."""
        self._runs.keep_reading()
        return {"runs": [describe_run(name, i) for name, i in self._runs.indexes.items()]}

    def overview(self, request: Request) -> Any:
        """Return the run at a glance."""
        return asdict(overview_of(self._runs.index_of(request.path_params["run"])))

    def choices(self, request: Request) -> Any:
        """List the values that filters of a run can have."""
        return self._runs.index_of(request.path_params["run"]).choices()

    def trajectories(self, request: Request) -> Any:
        """Return a page of the trajectories that match the query."""
        query = request.query_params
        filters = Filters.of({k: v for k, v in query.items() if k not in _PAGING})
        page = self._runs.index_of(request.path_params["run"]).page(
            filters,
            sort=query.get("sort", "-number"),
            offset=_whole(query, "offset", 0),
            limit=_whole(query, "limit", 50),
        )
        return asdict(page)

    def trajectory(self, request: Request) -> Any:
        """Return a trajectory without its tokens."""
        index = self._runs.index_of(request.path_params["run"])
        number = _whole(request.path_params, "number", 0)
        return describe_trajectory(index.summary(number), index.row(number))

    def tokens(self, request: Request) -> Any:
        """Return what is known of each token of a sequence."""
        name, query = request.path_params["run"], request.query_params
        index = self._runs.index_of(name)
        row = index.row(_whole(request.path_params, "number", 0))
        page = token_page(
            row,
            sequence=_whole(query, "sequence", 0),
            start=_whole(query, "start", 0),
            limit=_whole(query, "limit", MAX_TOKENS),
            tokenizer=self._runs.tokenizer_of(name),
            debug_rows=index.debug_rows(row["trajectory_id"]),
        )
        return asdict(page)

    def forks(self, request: Request) -> Any:
        """Return how the trajectory's sequences hang together."""
        name = request.path_params["run"]
        row = self._runs.index_of(name).row(_whole(request.path_params, "number", 0))
        tree = fork_tree(row, tokenizer=self._runs.tokenizer_of(name))
        return {"branches": [asdict(branch) for branch in tree]}

    def group(self, request: Request) -> Any:
        """Return the trajectories of the same group and outcome, with their messages."""
        index = self._runs.index_of(request.path_params["run"])
        summary = index.summary(_whole(request.path_params, "number", 0))
        # A group that was played again in a later epoch may have the same id.
        filters = Filters.of(
            {"group_id": summary.group_id, "step": str(summary.train_step)}
            if summary.group_id
            else {"trajectory_id": summary.trajectory_id}
        )
        page = index.page(filters, sort="number", limit=_MAX_GROUP)
        members = []
        for member in page.summaries:
            row = index.row(member.number)
            chosen = {name: row.get(name, []) for name in ("messages", "turns", "failures")}
            members.append({"summary": asdict(member), **chosen})
        return {"total": page.total, "members": members}

    def metrics(self, request: Request) -> Any:
        """List the names of a run's series."""
        return {"names": names_of(self._runs.index_of(request.path_params["run"]))}

    def publishes(self, request: Request) -> Any:
        """Return the policies that a run published, and the bound of their proof."""
        return describe_publishes(self._runs.index_of(request.path_params["run"]))

    def curves(self, request: Request) -> Any:
        """Return series of several runs, a column per number."""
        query = request.query_params
        has_samples = query.get("x") == "samples"
        series = [
            {"run": run, **series_of(index, name, has_samples=has_samples)}
            for run, index in self._runs.indexes_of(query.getlist("run")).items()
            for name in query.getlist("name")
        ]
        return {"series": series}

    def config(self, request: Request) -> Any:
        """Return the configs of runs, key by key, and where they differ."""
        indexes = self._runs.indexes_of(request.query_params.getlist("run"))
        lines = compare_configs([flat_config(index.run_dir) for index in indexes.values()])
        return {"runs": list(indexes), "lines": [asdict(line) for line in lines]}


class _LiveRoutes:
    """What the routes answer that ask the running stack of a run."""

    def __init__(self, runs: WatchedRuns, live: LiveRuns) -> None:
        self._runs = runs
        self._live = live

    def _run_dir(self, request: Request) -> Path:
        return self._runs.index_of(request.path_params["run"]).run_dir

    async def now(self, request: Request) -> Response:
        """Answer with an event each second: what the stack does, or null while there is none."""
        run_dir, token = self._run_dir(request), _token_of(request)
        newest = await self._live.now(run_dir, token)  # before the answer begins: it may be refused

        async def events() -> AsyncIterator[bytes]:
            nonlocal newest
            while True:
                yield b"data: " + to_json(newest) + b"\n\n"
                await asyncio.sleep(LOOK_EVERY_S)
                newest = await self._live.now(run_dir, token)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def queue(self, request: Request) -> Any:
        """List the dead letters of the run's queue."""
        run_dir, token = self._run_dir(request), _token_of(request)
        return {"dead_letters": await self._live.dead_letters(run_dir, token)}

    async def requeue(self, request: Request) -> Any:
        """Put dead letters back into the queue."""
        ids = (await _body_of(request)).get("group_ids")
        if not isinstance(ids, list) or not ids or not all(isinstance(i, str) for i in ids):
            raise InvalidInput(
                "group_ids names no group.",
                reason=Reason.INVALID_FIELD,
                remedy='Send {"group_ids": ["..."]}, with ids that /queue lists.',
            )
        run_dir, token = self._run_dir(request), _token_of(request)
        return {"num_requeued": await self._live.requeue(run_dir, token, ids)}

    async def pause(self, request: Request) -> Any:
        """Pause training after its step."""
        await _body_of(request)
        await self._live.pause(self._run_dir(request), _token_of(request), is_paused=True)
        return {}

    async def resume(self, request: Request) -> Any:
        """Let training go on."""
        await _body_of(request)
        await self._live.pause(self._run_dir(request), _token_of(request), is_paused=False)
        return {}


def _token_of(request: Request) -> str:
    """Return the token with which the caller asks, and may do what its own rights allow."""
    return credentials_of(request.headers.get("authorization", "").encode("latin-1")).decode(
        "ascii", "replace"
    )


async def _body_of(request: Request) -> dict[str, Any]:
    """Return the request's JSON object.

    Only JSON is read: a page of another origin can send other types without being asked first.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaType("The body is not JSON.", remedy="Send application/json.")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise BodyTooLarge(
                f"The body is larger than {_MAX_BODY_BYTES} bytes.", remedy="Name fewer groups."
            )
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidInput(
            "The body is no JSON object.", reason=Reason.INVALID_FIELD, remedy="Send an object."
        )
    return value


def _whole(values: Mapping[str, Any], name: str, default: int) -> int:
    text = str(values.get(name, default))
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidInput(
            f"{name} is '{text[:40]}'.",
            reason=Reason.INVALID_FIELD,
            remedy="Give a whole number from 0 on.",
        )
    return int(text)


def _answering(make: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """Return an endpoint, which Starlette runs in a thread since it waits for files."""

    def answer(request: Request) -> Response:
        return Response(to_json(make(request)), media_type="application/json")

    return answer


def _answering_async(act: Callable[[Request], Awaitable[Any]]) -> Any:
    """Return an endpoint that waits for services, not for files."""

    async def answer(request: Request) -> Response:
        return Response(to_json(await act(request)), media_type="application/json")

    return answer


def page_files() -> dict[str, tuple[bytes, str]]:
    """Return path -> content and type of the page's files; nothing else can be asked for."""
    folder = resources.files("dialoop_ops.console") / "page"
    files = {"/": folder / "index.html"}
    assets = folder / "assets"
    files |= {f"{ASSETS}{file.name}": file for file in assets.iterdir()}
    return {
        path: (file.read_bytes(), _TYPES.get(f".{file.name.rpartition('.')[2]}", "text/plain"))
        for path, file in files.items()
    }


def _serving(content: bytes, media_type: str) -> Callable[[Request], Response]:
    def serve(_: Request) -> Response:
        return Response(content, media_type=media_type)

    return serve


def _refuse(_: Request, error: Exception) -> Response:
    return _problem(error)


def _problem(error: Any) -> Response:
    headers = {name.decode(): value.decode() for name, value in problem_headers(error)}
    return Response(problem_body(error), status_code=int(error.http_status), headers=headers)


def _with_headers(app: App) -> App:
    """Return the application with the headers that keep a browser from anything but this page."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_HEADERS]}
            await send(message)

        await app(scope, receive, send_with_headers)

    return serve
