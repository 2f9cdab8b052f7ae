"""A real MCP server for tests: `python mcp_program.py [PORT]`, over stdio or HTTP."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("testing", log_level="ERROR")


@server.tool()
def add(left: int, right: int) -> int:
    """Add two numbers."""
    return left + right


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("no such shelf")


@server.tool()
async def sleep() -> str:
    """Never answers."""
    await asyncio.sleep(60)
    return "awake"


@server.tool()
def variables() -> str:
    """The names of the environment's variables."""
    return " ".join(sorted(os.environ))


@server.tool()
def picture() -> Image:
    """An image."""
    return Image(data=b"png", format="png")


counted: list[int] = []


@server.tool()
def count() -> int:
    """Counts its calls."""
    counted.append(1)
    return len(counted)


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
