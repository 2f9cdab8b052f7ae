"""The queue in Redis (6.2 or later, or Valkey): every transition is one Lua script.

The scripts hold the logic (`scripts/ledger.lua` lists the keys); this module packs arguments and
unpacks replies. Commands are not retried here: the caller's retry is safe, a blind one could lease
twice what is wanted. With an append-only file flushed every second a power failure can undo the
last second; work is then done again, never counted twice.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import redis.asyncio
import redis.exceptions
from dialoop.errors import InvalidConfig
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Stage
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from dialoop_services.replay.redis_store.stats import decode_stats
from dialoop_services.replay.refusals import (
    batch_too_large,
    cursor_moved,
    group_not_found,
    store_full,
    store_unavailable,
    version_not_newer,
)
from dialoop_services.replay.store import (
    Acknowledgement,
    Appended,
    AppendStatus,
    CursorMove,
    DeadLetter,
    EmptyReason,
    GivenBack,
    GroupLease,
    GroupLeases,
    GroupQuery,
    Limits,
    NewGroup,
    Offered,
    OfferedTask,
    Reopened,
    Returned,
    Stats,
    TaskLease,
    TaskLeases,
)

_SCRIPTS = Path(__file__).parent / "scripts"
# One script call blocks Redis while it copies its payloads; larger requests go in several.
_MAX_CALL_BYTES = 8 * 1024 * 1024
_KEYS = (
    *("meta", "lineages", "counts", "tasks", "ledger", "deadlines", "dead"),
    *("offered:1", "offered:2", "unscored", "scored", "evaluation"),
    *("ready:unscored", "ready:scored", "ready:evaluation"),
)


class RedisStore:
    """A Store in Redis; `clock` (seconds) replaces the server's own in tests."""

    def __init__(
        self,
        url: str,
        limits: Limits,
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
        self._limits = limits
        self._clock = clock
        prelude = (_SCRIPTS / "ledger.lua").read_text()
        self._scripts = {
            path.stem: self._client.register_script(prelude + path.read_text())
            for path in sorted(_SCRIPTS.glob("*.lua"))
            if path.stem != "ledger"
        }
        self._description = "redis"

    async def offer_tasks(
        self, run: str, tasks: Sequence[OfferedTask], cursor: CursorMove | None
    ) -> Offered:
        """See `Store`."""
        named = [
            {"id": task.task_id, "p": int(task.purpose), "n": task.num_trajectories}
            for task in tasks
        ]
        moves = {"expected": cursor.expected, "next": cursor.next} if cursor else {}
        payloads = [task.payload for task in tasks]
        reply, _ = await self._call("offer_tasks", run, {"tasks": named, **moves}, payloads)
        if reply.get("moved"):
            raise cursor_moved(reply["cursor"])
        num_new = int(reply["num_new"])
        return Offered(num_new=num_new, num_known=len(tasks) - num_new, cursor=reply["cursor"])

    async def lease_tasks(
        self, run: str, *, worker: str, max_tasks: int, lease_s: float
    ) -> TaskLeases:
        """See `Store`."""
        call = {"max_tasks": max_tasks, "lease_ms": _ms(lease_s)}
        reply, payloads = await self._call("lease_tasks", run, call)
        return TaskLeases(
            leases=tuple(
                TaskLease(lease_id=lease["id"], attempt=int(lease["a"]), payload=payload)
                for lease, payload in zip(reply["leases"], payloads, strict=True)
            ),
            empty_reason=EmptyReason[reply["empty"]],
            credits=int(reply["credits"]),
            cursor=reply["cursor"],
        )

    async def append_groups(
        self, run: str, stage: Stage, groups: Sequence[NewGroup]
    ) -> tuple[Appended, ...]:
        """See `Store`."""
        results: list[Appended] = []
        for batch in _batches(groups):
            named = [_named(group) for group in batch]
            payloads = [group.payload for group in batch]
            call = {"stage": stage.name.lower(), "groups": named}
            reply, _ = await self._call("append_groups", run, call, payloads)
            results.extend(map(_appended, reply["results"]))
        return tuple(results)

    async def count_rejected(self, run: str, num_groups: int) -> None:
        """See `Store`."""
        async with _translated(self._client):
            await self._client.hincrby(f"{_prefix(run)}counts", "rejected", num_groups)

    async def lease_groups(self, run: str, query: GroupQuery) -> GroupLeases:
        """See `Store`."""
        call: dict[str, object] = {
            "stage": query.stage.name.lower(),
            "worker": query.worker,
            "max_groups": query.max_groups,
            "min_groups": query.min_groups,
            "lease_ms": _ms(query.lease_s),
            "prefix": query.task_id_prefix,
            "max_bytes": query.max_bytes,
        }
        if query.max_staleness is not None:
            call["max_staleness"] = query.max_staleness
        reply, payloads = await self._call("lease_groups", run, call)
        if reply.get("too_large"):
            raise batch_too_large()
        return GroupLeases(
            leases=_group_leases(reply, payloads),
            empty_reason=EmptyReason[reply["empty"]],
            num_ready=int(reply["ready"]),
        )

    async def acknowledge(self, run: str, items: Sequence[Acknowledgement]) -> tuple[str, ...]:
        """See `Store`."""
        named = [
            {"lease": item.lease_id, "outcome": item.outcome.name.lower(), "reason": item.reason}
            for item in items
        ]
        reply, _ = await self._call("acknowledge", run, {"items": named})
        return tuple(reply["reasons"])

    async def give_back(self, run: str, items: Sequence[GivenBack]) -> Returned:
        """See `Store`."""
        named = [
            {
                "lease": item.lease_id,
                "reason": item.reason,
                "n": item.num_trajectories,
                "failed": item.failed,
                "aside": item.set_aside,
            }
            for item in items
        ]
        reply, _ = await self._call("give_back", run, {"items": named})
        return Returned(
            num_returned=int(reply["num_returned"]), num_dropped=int(reply["num_dropped"])
        )

    async def extend(self, run: str, lease_ids: Sequence[str], lease_s: float) -> tuple[str, ...]:
        """See `Store`."""
        call = {"leases": list(lease_ids), "lease_ms": _ms(lease_s)}
        reply, _ = await self._call("extend", run, call)
        return tuple(reply["lost"])

    async def leases_of(self, run: str, stage: Stage, worker: str) -> tuple[str, ...]:
        """See `Store`."""
        call = {"stage": stage.name.lower(), "worker": worker}
        reply, _ = await self._call("leases_of", run, call)
        return tuple(reply["leases"])

    async def reopen(
        self, run: str, lease_ids: Sequence[str], *, lease_s: float, max_bytes: int = 1 << 40
    ) -> Reopened:
        """See `Store`."""
        call = {
            "leases": list(dict.fromkeys(lease_ids)),
            "lease_ms": _ms(lease_s),
            "max_bytes": max_bytes,
        }
        reply, payloads = await self._call("reopen", run, call)
        if reply.get("too_large"):
            raise batch_too_large()
        return Reopened(leases=_group_leases(reply, payloads), lost=tuple(reply["lost"]))

    async def advance_policy(
        self,
        run: str,
        version: PolicyVersion,
        *,
        trained_lease_ids: Sequence[str],
        max_outstanding_groups: int,
    ) -> int:
        """See `Store`."""
        call = {
            "lineage": version.lineage,
            "number": version.number,
            "trained": list(trained_lease_ids),
            "max_outstanding": max_outstanding_groups,
            "lease_ms": _ms(self._limits.lease_s),
        }
        reply, _ = await self._call("advance_policy", run, call)
        if "credits" not in reply:
            current = PolicyVersion(lineage=reply["lineage"], number=int(reply["number"]))
            raise version_not_newer(version, current)
        return int(reply["credits"])

    async def stats(self, run: str) -> Stats:
        """See `Store`."""
        reply, (counts, meta, num_dead) = await self._call("stats", run, {})
        return decode_stats(
            counts=_pairs(counts),
            meta=_pairs(meta),
            credits=int(reply["credits"]),
            num_dead_letters=int(num_dead),
            store=self._description,
        )

    async def peek(self, run: str, stage: Stage, max_groups: int) -> tuple[bytes, ...]:
        """See `Store`."""
        call = {"stage": stage.name.lower(), "max_groups": max_groups}
        _, payloads = await self._call("peek", run, call)
        return tuple(payloads)

    async def dead_letters(self, run: str, max_groups: int) -> tuple[DeadLetter, ...]:
        """See `Store`."""
        reply, payloads = await self._call("dead_letters", run, {"max_groups": max_groups})
        return tuple(
            DeadLetter(
                group_id=letter["g"],
                stage=Stage[letter["stage"].upper()],
                reason=letter["reason"],
                num_deliveries=int(letter["n"]),
                payload=payload,
            )
            for letter, payload in zip(reply["letters"], payloads, strict=True)
        )

    async def requeue(self, run: str, group_ids: Sequence[str]) -> int:
        """See `Store`."""
        wanted = list(dict.fromkeys(group_ids))
        reply, _ = await self._call("requeue", run, {"groups": wanted})
        if "missing" in reply:
            raise group_not_found(reply["missing"])
        return int(reply["num_requeued"])

    async def purge(self, run: str) -> None:
        """See `Store`."""
        async with _translated(self._client):
            await self._client.unlink(*(_prefix(run) + key for key in _KEYS))

    async def check(self) -> None:
        """See `Store`; also learns how durable this Redis is."""
        async with _translated(self._client):
            server = await self._client.info("server")
            durability = await self._client.info("persistence")
        major, minor, *_ = (*map(int, str(server["redis_version"]).split(".")), 0)
        if (major, minor) < (6, 2):
            raise InvalidConfig(
                f"Redis is {server['redis_version']}.",
                reason="REDIS_TOO_OLD",
                remedy="Use Redis 6.2 or later, or Valkey.",
            )
        aof = "on" if durability.get("aof_enabled") else "off (not durable)"
        self._description = f"redis {server['redis_version']}, append-only file {aof}"

    @property
    def description(self) -> str:
        """Which Redis this is and whether it keeps what it is told."""
        return self._description

    async def close(self) -> None:
        """See `Store`."""
        await self._client.aclose()

    async def _call(
        self, name: str, run: str, call: dict[str, Any], payloads: Sequence[bytes] = ()
    ) -> tuple[dict[str, Any], list[Any]]:
        now = "" if self._clock is None else str(_ms(self._clock()))
        call["max_attempts"] = self._limits.max_attempts
        call["max_deliveries"] = self._limits.max_deliveries
        call["max_dead_letters"] = self._limits.max_dead_letters
        async with _translated(self._client):
            reply = await self._scripts[name](
                keys=[_prefix(run)], args=[now, json.dumps(call), *payloads]
            )
        return json.loads(reply[0]), reply[1:]


def _prefix(run: str) -> str:
    """All keys of a run; the braces keep them on one node of a cluster."""
    return f"dialoop:{{{run}}}:"


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _named(group: NewGroup) -> dict[str, object]:
    return {
        "id": group.group_id,
        "task": group.task_id,
        "lease": group.lease_id,
        "n": group.num_trajectories,
        "d": group.digest,
        "discarded": group.num_discarded,
        "v": {span.lineage: [span.oldest, span.newest] for span in group.versions},
    }


def _group_leases(reply: dict[str, Any], payloads: Sequence[bytes]) -> tuple[GroupLease, ...]:
    return tuple(
        GroupLease(lease_id=lease["id"], num_deliveries=int(lease["n"]), payload=payload)
        for lease, payload in zip(reply["leases"], payloads, strict=True)
    )


def _appended(result: str) -> Appended:
    if result in ("", "DUPLICATE"):
        return Appended(status=AppendStatus[result or "APPENDED"])
    return Appended(status=AppendStatus.REJECTED, reason=result)


def _batches(groups: Sequence[NewGroup]) -> list[list[NewGroup]]:
    batches: list[list[NewGroup]] = []
    size = _MAX_CALL_BYTES
    for group in groups:
        if size + len(group.payload) > _MAX_CALL_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(group)
        size += len(group.payload)
    return batches


def _pairs(flat: Sequence[bytes]) -> dict[str, str]:
    texts = [item.decode() for item in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))


@asynccontextmanager
async def _translated(client: redis.asyncio.Redis) -> AsyncIterator[None]:
    """Turn Redis' errors into ours; what is left over is a bug and stays one."""
    try:
        yield
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        # Idle connections are likely as dead as this one: one error per restart, not one each.
        with suppress(redis.exceptions.RedisError, OSError):  # closing them may fail, or take long
            await client.connection_pool.disconnect(inuse_connections=False)
        raise store_unavailable() from error
    except redis.exceptions.ResponseError as error:
        text = str(error)
        if "OOM" in text:
            raise store_full() from error
        if any(word in text for word in ("MISCONF", "READONLY", "LOADING", "MASTERDOWN")):
            raise store_unavailable() from error
        raise
