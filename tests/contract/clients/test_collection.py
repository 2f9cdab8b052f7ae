"""Batches from services over gRPC: the same as in process, and no session is left open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from dialoop import BlockingDialoop, Dialoop
from dialoop.clients.environment import EnvironmentClient
from dialoop.collection import CollectedBatch, collect
from dialoop.environments import arithmetic
from dialoop.errors import NotFound, PreconditionFailed

from tests.support.collector_world import ScriptedPolicy, serving_arithmetic, serving_policy

CALLS: dict[str, Any] = {"turns_per_batch": 2, "total_turns": 5, "completed_only": False}


def call_tool(number: int) -> str:
    return "<request><Calculator>1+2<call>"


@asynccontextmanager
async def addresses() -> AsyncIterator[dict[str, str]]:
    async with (
        serving_arithmetic() as environment,
        serving_policy(ScriptedPolicy(call_tool)) as inference,
    ):
        yield {"environment": environment.address, "inference": inference.address}


def facts(batches: list[CollectedBatch]) -> list[Any]:
    return [
        [(t.task_key, t.history, t.sequences, t.sampling.stop, t.done_reason, len(t.turns))]
        for batch in batches
        for t in batch.trajectories
    ]


async def test_services_and_this_process_give_the_same_batches() -> None:
    def blocking(where: dict[str, str]) -> list[CollectedBatch]:
        with BlockingDialoop(**where) as dialoop:
            return list(dialoop.collect("arithmetic", **CALLS))

    here = collect(arithmetic(), ScriptedPolicy(call_tool), **CALLS)
    expected = facts([batch async for batch in here])
    assert [fact[-1] for (fact,) in expected] == [2, 1, 1, 1]
    async with addresses() as where, Dialoop(**where) as dialoop:
        assert facts([batch async for batch in dialoop.collect(**CALLS)]) == expected
        assert facts(await asyncio.to_thread(blocking, where)) == expected


async def test_a_break_leaves_no_session_on_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    ids: list[str] = []
    create = EnvironmentClient.create_session

    async def note(self: EnvironmentClient, session_id: str, *rest: Any, **options: Any) -> float:
        ids.append(session_id)
        return await create(self, session_id, *rest, **options)

    def blocking(where: dict[str, str]) -> None:
        with BlockingDialoop(**where) as dialoop:
            for _ in dialoop.collect("arithmetic", num_sessions=2, **CALLS):
                assert dialoop.environment.get_session(ids[-1]).next_step_index == 1
                break
            with pytest.raises(NotFound):
                dialoop.environment.get_session(ids[-1])

    monkeypatch.setattr(EnvironmentClient, "create_session", note)
    async with addresses() as where, Dialoop(**where) as dialoop:
        async with dialoop.collect("arithmetic", num_sessions=2, **CALLS) as batches:
            async for _ in batches:
                break
        assert len(ids) == 2
        for session_id in ids:
            with pytest.raises(NotFound):
                await dialoop.environment.get_session(session_id)
        await asyncio.to_thread(blocking, where)


async def test_a_blocking_loop_over_async_clients_is_refused_with_what_to_write() -> None:
    async with addresses() as where, Dialoop(**where) as dialoop:
        collection = dialoop.collect("arithmetic", **CALLS)
        with pytest.raises(PreconditionFailed, match="belong to an event loop") as caught:
            await asyncio.to_thread(lambda: list(collection))
    assert "BlockingDialoop" in caught.value.remedy
