"""Serve steps that do nothing as gRPC over uvicorn's HTTP/2, without grpcio: another least cost.

Needs a Python with zttp (`pip install zttp`), uvicorn, uvloop and this checkout. It has no token,
no sessions, no streams, no deadlines and no errors.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn
import uvloop
from dialoop.v1 import environment_service_pb2 as pb

_DIGEST = {"length": 2, "digest": bytes(16)}


def _create(request: bytes) -> pb.CreateSessionResponse:
    session_id = pb.CreateSessionRequest.FromString(request).session_id
    return pb.CreateSessionResponse(session_id=session_id)


def _reset(request: bytes) -> pb.ResetResponse:
    pb.ResetRequest.FromString(request)
    return pb.ResetResponse(prompt=_DIGEST)


def _step(request: bytes) -> pb.StepResponse:
    pb.StepRequest.FromString(request)
    return pb.StepResponse(prompt=_DIGEST, change={"num_kept": 2})


_METHODS = {"CreateSession": _create, "Reset": _reset, "Step": _step}


async def _serve(scope: Any, receive: Any, send: Any) -> None:
    """Answer one unary call: a message is a zero, its size in four bytes, and its bytes."""
    body, is_whole = b"", False
    while not is_whole:
        event = await receive()
        body += event["body"]
        is_whole = not event["more_body"]
    answer = _METHODS[scope["path"].rpartition("/")[2]](body[5:]).SerializeToString()
    head = {"status": 200, "headers": [(b"content-type", b"application/grpc")], "trailers": True}
    await send({"type": "http.response.start", **head})
    message = b"\0" + len(answer).to_bytes(4, "big") + answer
    await send({"type": "http.response.body", "body": message})
    await send({"type": "http.response.trailers", "headers": [(b"grpc-status", b"0")]})


async def serve() -> None:
    """Listen on a free port, say which, and serve until this is killed."""
    bound = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{bound.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(_serve, http="zttp", http2=True, lifespan="off", log_level="error")
    await uvicorn.Server(config).serve(sockets=[bound])


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
