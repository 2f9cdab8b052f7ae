"""The queue in Redis (6.2 or later, or Valkey): a request runs the Lua script of its name.

The scripts contain the logic (`scripts/ledger.lua` lists the keys). A script gets the request's
fields as JSON in `call` and returns the response's fields as JSON; tasks and groups are raw bytes
beside it. Commands are not retried here, because a repeated one could lease twice as much; callers
retry safely. With an append-only file flushed every second, a power failure can undo the last
second. Then work is done again, but never counted twice.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import redis.asyncio
import redis.exceptions
from dialoop.errors import InvalidConfig, Unavailable
from dialoop.reasons import Reason
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import trajectory_pb2
from dialoop.waits import waiting_for
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from dialoop_services.replay.redis_store.at_hand import PayloadsAtHand
from dialoop_services.replay.refusals import refusal
from dialoop_services.replay.store import (
    Answer,
    FinishedMembers,
    GroupsHandedOut,
    LeasedGroup,
    MembersAppended,
    QueueLimits,
    append_outcome,
    group_head,
    pack_group,
)

log = logging.getLogger(__name__)

_SCRIPTS = Path(__file__).parent / "scripts"
# A script call blocks Redis while it copies its payloads, so larger requests take several calls.
_MAX_CALL_BYTES = 8 * 1024 * 1024

# While Redis applies one call, the answers of the other bring new appends to check and pack.
_APPENDS_AT_ONCE = 2

# Leased groups are large: fewer and larger reads cost less.
_MAX_READ_BYTES = 1024 * 1024

# The doors bound the calls that run at once, and each needs one connection. redis-py's own bound of
# 100 would refuse the rest when a change of a run wakes all who wait for it.
_MAX_CONNECTIONS = 1 << 16


class ShrinkingPool(redis.asyncio.ConnectionPool):
    """A pool that closes the connections which only a burst of calls needed.

    The pool of redis-py keeps as many as were ever in use at once, with their buffers in Redis.
    """

    IDLE_S = 60.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._idle_since: dict[AbstractConnection, float] = {}

    async def release(self, connection: AbstractConnection) -> None:
        """Give a connection back, and close those that were idle for IDLE_S."""
        await super().release(connection)
        now = time.monotonic()
        self._idle_since[connection] = now
        # The one that is given back last is taken first, so the same few stay in use.
        spare = [
            idle
            for idle in self._available_connections
            if now - self._idle_since.get(idle, now) >= self.IDLE_S
        ]
        for idle in spare:
            self._available_connections.remove(idle)
            del self._idle_since[idle]
        for idle in spare:
            # The call that gave one back has its answer; a close that fails is not its error.
            with suppress(redis.exceptions.RedisError, OSError):
                await idle.disconnect()


class RedisStore:
    """A QueueStore in Redis; `clock` (seconds) replaces the server's own in tests.

    at_hand_bytes: size of what was appended last that is kept here too, for leases to give out.
    """

    def __init__(
        self,
        url: str,
        limits: QueueLimits,
        *,
        timeout_s: float = 10.0,
        clock: Callable[[], float] | None = None,
        at_hand_bytes: int = 64 << 20,
    ) -> None:
        pool = ShrinkingPool.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_read_size=_MAX_READ_BYTES,
            max_connections=_MAX_CONNECTIONS,
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
        self._description = "redis"
        self._appends: dict[str, deque[tuple[_Append, dict[str, Any], bytes]]] = {}
        self._appending: dict[str, set[asyncio.Task[None]]] = {}
        self._at_hand = PayloadsAtHand(at_hand_bytes)

    async def apply(self, request: Any, answer: type[Answer]) -> Answer:
        """Apply a request, as `QueueStore.apply` says."""
        if isinstance(request, pb.AppendMembersRequest):
            items = [FinishedMembers.of(item) for item in request.items]
            appended = (await self.append_members(request.run, items)).response()
            assert isinstance(appended, answer)
            return appended
        if isinstance(request, pb.LeaseGroupsRequest):
            return answer.FromString((await self.lease_groups(request)).serialize())
        response = answer()
        for part in _parts(request):
            response.MergeFrom(await self._call(part, answer))
        return response

    async def append_members(self, run: str, items: Sequence[FinishedMembers]) -> MembersAppended:
        """Apply an append of members, as `QueueStore.append_members` says.

        Appends that arrive while `_APPENDS_AT_ONCE` calls are under way go to Redis together.
        """
        if not items:
            return MembersAppended([], {})
        append = _Append(len(items))
        waiting = self._appends.setdefault(run, deque())
        waiting.extend((append, *_pack_members(item)) for item in items)
        calls = self._appending.setdefault(run, set())
        if len(calls) < _APPENDS_AT_ONCE:
            calls.add(asyncio.create_task(self._append_waiting(run)))
        return await append.done

    async def _append_waiting(self, run: str) -> None:
        """Append what waits for this run, until nothing does."""
        while batch := _take_batch(self._appends[run]):
            try:
                await self._append_batch(run, batch)
            except Exception as error:
                for append, _, _ in batch:
                    append.fail(error)
        calls = self._appending[run]
        calls.discard(asyncio.current_task())
        if not calls:
            del self._appends[run], self._appending[run]

    async def _append_batch(
        self, run: str, batch: Sequence[tuple[_Append, dict[str, Any], bytes]]
    ) -> None:
        """Append items with one call, and tell each append what came of its own."""
        appends, items, payloads = zip(*batch, strict=True)
        self._keep(items, payloads)
        fields = {"items": items, "keeper": self._at_hand.keeper}
        reply, heads = await self._run_script("append_members", run, fields, payloads)
        self._complete(reply, heads)
        overflows, reasons = dict(reply["overflows"]), iter(reply["reasons"])
        for number, (append, item) in enumerate(zip(appends, items, strict=True)):
            own = list(itertools.islice(reasons, len(item["digests"])))
            append.add(own, overflows.get(str(number + 1), {}))

    async def lease_groups(self, request: pb.LeaseGroupsRequest) -> GroupsHandedOut:
        """Apply a lease of groups, as `QueueStore.lease_groups` says."""
        at_hand = {"asker": self._at_hand.keeper, "since": self._at_hand.since}
        fields = _fields(request, []) | at_hand
        reply, blobs = await self._run_script("lease_groups", request.run, fields, [])
        read = iter(blobs)
        leases = [
            LeasedGroup(lease_id, num, self._at_hand.take(marks) if marks else (next(read),))
            for lease_id, num, marks in reply.pop("leases", ())
        ]
        if not all(lease.parts for lease in leases):
            leases = await self._read_absent(request.run, leases)
            if not leases:
                reply["empty_reason"] = pb.EMPTY_REASON_NO_GROUPS
        return GroupsHandedOut(pb.LeaseGroupsResponse(**reply), request.lease_s, leases)

    async def _read_absent(self, run: str, leases: Sequence[LeasedGroup]) -> list[LeasedGroup]:
        """Read groups that Redis took to be at hand.

        They had to make room meanwhile, or the answer to their append has not come or was lost.
        Leave out those that are gone from Redis since.
        """
        absent = [lease.lease_id for lease in leases if not lease.parts]
        _, blobs = await self._run_script("read_groups", run, {"lease_ids": absent}, [])
        read = dict(zip(absent, blobs, strict=True))
        whole = [lease._replace(parts=lease.parts or (read[lease.lease_id],)) for lease in leases]
        return [lease for lease in whole if any(lease.parts)]

    def _keep(self, items: Sequence[dict[str, Any]], payloads: Sequence[bytes]) -> None:
        """Keep at hand what is about to be appended, and mark the items with it."""
        for item, payload in zip(items, payloads, strict=True):
            item["mark"] = self._at_hand.add(payload)

    def _complete(self, reply: Mapping[str, Any], heads: Sequence[bytes]) -> None:
        """Note which groups an append has made ready."""
        for marks, head in zip(reply["marks"], heads, strict=True):
            self._at_hand.complete(marks, head)

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
        self._description = f"redis {server['redis_version']}, append-only file {aof}"

    @property
    def description(self) -> str:
        """Return the version of Redis and whether it is durable."""
        return self._description

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _call(self, request: Any, answer: type[Answer]) -> Answer:
        payloads: list[bytes] = []
        fields = _fields(request, payloads)
        if isinstance(request, pb.AppendGroupsRequest):
            self._keep(fields["items"], payloads)
        reply, blobs = await self._run_script(_script_name(request), request.run, fields, payloads)
        if "reasons" in reply:
            self._complete(reply, blobs)
            outcomes = [append_outcome(reason) for reason in reply["reasons"]]
            return answer(outcomes=outcomes)
        response = ParseDict(_without_empty(reply), answer())
        for message, blob in zip(_payloads_of(response), blobs, strict=True):
            if isinstance(message, trajectory_pb2.Task):
                message.CopyFrom(trajectory_pb2.Group.FromString(blob).task)
            else:
                message.ParseFromString(blob)
        return response

    async def _run_script(
        self, name: str, run: str, fields: Mapping[str, Any], payloads: Sequence[bytes]
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Return a script's reply and the bytes beside it; raise what it refuses."""
        now = "" if self._clock is None else str(round(self._clock() * 1000))
        call = _facts_of(self.limits, self._description) + json.dumps(fields)[1:]
        try:
            with waiting_for("redis", name):
                raw, *blobs = await self._eval(name, _prefix(run), now, call, *payloads)
        except (redis.exceptions.RedisError, OSError) as error:
            await _raise_ours(self._client, error)
        reply: dict[str, Any] = json.loads(raw)
        if "refused" in reply:
            reason = Reason(reply["refused"])
            if reason is Reason.STORE_FULL:
                log.warning("Redis is nearly full: no new work is taken.", extra={"reason": reason})
            raise refusal(reason, reply.get("detail", ""))
        return reply, blobs

    async def _eval(self, name: str, *arguments: str | bytes) -> Any:
        """Run a script that Redis has, or that it gets now; the first argument is its key."""
        script = self._scripts[name]
        pool = self._client.connection_pool
        # And not `script(...)`: it costs more than some scripts, and all requests come by here.
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.send_command("EVALSHA", script.sha, 1, *arguments)
            return await connection.read_response()
        except redis.exceptions.NoScriptError:
            pass
        finally:
            await pool.release(connection)
        return await script(keys=arguments[:1], args=arguments[1:])


class _Append:
    """An append of some items; `done` has its answer once each of them has one."""

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items
        self._reasons: list[str] = []
        self._num_overflowed = Counter[str]()
        self.done: asyncio.Future[MembersAppended] = asyncio.get_running_loop().create_future()

    def add(self, reasons: Sequence[str], overflowed: Mapping[str, int]) -> None:
        """Take the outcomes of the next item's members, and the groups dropped for them."""
        self._num_items -= 1
        self._reasons.extend(reasons)
        self._num_overflowed.update(overflowed)
        if not self._num_items and not self.done.done():
            self.done.set_result(MembersAppended(self._reasons, self._num_overflowed))

    def fail(self, error: Exception) -> None:
        """End the append; the caller may have gone."""
        if not self.done.done():
            self.done.set_exception(error)


def _pack_members(item: FinishedMembers) -> tuple[dict[str, Any], bytes]:
    """Return the fields of an item for the script, and the bytes of its members in one."""
    packed = item.pack()
    facts = [member for member, _ in packed]
    versions = [member.versions for member in facts]
    fields = {
        "lease_id": item.lease_id,
        "first": item.first,
        "num_discarded": item.num_discarded,
        "digests": [member.digest for member in facts],
        "ids": [member.trajectory_id for member in facts],
        # One stands for all where they are the same.
        "versions": versions[:1] if versions[1:] == versions[:-1] else versions,
        "sizes": [len(payload) for _, payload in packed],
    }
    return fields, b"".join([payload for _, payload in packed])


def _take_batch(
    waiting: deque[tuple[_Append, dict[str, Any], bytes]],
) -> list[tuple[_Append, dict[str, Any], bytes]]:
    """Take the next members that fit one call; the first one does whatever its size."""
    batch: list[tuple[_Append, dict[str, Any], bytes]] = []
    num_bytes = 0
    while waiting and (not batch or num_bytes + len(waiting[0][2]) <= _MAX_CALL_BYTES):
        batch.append(waiting.popleft())
        num_bytes += len(batch[-1][2])
    return batch


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

    Of a task, trajectory or group return its facts, and append its bytes to `payloads`: a task is
    the beginning of its serialised group, a trajectory more of it.
    """
    if isinstance(message, trajectory_pb2.Task):
        payloads.append(group_head(message))
        names = ("task_id", "purpose", "num_trajectories", "min_trajectories")
        return {name: getattr(message, name) for name in names}
    if isinstance(message, trajectory_pb2.Group):
        group, payload = pack_group(message)
        payloads.append(payload)
        return asdict(group)
    fields: dict[str, Any] = {}
    for field in _plan_of(message.DESCRIPTOR):
        if field.is_repeated:
            values = getattr(message, field.name)
            fields[field.name] = [_value(field, item, payloads) for item in values]
        elif field.is_always or message.HasField(field.name):
            fields[field.name] = _value(field, getattr(message, field.name), payloads)
    return fields


@dataclass(frozen=True, slots=True)
class _Field:
    """What `_fields` needs to know of a field; descriptors take long to ask."""

    name: str
    is_repeated: bool
    is_always: bool
    is_message: bool
    names: Mapping[int, str]


@cache
def _facts_of(limits: QueueLimits, description: str) -> str:
    """Return the beginning of each call's JSON: what does not depend on the request."""
    return json.dumps({"limits": asdict(limits), "store": description})[:-1] + ", "


@cache
def _plan_of(descriptor: Any) -> tuple[_Field, ...]:
    return tuple(
        _Field(
            field.name,
            field.is_repeated,
            bool(field.message_type) or not field.has_presence,
            bool(field.message_type),
            _names_of(field.enum_type) if field.enum_type else {},
        )
        for field in descriptor.fields
    )


def _names_of(enum: Any) -> dict[int, str]:
    """Return an enum's names as JSON has them; STAGE_SCORED is "scored"."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {
        n: value.name.removeprefix(prefix).lower() for n, value in enum.values_by_number.items()
    }


def _value(field: _Field, value: Any, payloads: list[bytes]) -> Any:
    if field.is_message:
        return _fields(value, payloads)
    return field.names[value] if field.names else value


def _payloads_of(answer: Message) -> Iterator[Message]:
    """Yield the empty tasks and groups of an answer's leases, dead letters or groups, in order."""
    for field in answer.DESCRIPTOR.fields:
        for item in getattr(answer, field.name) if field.is_repeated else ():
            if isinstance(item, trajectory_pb2.Group):
                yield item
            elif isinstance(item, pb.TaskLease):
                yield item.task
            elif isinstance(item, (pb.GroupLease, pb.DeadLetter)):
                yield item.group


def _parts(request: Any) -> list[Any]:
    """Split an append of groups into requests of at most `_MAX_CALL_BYTES`, if it is larger."""
    is_append = isinstance(request, pb.AppendGroupsRequest)
    if not is_append or request.ByteSize() <= _MAX_CALL_BYTES:
        return [request]
    parts: list[Any] = []
    num_bytes = _MAX_CALL_BYTES
    for item in request.items:
        size = item.ByteSize()
        if num_bytes + size > _MAX_CALL_BYTES:
            parts.append(pb.AppendGroupsRequest(run=request.run, stage=request.stage))
            num_bytes = 0
        parts[-1].items.append(item)
        num_bytes += size
    return parts


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
    except (redis.exceptions.RedisError, OSError) as error:
        await _raise_ours(client, error)


async def _raise_ours(client: redis.asyncio.Redis, error: Exception) -> NoReturn:
    """Raise an error of Redis as ours, or as it is where it is a bug."""
    lost = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)
    if isinstance(error, lost):
        # Other idle connections are probably broken too: drop them, so that a restart of Redis
        # gives one error and not one per connection.
        with suppress(redis.exceptions.RedisError, OSError):  # closing them may fail, or take long
            await client.connection_pool.disconnect(inuse_connections=False)
        raise refusal(Reason.STORE_UNAVAILABLE) from error
    if isinstance(error, redis.exceptions.ResponseError):
        text = str(error)
        # redis-py has classes for codes at the start of the text and takes these off it. Redis 6
        # has the code of a script's error later in the text.
        if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM" in text:
            raise refusal(Reason.STORE_FULL) from error
        if isinstance(error, _CANNOT_WRITE) or any(word in text for word in _CANNOT_WRITE_CODES):
            raise refusal(Reason.STORE_UNAVAILABLE) from error
    raise error
