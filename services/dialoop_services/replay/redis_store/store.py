"""The queue in Redis (6.2 or later, or Valkey): every request is one Lua script of its name.

The scripts hold the logic (`scripts/ledger.lua` lists the keys). A script finds the request's
fields as JSON in `call` and answers with the response's fields as JSON; tasks and groups travel
beside that as raw bytes. Commands are not retried here: the caller's retry is safe, a blind one
could lease twice what is wanted. With an append-only file flushed every second a power failure can
undo the last second; work is then done again, never counted twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import redis.asyncio
import redis.exceptions
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import trajectory_pb2
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from dialoop_services.replay.refusals import refusal
from dialoop_services.replay.store import Answer, QueueLimits, group_facts

_SCRIPTS = Path(__file__).parent / "scripts"
# One script call blocks Redis while it copies its payloads; larger requests go in several.
_MAX_CALL_BYTES = 8 * 1024 * 1024


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
        self._client = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self.limits = limits
        self._clock = clock
        prelude = (_SCRIPTS / "ledger.lua").read_text()
        self._scripts = {
            path.stem: self._client.register_script(prelude + path.read_text())
            for path in sorted(_SCRIPTS.glob("*.lua"))
            if path.stem != "ledger"
        }
        self._description = "redis"

    async def apply(self, request: Any, answer: type[Answer]) -> Answer:
        """See `QueueStore`."""
        found = answer()
        for part in _parts(request):
            found.MergeFrom(await self._call(part, answer))
        return found

    async def count_rejected(self, run: str, num_groups: int) -> None:
        """See `QueueStore`."""
        async with _translated(self._client):
            await self._client.hincrby(f"{_prefix(run)}counts", "rejected", num_groups)

    async def check(self) -> None:
        """See `QueueStore`; also learns how durable this Redis is."""
        async with _translated(self._client):
            server = await self._client.info("server")
            durability = await self._client.info("persistence")
        major, minor, *_ = (*map(int, str(server["redis_version"]).split(".")), 0)
        if (major, minor) < (6, 2):
            raise InvalidConfig(
                f"Redis is {server['redis_version']}.",
                reason=Reason.REDIS_TOO_OLD,
                remedy="Use Redis 6.2 or later, or Valkey.",
            )
        aof = "on" if durability.get("aof_enabled") else "off (not durable)"
        self._description = f"redis {server['redis_version']}, append-only file {aof}"

    @property
    def description(self) -> str:
        """Which Redis this is and whether it keeps what it is told."""
        return self._description

    async def close(self) -> None:
        """See `QueueStore`."""
        await self._client.aclose()

    async def _call(self, request: Any, answer: type[Answer]) -> Answer:
        payloads: list[bytes] = []
        now = "" if self._clock is None else str(round(self._clock() * 1000))
        call = {
            **_fields(request, payloads),
            "limits": asdict(self.limits),
            "store": self._description,
        }
        async with _translated(self._client):
            raw, *blobs = await self._scripts[_script_name(request)](
                keys=[_prefix(request.run)], args=[now, json.dumps(call), *payloads]
            )
        reply = json.loads(raw)
        if "refused" in reply:
            raise refusal(Reason(reply["refused"]), reply.get("detail", ""))
        # Lua writes an empty list as {}.
        found = ParseDict({name: value for name, value in reply.items() if value != {}}, answer())
        for place, blob in zip(_places(found), blobs, strict=True):
            place.ParseFromString(blob)
        return found


def _prefix(run: str) -> str:
    """All keys of a run; the braces keep them on one node of a cluster."""
    return f"dialoop:{{{run}}}:"


def _script_name(request: Message) -> str:
    """LeaseGroupsRequest: lease_groups."""
    name = request.DESCRIPTOR.name.removesuffix("Request")
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _fields(message: Message, payloads: list[bytes]) -> dict[str, Any]:
    """The message's fields by name; of a task or group its facts, while it joins `payloads`."""
    if isinstance(message, trajectory_pb2.Task):
        payloads.append(message.SerializeToString())
        names = ("task_id", "purpose", "num_trajectories")
        return {name: getattr(message, name) for name in names}
    if isinstance(message, trajectory_pb2.Group):
        payloads.append(message.SerializeToString())
        return asdict(group_facts(message))
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            found[field.name] = [_value(field, one, payloads) for one in value]
        elif field.message_type or not field.has_presence or message.HasField(field.name):
            found[field.name] = _value(field, value, payloads)
    return found


def _value(field: Any, value: Any, payloads: list[bytes]) -> Any:
    """A field's value as JSON; STAGE_SCORED is "scored"."""
    if field.message_type:
        return _fields(value, payloads)
    if field.enum_type:
        names = field.enum_type.values_by_number
        return names[value].name.removeprefix(names[0].name.removesuffix("UNSPECIFIED")).lower()
    return value


def _places(answer: Message) -> Iterator[Message]:
    """The empty tasks and groups of an answer's leases, letters or groups, in order."""
    for field in answer.DESCRIPTOR.fields:
        for item in getattr(answer, field.name) if field.is_repeated else ():
            if isinstance(item, trajectory_pb2.Group):
                yield item
            elif isinstance(item, pb.TaskLease):
                yield item.task
            elif isinstance(item, (pb.GroupLease, pb.DeadLetter)):
                yield item.group


def _parts(request: Any) -> list[Any]:
    """The request, or requests of no more than `_MAX_CALL_BYTES` of groups each."""
    if not isinstance(request, pb.AppendGroupsRequest):
        return [request]
    parts: list[pb.AppendGroupsRequest] = []
    num_bytes = _MAX_CALL_BYTES
    for item in request.items:
        size = item.ByteSize()
        if num_bytes + size > _MAX_CALL_BYTES:
            parts.append(pb.AppendGroupsRequest(run=request.run, stage=request.stage))
            num_bytes = 0
        parts[-1].items.append(item)
        num_bytes += size
    return parts


@asynccontextmanager
async def _translated(client: redis.asyncio.Redis) -> AsyncIterator[None]:
    """Turn Redis' errors into ours; what is left over is a bug and stays one."""
    try:
        yield
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        # Idle connections are likely as dead as this one: one error per restart, not one each.
        with suppress(redis.exceptions.RedisError, OSError):  # closing them may fail, or take long
            await client.connection_pool.disconnect(inuse_connections=False)
        raise refusal(Reason.STORE_UNAVAILABLE) from error
    except redis.exceptions.ResponseError as error:
        text = str(error)
        if "OOM" in text:
            raise refusal(Reason.STORE_FULL) from error
        if any(word in text for word in ("MISCONF", "READONLY", "LOADING", "MASTERDOWN")):
            raise refusal(Reason.STORE_UNAVAILABLE) from error
        raise
