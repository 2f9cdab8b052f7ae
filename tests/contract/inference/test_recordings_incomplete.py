"""Recordings that were cut short, left, refused, closed or forgotten: marked, never guessed."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from dialoop.clients.recordings import CREATE
from dialoop.errors import (
    AlreadyExists,
    CapacityExhausted,
    InvalidInput,
    NotFound,
    PreconditionFailed,
    Unavailable,
)
from dialoop.trajectory import DoneReason, Owner, Reward
from dialoop.v1 import inference_service_pb2 as pb
from dialoop_services.inference.recordings.store import RecordingLimits

from tests.support.agent_world import (
    USER,
    ScriptedEngine,
    agent_world,
    answer_to,
    ask,
    make_tool_model,
    require_owned_once,
    sampled_ids,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tool_model(tmp_path_factory.mktemp("agents") / "model")


async def test_a_call_that_was_left_is_masked_and_marked(directory):
    gate = asyncio.Semaphore(3)
    engine = ScriptedEngine(directory, ["A long answer.", "Seven."], gate=gate)
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        asking = asyncio.create_task(ask(client, [USER]))
        while not gate.locked():
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while engine.num_running:
            await asyncio.sleep(0.01)
        (call,) = (await world.recordings.get("r")).calls
        assert call.failure is not None
        assert (call.failure.owner, call.failure.reason) == (Owner.COLLECTOR, "CALLER_LEFT")
        for _ in range(50):
            gate.release()
        other = [{"role": "user", "content": "Something else."}]
        await answer_to(client, other)
        trajectory = await world.recordings.close("r")
    assert sampled_ids(trajectory) == [engine.log[1].token_ids]
    assert [f.reason for f in trajectory.failures] == ["CALLER_LEFT"]
    assert not trajectory.is_scorable


async def test_a_cut_call_that_was_asked_again_spoils_nothing(directory):
    gate = asyncio.Semaphore(3)
    engine = ScriptedEngine(directory, ["A long answer.", "Seven."], gate=gate)
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        stream = await ask(client, [USER], stream=True)
        async for _ in stream:
            break
        await stream.close()
        while engine.num_running:
            await asyncio.sleep(0.01)
        for _ in range(50):
            gate.release()
        await answer_to(client, [USER])
        trajectory = await world.recordings.close("r")
        cut, _ = (await world.recordings.get("r")).calls
    assert cut.failure is not None
    assert cut.sequence_indices == ()
    assert sampled_ids(trajectory) == [engine.log[1].token_ids]
    assert trajectory.failures == ()
    assert trajectory.is_scorable


async def test_a_deadline_and_a_dying_engine_are_failures_of_inference(directory):
    died = Unavailable("The engine stopped.", reason="NOT_READY")
    engine = ScriptedEngine(
        directory,
        ["abc", "def", "Seven."],
        gate=asyncio.Semaphore(1),
        fails=lambda number: died if number == 1 else None,
    )
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        late = {"x-request-timeout-s": "1.0"}
        with pytest.raises(openai.InternalServerError):
            await ask(client, [USER], extra_headers=late)
        engine.gate = None
        with pytest.raises(openai.InternalServerError):
            await ask(client, [{"role": "user", "content": "Other."}], stream=False)
        await answer_to(client, [{"role": "user", "content": "Third."}])
        trajectory = await world.recordings.close("r")
    failures = [(f.owner, f.reason) for f in trajectory.failures]
    assert failures == [(Owner.INFERENCE, "DEADLINE_EXCEEDED"), (Owner.INFERENCE, "NOT_READY")]
    assert sampled_ids(trajectory) == [engine.log[-1].token_ids]


async def test_an_answer_of_all_its_length_is_whole(directory):
    engine = ScriptedEngine(directory, [40, "Seven."])
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        answer = await ask(client, [USER], max_tokens=6)
        assert answer.choices[0].finish_reason == "length"
        cut = answer.choices[0].message
        await answer_to(client, [USER, cut, {"role": "user", "content": "Go on."}])
        trajectory = await world.recordings.close("r")
    assert len(trajectory.sequences) == 1
    require_owned_once(trajectory, engine)
    assert not trajectory.history[1].is_complete


async def test_a_full_context_is_a_truncation(directory):
    engine = ScriptedEngine(directory, ["Seven."], max_model_len=60)
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        first = await answer_to(client, [USER])
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, [USER, first, {"role": "user", "content": "x" * 90}])
        assert caught.value.code == "context_length_exceeded"
        trajectory = await world.recordings.close("r")
    assert trajectory.truncated
    assert trajectory.done_reason is DoneReason.MAX_LENGTH
    assert trajectory.failures == ()
    assert len(engine.log) == 1


async def test_a_refused_call_leaves_no_trace(directory):
    engine = ScriptedEngine(directory, ["Seven."])
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        with pytest.raises(openai.BadRequestError):
            await ask(client, [USER], top_logprobs=3, logprobs=True)
        await answer_to(client, [USER])
        trajectory = await world.recordings.close("r")
        assert len((await world.recordings.get("r")).calls) == 1
    assert trajectory.failures == ()


async def test_closing_twice_gives_the_same_trajectory(directory):
    async with agent_world(directory, ScriptedEngine(directory, ["One."])) as world:
        client = await world.start_recording()
        await answer_to(client, [USER])
        first = await world.recordings.close("r", labels={"a": "b"})
        second = await world.recordings.close("r", rewards=[Reward(name="late", value=1.0)])
        with pytest.raises(openai.ConflictError) as caught:
            await ask(client, [USER])
    assert first == second
    assert first.labels == {"a": "b", "recording_id": "r"}
    assert caught.value.code == "recording_closed"


async def test_an_empty_recording_has_no_trajectory(directory):
    async with agent_world(directory, ScriptedEngine(directory, [])) as world:
        await world.start_recording()
        with pytest.raises(PreconditionFailed) as caught:
            await world.recordings.close("r")
    assert caught.value.reason == "RECORDING_EMPTY"


async def test_recordings_are_bounded_in_number_calls_and_time(directory):
    now = [0.0]
    limits = RecordingLimits(max_recordings=2, max_calls=1, time_to_live_s=10)
    engine = ScriptedEngine(directory, ["One."])
    async with agent_world(directory, engine, limits=limits, clock=lambda: now[0]) as world:
        client = await world.start_recording("a")
        await answer_to(client, [USER])
        with pytest.raises(openai.ConflictError) as full:
            await ask(client, [USER])
        assert full.value.code == "recording_full"
        await world.recordings.create("b")
        with pytest.raises(CapacityExhausted) as many:
            await world.recordings.create("c")
        assert many.value.reason == "TOO_MANY_RECORDINGS"
        await world.recordings.close("a")
        await world.recordings.create("c")  # the closed one gives way
        with pytest.raises(NotFound):
            await world.recordings.get("a")
        now[0] = 11.0
        with pytest.raises(NotFound) as gone:
            await world.recordings.get("b")
        assert gone.value.reason == "RECORDING_NOT_FOUND"
        assert world.store.num_recordings == 0


async def test_another_replica_says_where_a_recording_is(directory):
    engine = ScriptedEngine(directory, [])
    async with agent_world(directory, engine) as home, agent_world(directory, engine) as other:
        await home.recordings.create("r")
        with pytest.raises(openai.NotFoundError, match="that made a recording keeps it"):
            await ask(other.client("r"), [USER])
        with pytest.raises(NotFound, match="that made a recording keeps it"):
            await other.recordings.close("r")


async def test_a_recording_without_an_id_gets_one(directory):
    async with agent_world(directory, ScriptedEngine(directory, [])) as world:
        first, second = [await world.recordings.create() for _ in range(2)]
        assert first != second
        channel = world.recordings._channel
        answer = await channel.call(CREATE, pb.CreateRecordingRequest())
        assert answer.base_path == f"/recordings/{answer.recording_id}/v1"
        assert not (await world.recordings.get(answer.recording_id)).calls


async def test_recording_ids_are_checked(directory):
    async with agent_world(directory, ScriptedEngine(directory, [])) as world:
        for wrong in ("a/b", "..", "x" * 129, "a b"):
            with pytest.raises(InvalidInput):
                await world.recordings.create(wrong)
        assert (await world.recordings.create("a")).base_url.endswith("/recordings/a/v1")
        again = await world.recordings.create("a")
        assert again == await world.recordings.create("a"), "a repeated call gets the same key"
        with pytest.raises(AlreadyExists):
            await world.recordings.create("a", group_id="other")


async def test_a_call_that_runs_when_the_recording_is_closed_is_marked(directory):
    gate = asyncio.Semaphore(0)
    engine = ScriptedEngine(directory, ["One.", "Two."], gate=None)
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        await answer_to(client, [USER])
        engine.gate = gate
        running = asyncio.create_task(ask(client, [{"role": "user", "content": "Late."}]))
        while not engine.num_running:
            await asyncio.sleep(0.01)
        trajectory = await world.recordings.close("r")
        for _ in range(20):
            gate.release()
        await running
        assert await world.recordings.close("r") == trajectory
    assert [f.reason for f in trajectory.failures] == ["STILL_RUNNING"]
    assert trajectory.num_model_tokens == len(engine.log[0].token_ids)


async def test_an_unknown_recording_is_not_found(directory):
    async with agent_world(directory, ScriptedEngine(directory, [])) as world:
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(world.client("nobody"), [USER])
        assert caught.value.code == "recording_not_found"
        answer: httpx.Response = await world.http.get(f"{world.url}/recordings/nobody/v1/models")
        assert answer.status_code == 404
