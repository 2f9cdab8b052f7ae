"""The queue in Redis (6.2 or later, or Valkey): a request runs the Lua script of its name.

The scripts contain the logic (`scripts/ledger.lua` lists the keys). A script gets the request's
fields as JSON in `call` and returns the response's fields as JSON; tasks and groups are raw bytes
beside it. Commands are not retried here, because a repeated one could lease twice as much; callers
retry safely. With an append-only file flushed every second, a power failure can undo the last
second. Then work is done again, but never counted twice.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import redis.asyncio
import redis.exceptions
from dialoop.errors import InvalidConfig, Unavailable
from dialoop.reasons import Reason
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import trajectory_pb2
from dialoop.waits import waiting_for
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from dialoop_services.replay.refusals import refusal
from dialoop_services.replay.store import (
    Answer,
    QueueLimits,
    group_head,
    pack_group,
    pack_member,
)
from dialoop_services.runtime.calls import off_loop

log = logging.getLogger(__name__)

_SCRIPTS = Path(__file__).parent / "scripts"
# Leased groups are large: fewer and larger reads cost less.
_MAX_READ_BYTES = 1024 * 1024

# Redis runs one script after the other, so more connections would only wait there.
_MAX_CONNECTIONS = 32


class RedisStore:
    """A QueueStore in Redis; `clock` (seconds) replaces the server's own in tests."""

    def __init__(
        self,
        url: str,
        limits: QueueLimits,
        *,
        timeout_s: float = 10.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_read_size=_MAX_READ_BYTES,
            max_connections=_MAX_CONNECTIONS,
            timeout=None,
            retry=Retry(NoBackoff(), 0),
        )
        self._client = redis.asyncio.Redis.from_pool(pool)
        self.limits = limits
        self._clock = clock
        self._scripts = {
            path.stem: self._client.register_script(_script_of(path))
            for path in sorted(_SCRIPTS.glob("*.lua"))
            if path.stem != "ledger"
        }
        self.description = "redis"
        """The version of Redis and whether it is durable, once it is checked."""

    async def apply(self, request: Any, answer: type[Answer]) -> Answer:
        """Apply a request, as `QueueStore.apply` says."""
        payloads: list[bytes] = []
        fields = await off_loop(request.ByteSize(), partial(_fields, request, payloads))
        reply, blobs = await self._run_script(_script_name(request), request.run, fields, payloads)
        response = ParseDict(_without_empty(reply), answer())
        for message, blob in zip(_payloads_of(response), blobs, strict=True):
            if isinstance(message, trajectory_pb2.Task):
                message.CopyFrom(trajectory_pb2.Group.FromString(blob).task)
            else:
                message.ParseFromString(blob)
        return response

    async def count_rejected(self, run: str, num_groups: int) -> None:
        """Count groups that the servicer rejected."""
        async with map_errors(self._client):
            await self._client.hincrby(f"{_prefix(run)}counts", "rejected", num_groups)

    async def check(self) -> None:
        """Raise Unavailable (STORE_UNAVAILABLE) if Redis is away, InvalidConfig if it is unfit.

        It refuses us, is too old, or would delete the ledger when its memory is full. Also read how
        durable this Redis is.
        """
        try:
            async with map_errors(self._client):
                server = await self._client.info("server")
                durability = await self._client.info("persistence")
                policy = str((await self._client.info("memory")).get("maxmemory_policy", ""))
                for script in self._scripts.values():  # else the first call of each is sent twice
                    await self._client.script_load(script.script)
        except (redis.exceptions.ResponseError, Unavailable) as error:
            answer = error.__cause__ if isinstance(error, Unavailable) else error
            if not isinstance(answer, _REFUSALS):
                raise
            # In protected mode it explains itself in a page.
            sentence = str(answer).partition(". ")[0].rstrip(".")
            raise InvalidConfig(
                f"Redis refuses this service: {sentence}.",
                reason=Reason.STORE_UNAVAILABLE,
                remedy="Give its URL a user and a password that it admits, or let it admit others.",
            ) from error
        major, minor, *_ = (*map(int, str(server["redis_version"]).split(".")), 0)
        if (major, minor) < (6, 2):
            raise InvalidConfig(
                f"Redis is {server['redis_version']}.",
                reason=Reason.REDIS_TOO_OLD,
                remedy="Use Redis 6.2 or later, or Valkey.",
            )
        if policy.startswith("allkeys-"):
            raise InvalidConfig(
                f"Redis has maxmemory-policy {policy}: when its memory is full it would delete the "
                "ledger.",
                reason=Reason.REDIS_EVICTS,
                remedy="Set maxmemory-policy to noeviction, or use a Redis of its own.",
            )
        aof = "on" if durability.get("aof_enabled") else "off (not durable)"
        self.description = f"redis {server['redis_version']}, append-only file {aof}"

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _run_script(
        self, name: str, run: str, fields: Mapping[str, Any], payloads: Sequence[bytes]
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Return a script's reply and the bytes beside it; raise what it refuses."""
        now = "" if self._clock is None else str(round(self._clock() * 1000))
        facts = {"limits": asdict(self.limits), "store": self.description}
        call = json.dumps(facts | dict(fields))
        async with map_errors(self._client):
            with waiting_for("redis", name):
                raw, *blobs = await self._scripts[name](
                    keys=[_prefix(run)], args=[now, call, *payloads]
                )
        reply: dict[str, Any] = json.loads(raw)
        if "refused" in reply:
            reason = Reason(reply["refused"])
            if reason is Reason.STORE_FULL:
                log.warning("Redis is nearly full: no new work is taken.", extra={"reason": reason})
            raise refusal(reason, reply.get("detail", ""))
        return reply, blobs


def _without_empty(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reply's fields without empty lists, which Lua writes as {}."""
    return {name: value for name, value in reply.items() if value != {}}


def _script_of(path: Path) -> str:
    """Return a request's script: the ledger, what the request does, and the writing of it."""
    if path.stem == "purge":
        return path.read_text()
    ledger = (_SCRIPTS / "ledger.lua").read_text()
    return f"{ledger}\nlocal function reply()\n{path.read_text()}\nend\nlocal answer = reply()\n\
flush()\nreturn answer\n"


def _prefix(run: str) -> str:
    """Return the prefix of all keys of a run; its braces keep them on one node of a cluster."""
    return f"dialoop:{{{run}}}:"


def _script_name(request: Message) -> str:
    """Return the script of a request: "lease_groups" for LeaseGroupsRequest."""
    name = request.DESCRIPTOR.name.removesuffix("Request")
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _fields(message: Message, payloads: list[bytes]) -> dict[str, Any]:
    """Return the message's fields by name.

    Of a task, trajectory, turn or group return its facts, and append its bytes to `payloads`: a
    task is the beginning of its serialised group, a trajectory more of it.
    """
    if isinstance(message, trajectory_pb2.Task):
        payloads.append(group_head(message))
        names = ("task_id", "purpose", "num_trajectories", "min_trajectories")
        return {name: getattr(message, name) for name in names}
    if isinstance(message, trajectory_pb2.Trajectory):
        member, payload = pack_member(message)
        payloads.append(payload)
        return member._asdict()
    if isinstance(message, pb.RecordedTurn):
        bare = pb.RecordedTurn()
        bare.CopyFrom(message)
        bare.ClearField("snapshot")
        turns = pb.GetTurnsResponse(turns=[bare]).SerializeToString(deterministic=True)
        snapshot = pb.GetTurnsResponse(snapshot=message.snapshot).SerializeToString()
        payloads.append(turns + snapshot)
        return {
            "trajectory_id": message.trajectory_id,
            "turn": message.turn,
            "num_snapshot_bytes": len(snapshot),
        }
    if isinstance(message, trajectory_pb2.Group):
        group, payload = pack_group(message)
        payloads.append(payload)
        return asdict(group)
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            fields[field.name] = [_value(field, item, payloads) for item in value]
        elif field.message_type or not field.has_presence or message.HasField(field.name):
            fields[field.name] = _value(field, value, payloads)
    return fields


def _value(field: Any, value: Any, payloads: list[bytes]) -> Any:
    """Return a field's value; an enum's as JSON has it: STAGE_SCORED is "scored"."""
    if field.message_type:
        return _fields(value, payloads)
    if not field.enum_type:
        return value
    names = {number: each.name for number, each in field.enum_type.values_by_number.items()}
    return names[value].removeprefix(names[0].removesuffix("UNSPECIFIED")).lower()


def _payloads_of(answer: Message) -> Iterator[Message]:
    """Yield the empty tasks and groups of an answer's leases, dead letters or groups, in order.

    Turns come as one.
    """
    if isinstance(answer, pb.GetTurnsResponse):
        yield answer
        return
    for field in answer.DESCRIPTOR.fields:
        for item in getattr(answer, field.name) if field.is_repeated else ():
            if isinstance(item, trajectory_pb2.Group):
                yield item
            elif isinstance(item, pb.TaskLease):
                yield item.task
            elif isinstance(item, (pb.GroupLease, pb.DeadLetter)):
                yield item.group


_CANNOT_WRITE = (
    redis.exceptions.ReadOnlyError,
    redis.exceptions.MasterDownError,
    redis.exceptions.ClusterDownError,
)
_REFUSALS = (redis.exceptions.ResponseError, redis.exceptions.AuthenticationError)
_CANNOT_WRITE_CODES = ("MISCONF", "READONLY", "LOADING", "MASTERDOWN")


@asynccontextmanager
async def map_errors(client: redis.asyncio.Redis) -> AsyncIterator[None]:
    """Raise errors of Redis as ours; other errors are bugs and pass unchanged."""
    try:
        yield
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        # Other idle connections are probably broken too: drop them, so that a restart of Redis
        # gives one error and not one per connection.
        with suppress(redis.exceptions.RedisError, OSError):  # closing them may fail, or take long
            await client.connection_pool.disconnect(inuse_connections=False)
        raise refusal(Reason.STORE_UNAVAILABLE) from error
    except redis.exceptions.ResponseError as error:
        # A frame of redis-py holds the error that holds it, and with it what was sent.
        traceback.clear_frames(error.__traceback__)
        text = str(error)
        # redis-py has classes for codes at the start of the text and takes these off it. Redis 6
        # has the code of a script's error later in the text.
        if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM" in text:
            raise refusal(Reason.STORE_FULL) from error
        if isinstance(error, _CANNOT_WRITE) or any(word in text for word in _CANNOT_WRITE_CODES):
            raise refusal(Reason.STORE_UNAVAILABLE) from error
        raise
