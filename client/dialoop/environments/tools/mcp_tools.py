"""Tools of MCP servers, reached as programs over stdio or at addresses of streamable HTTP.

McpTools({"files": McpServer(command="uvx", args=("mcp-server-files==1.2", "/data"))})
McpTools({"search": McpServer(url="http://127.0.0.1:8000/mcp")}, syntax=BlockCalls())

A call names `server.tool`; without a server it means the first one. This needs the extra
`dialoop[mcp]`. Servers run with the rights of the service, so name only ones that you trust, at
fixed versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from dialoop.answers import AnswerForm
from dialoop.chat import Message, ToolDefinition
from dialoop.environments.episode import Episode, Opening, Outcome
from dialoop.environments.tools.function_tools import ArgumentTool, check_arguments
from dialoop.environments.tools.text_tools import ToolInputError
from dialoop.environments.tools.tool_syntaxes import BlockCalls, ToolSyntax, bound_to
from dialoop.environments.tools.tool_use import ToolFailures, ToolUse
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.failures import failure_of
from dialoop.reasons import Reason
from dialoop.trajectory import Owner

# The JSON-RPC code that the SDK uses for a connection that has ended.
_CONNECTION_CLOSED = -32000
_STATE = "mcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """The command or the URL of one server.

    The program gets `env` and the few variables that it cannot run without (PATH, HOME).
    """

    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    # Names of the tools to offer; empty means all.
    allowed: tuple[str, ...] = ()
    # Whether one connection serves all episodes: only for a server that remembers nothing of its
    # calls, such as a search. Else each episode has its own, with a program of its own.
    shared: bool = False

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise InvalidConfig(
                "An MCP server needs either a command or a url.",
                remedy='Write McpServer(command="...") or McpServer(url="http://.../mcp").',
            )


class McpTools(Transform):
    """The tools of some MCP servers, to which it connects when the service starts.

    If a server cannot be reached, the service does not start. An episode connects anew at its first
    call, and so has a state of its own at a server that is not `shared`.
    """

    def __init__(  # noqa: PLR0913 - the options are the interface
        self,
        servers: Mapping[str, McpServer | Mapping[str, Any]],
        *,
        syntax: ToolSyntax | None = None,
        role: str = "tool",
        timeout_s: float = 10.0,
        start_timeout_s: float = 30.0,
        tool_failures: ToolFailures = "end",
        max_tool_response: int = 10_000,
        tools_in_prompt: bool | None = None,
    ) -> None:
        if not servers:
            raise InvalidConfig(
                "`servers` of McpTools is empty.", remedy="Name at least one server."
            )
        self._start_timeout_s = start_timeout_s
        self._connections = {
            name: _Connection(name, _server(server), start_timeout_s, reconnects=True)
            for name, server in servers.items()
        }
        self._options: dict[str, Any] = {
            "syntax": syntax or BlockCalls(),
            "role": role,
            "timeout_s": timeout_s,
            "tool_failures": tool_failures,
            "max_tool_response": max_tool_response,
            "show_outcome": True,
            "tools_in_prompt": tools_in_prompt,
        }
        self._use = _Use((), (), self._options)

    @property
    def traits(self) -> Traits:
        """Return the tools of all servers, as `server.tool`; there are none before `acquire`."""
        needs_session = any(not c.server.shared for c in self._connections.values())
        return replace(self._use.traits, needs_session=needs_session)

    def bound_to(self, form: AnswerForm) -> McpTools:
        """Return these tools for a model that writes calls in this form; before `acquire`."""
        bound = copy(self)
        bound._options = {**self._options, "syntax": bound_to(self._options["syntax"], form)}
        bound._use = _Use((), (), bound._options)
        return bound

    def sample_calls(self, role: str) -> tuple[Message, ...]:
        """Return a message for each tool of the servers."""
        return self._use.sample_calls(role)

    def reset(self, opening: Opening) -> Opening:
        """Remember the connections of the episode; the first call of a server opens its own."""
        if all(connection.server.shared for connection in self._connections.values()):
            return opening
        return opening.remember(**{_STATE: _Own({})})

    async def step(self, outcome: Outcome) -> Outcome:
        """Run the calls of the policy's message."""
        use, own = self._use, outcome.episode.state.get(_STATE)
        if isinstance(own, _Own):
            # The first call of a server starts it too.
            limit_s = self._options["timeout_s"] + self._start_timeout_s
            tools = [replace(tool, own=own, timeout_s=limit_s) for tool in self._tools()]
            use = _Use(tools, tuple(self._connections), self._options)
        return await use.step(outcome)

    async def close(self, episode: Episode) -> None:
        """End the episode's own connections."""
        own = episode.state.get(_STATE)
        if isinstance(own, _Own):
            await own.close()

    async def acquire(self) -> None:
        """Connect to every server and ask for its tools; InvalidConfig (MCP_UNREACHABLE)."""
        try:
            for connection in self._connections.values():
                await connection.open()
        except BaseException:
            await self.release()
            raise
        self._use = _Use(self._tools(), tuple(self._connections), self._options)

    async def release(self) -> None:
        """End every connection, and the programs with them."""
        for connection in self._connections.values():
            await connection.close()

    def problem(self) -> str:
        """Return which servers are not connected, or an empty text."""
        return " ".join(filter(None, (c.problem for c in self._connections.values())))

    def _tools(self) -> list[_McpTool]:
        return [tool for connection in self._connections.values() for tool in connection.tools]


class _Use(ToolUse):
    """A ToolUse in which a name without a server means the first server's tool."""

    def __init__(self, tools: Any, servers: tuple[str, ...], options: Mapping[str, Any]) -> None:
        super().__init__(tools, **options)
        self._servers = servers

    def tool(self, name: str) -> ArgumentTool | None:
        tool = super().tool(name)
        if tool is None and self._servers:
            tool = super().tool(f"{self._servers[0]}.{name}")
        return tool


@dataclass(frozen=True, slots=True)
class _McpTool:
    definition: ToolDefinition
    name: str
    connection: _Connection
    timeout_s: float | None = None
    own: _Own | None = None

    async def run(self, arguments: Mapping[str, Any], *, timeout_s: float) -> str:
        check_arguments(arguments, json.loads(self.definition.parameters_json))
        connection = self.connection
        if self.own is not None and not connection.server.shared:
            connection = await self.own.of(connection)
        async with asyncio.timeout(timeout_s):
            return await connection.call(self.name, arguments)


@dataclass(frozen=True, slots=True)
class _Own:
    """The connections of one episode, by the server's name."""

    connections: dict[str, _Connection]

    async def of(self, shared: _Connection) -> _Connection:
        """Return the episode's connection to a server, which the first call opens."""
        if shared.name not in self.connections:
            own = self.connections[shared.name] = shared.another()  # closed also if it fails
            await own.open()
        return self.connections[shared.name]

    async def close(self) -> None:
        """End the connections, and the programs with them."""
        for connection in self.connections.values():
            await connection.close()


class _Connection:
    """One server. A task of its own holds the connection, since the SDK's scopes must nest.

    With `reconnects` the task does so when the connection breaks, after a wait that grows; until
    then calls fail. Without it they fail from then on: what the server remembered is lost.
    """

    def __init__(
        self, name: str, server: McpServer, start_timeout_s: float, *, reconnects: bool = False
    ) -> None:
        self.name = name
        self.server = server
        self._reconnects = reconnects
        self._start_timeout_s = start_timeout_s
        self._holder: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()
        self._broken = asyncio.Event()
        self._client: Any = None
        self.tools: list[_McpTool] = []

    @property
    def problem(self) -> str:
        """Return that the server is not connected, or an empty text."""
        return "" if self._client is not None else f"The MCP server {self.name} is not connected."

    def another(self) -> _Connection:
        """Return a connection to the same server, which does not reconnect and is not open."""
        return _Connection(self.name, self.server, self._start_timeout_s)

    async def open(self) -> None:
        """Connect and list the tools; InvalidConfig (MCP_UNREACHABLE, MCP_MISSING)."""
        self._leave = asyncio.Event()
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(ready))
        try:
            async with asyncio.timeout(self._start_timeout_s):
                listed = await asyncio.shield(ready)
        except InvalidConfig:
            raise
        except Exception as error:
            self._holder.cancel()
            raise self._unreachable(error) from error
        self.tools = [self._tool(t) for t in listed if self._is_allowed(t.name)]
        missing = set(self.server.allowed) - {tool.name for tool in self.tools}
        if missing:
            raise InvalidConfig(
                f"The MCP server {self.name} has no tool {', '.join(sorted(missing))}.",
                reason=Reason.MCP_TOOL_MISSING,
                remedy=f"It has: {', '.join(t.name for t in listed)}.",
            )

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a tool's result; ToolInputError when the server reports an error."""
        client = self._client
        if client is None:
            raise ConnectionError(self.problem)
        try:
            result = await client.call_tool(name, dict(arguments))
        except Exception as error:
            if getattr(error, "code", None) == _CONNECTION_CLOSED:
                self._client = None
                self._broken.set()
            raise
        text = "\n".join(_content(part) for part in result.content)
        if result.is_error:
            raise ToolInputError(text or "the tool reported an error.")
        return text

    async def close(self) -> None:
        """End the connection."""
        self._leave.set()
        self._broken.set()
        if self._holder is not None:
            await asyncio.wait([self._holder], timeout=10)
            self._holder.cancel()

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        """Keep the connection until `close`; the first connection's error goes to `open`."""
        wait_s = 0.5
        while not self._leave.is_set():
            self._broken.clear()
            try:
                async with _client(self.server) as client:
                    listed = (await client.list_tools()).tools
                    self._client = client
                    wait_s = 0.5
                    if not ready.done():
                        ready.set_result(listed)
                    await self._broken.wait()
            except Exception as error:
                if not ready.done():
                    ready.set_exception(error)
                    return
                what = f"MCP server {self.name}"
                failure_of(error, owner=Owner.TOOL, reason=Reason.MCP_GONE, what=what)
            finally:
                self._client = None
            if not self._reconnects:
                return
            await self._pause(wait_s)
            wait_s = min(wait_s * 2, 30.0)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._leave.wait()

    def _tool(self, listed: Any) -> _McpTool:
        definition = ToolDefinition(
            name=f"{self.name}.{listed.name}",
            description=listed.description or "",
            parameters_json=json.dumps(listed.input_schema),
        )
        return _McpTool(definition, listed.name, self)

    def _is_allowed(self, name: str) -> bool:
        return not self.server.allowed or name in self.server.allowed

    def _unreachable(self, error: Exception) -> InvalidConfig:
        where = self.server.url or " ".join((self.server.command, *self.server.args))
        why = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
        return InvalidConfig(
            f"The MCP server {self.name} ({where}) cannot be used: {why}.",
            reason=Reason.MCP_UNREACHABLE,
            remedy="Run the command or open the address by hand, and fix the error that it shows.",
        )


def _client(server: McpServer) -> Any:
    """Return the official SDK's client, not yet connected."""
    try:
        import mcp
    except ImportError as error:
        raise InvalidConfig(
            "MCP tools need the package mcp.",
            reason=Reason.MCP_MISSING,
            remedy="Install it with `pip install 'dialoop[mcp]'`.",
        ) from error
    if server.url:
        return mcp.Client(server.url)
    parameters = mcp.StdioServerParameters(
        command=server.command, args=list(server.args), env=dict(server.env)
    )
    return mcp.Client(parameters)


def _server(server: McpServer | Mapping[str, Any]) -> McpServer:
    """Return the server, made from a config's {"command": ..., "args": [...]} if need be."""
    if isinstance(server, McpServer):
        return server
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in server.items()}
    try:
        return McpServer(**fields)
    except TypeError as error:
        raise InvalidConfig(
            f"The config of an MCP server has unknown fields: {error}.",
            remedy="Give command, args and env, or url; and allowed to offer only some tools.",
        ) from error


def _content(part: Any) -> str:
    """Return the text of one part of a result, or the type of a part without text."""
    text = getattr(part, "text", None)
    if isinstance(text, str):
        return text
    resource = getattr(getattr(part, "resource", None), "text", None)
    return resource if isinstance(resource, str) else f"[{getattr(part, 'type', 'content')}]"
