"""Calls an environment service with grpclib, which shares no code with grpcio; prints each status.

python grpclib_client.py HOST PORT TOKEN [CA [CERTIFICATE KEY]]
"""

import asyncio
import json
import ssl
import sys

from grpclib.client import Channel, StreamStreamMethod, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.exceptions import GRPCError

SERVICE = "/dialoop.v1.EnvironmentService"


class Raw:
    """Messages as bytes."""

    __content_subtype__ = "proto"

    def encode(self, message, _):
        return message

    def decode(self, data, _):
        return data


async def status(calling):
    try:
        await calling
    except GRPCError as error:
        return error.status.name
    except TimeoutError:
        return "DEADLINE_EXCEEDED"
    return "OK"


async def main(host, port, token, ca=None, certificate=None, key=None):
    context = ssl.create_default_context(cafile=ca) if ca else None
    if certificate:
        context.load_cert_chain(certificate, key)
    if context:
        context.set_alpn_protocols(["h2"])
    channel = Channel(host, int(port), ssl=context, codec=Raw())
    own = {"authorization": f"Bearer {token}"}
    unary = UnaryUnaryMethod(channel, f"{SERVICE}/ListEnvironments", bytes, bytes)
    reset = UnaryUnaryMethod(channel, f"{SERVICE}/Reset", bytes, bytes)
    watch = UnaryStreamMethod(channel, "/grpc.health.v1.Health/Watch", bytes, bytes)
    interact = StreamStreamMethod(channel, f"{SERVICE}/Interact", bytes, bytes)

    async def cancelled():
        async with watch.open(metadata=own) as stream:
            await stream.send_message(b"", end=True)
            first = await stream.recv_message()
            await stream.cancel()
            return first.hex()

    async def too_late():
        async with watch.open(metadata=own, timeout=0.5) as stream:
            await stream.send_message(b"", end=True)
            while await stream.recv_message() is not None:
                pass

    async def both_ways(*messages):
        async with interact.open(metadata=own) as stream:
            await stream.send_request()
            for message in messages:
                await stream.send_message(message)
            await stream.end()
            while await stream.recv_message() is not None:
                pass

    sys.stdout.write(
        json.dumps(
            {
                "unary": await status(unary(b"", metadata=own)),
                "without a token": await status(unary(b"")),
                "not a message": await status(unary(b"\xff", metadata=own)),
                "of no session": await status(reset(b"\n\x01x\x10\x01", metadata=own)),
                "a stream, then cancelled": await cancelled(),
                "a deadline": await status(too_late()),
                "both ways": await status(both_ways(bytes.fromhex(END))),
                "cut off": await status(both_ways()),
            }
        )
    )
    channel.close()


END = sys.argv.pop(1)
asyncio.run(main(*sys.argv[1:]))
