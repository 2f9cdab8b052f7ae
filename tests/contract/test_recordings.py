"""Recordings: every sampled token is owned once, whatever the shape of the conversation."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import openai
import pytest
from dialoop.errors import (
    AlreadyExists,
    CapacityExhausted,
    InvalidInput,
    NotFound,
    PreconditionFailed,
    Unavailable,
)
from dialoop.sequences import ForkCause, Source
from dialoop.trajectory import DoneReason, Owner, Purpose, Reward, SamplingParams, Task

from services.inference.recordings import RecordingLimits
from tests.agent_world import ScriptedEngine, agent_world, call_text, make_tool_model

USER = {"role": "user", "content": "What is 3+4?"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tool_model(tmp_path_factory.mktemp("agents") / "model")


def sampled_ids(trajectory) -> list[tuple[int, ...]]:
    """The runs of sampled tokens of all sequences."""
    return [
        tuple(sequence.token_ids[segment.start : segment.end].tolist())
        for sequence in trajectory.sequences
        for segment in sequence.segments
        if segment.source is Source.MODEL
    ]


def require_owned_once(trajectory, engine) -> None:
    """What the engine sampled stands in the trajectory, all of it once."""
    assert sorted(sampled_ids(trajectory)) == sorted(s.token_ids for s in engine.log)


async def ask(client, messages, **given):
    values = {"model": "any", "messages": messages} | given
    return await client.chat.completions.create(**values)


async def answer_to(client, messages, **given):
    return (await ask(client, messages, **given)).choices[0].message


async def test_a_conversation_is_one_sequence_with_the_ids_the_engine_saw(directory):
    engine = ScriptedEngine(directory, ["Seven.", "Fourteen."])
    async with agent_world(directory, engine) as world:
        client = await world.recorded()
        first = await answer_to(client, [USER])
        more = [USER, first, {"role": "user", "content": "Twice?"}]
        assert (await answer_to(client, more)).content == "Fourteen."
        trajectory = await world.recordings.close("r", rewards=[Reward(name="r", value=2.0)])
    (sequence,) = trajectory.sequences
    last = engine.log[-1]
    assert tuple(sequence.token_ids.tolist()) == last.prompt_ids + last.token_ids
    assert last.prompt_ids[: len(engine.log[0].prompt_ids)] == engine.log[0].prompt_ids
    require_owned_once(trajectory, engine)
    assert [m.text for m in trajectory.history] == [
        "What is 3+4?",
        "Seven.",
        "Twice?",
        "Fourteen.",
    ]
    assert [(t.message_start, t.num_messages) for t in trajectory.turns] == [(1, 2), (3, 1)]
    assert trajectory.reward == 2.0
    assert trajectory.turns[-1].rewards[0].name == "r"
    assert trajectory.terminated
    assert trajectory.done_reason is DoneReason.SUBMITTED
    assert len(sequence.inference_logprobs) == sequence.num_model_tokens
    assert {s.turn for s in sequence.segments} == {0, 1}


async def test_tool_calls_that_come_back_respelled_continue_the_sampled_tokens(directory):
    engine = ScriptedEngine(directory, [call_text("add", a=3), "Seven."])
    async with agent_world(directory, engine) as world:
        client = await world.recorded()
        message = await answer_to(client, [USER], tools=[ADD])
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 3}')
        respelled = {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a":3}'},
                }
            ],
        }
        told = {"role": "tool", "tool_call_id": call.id, "content": "7"}
        await answer_to(client, [USER, respelled, told], tools=[ADD])
        trajectory = await world.recordings.close("r")
    (sequence,) = trajectory.sequences
    first, second = engine.log
    past = first.prompt_ids + first.token_ids
    assert second.prompt_ids[: len(past)] == past
    assert tuple(sequence.token_ids.tolist()) == second.prompt_ids + second.token_ids
    require_owned_once(trajectory, engine)
    assert Source.TOOL in {s.source for s in sequence.segments}
    assert trajectory.num_tool_calls == 1
    assert trajectory.history[1].tool_calls[0].name == "add"


async def test_a_call_whose_arguments_were_changed_is_another_message(directory):
    engine = ScriptedEngine(directory, [call_text("add", a=3), "Eight."])
    async with agent_world(directory, engine) as world:
        client = await world.recorded()
        message = (await answer_to(client, [USER], tools=[ADD])).model_dump(exclude_none=True)
        message["tool_calls"][0]["function"]["arguments"] = '{"a": 4}'
        told = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "8"}
        await answer_to(client, [USER, message, told], tools=[ADD])
        trajectory = await world.recordings.close("r")
    causes = [s.fork_cause for s in trajectory.sequences]
    assert causes == [ForkCause.NONE, ForkCause.HISTORY_REWRITTEN]
    require_owned_once(trajectory, engine)


async def test_tool_call_ids_are_given_out_once(directory):
    engine = ScriptedEngine(directory, [call_text("add", a=1)] * 3)
    async with agent_world(directory, engine) as world:
        client = await world.recorded()
        answers = [await answer_to(client, [USER], tools=[ADD]) for _ in range(3)]
    assert len({answer.tool_calls[0].id for answer in answers}) == 3


async def test_branches_share_their_prefix_as_context(directory):
    engine = ScriptedEngine(directory, ["Seven.", "Left.", "Right."])
    async with agent_world(directory, engine) as world:
        client = await world.recorded()
        first = await answer_to(client, [USER])
        for word in ("left", "right"):
            await answer_to(client, [USER, first, {"role": "user", "content": word}])
        trajectory = await world.recordings.close("r")
        calls = (await world.recordings.get("r")).calls
    one, other = trajectory.sequences
    assert [one.fork_cause, other.fork_cause] == [ForkCause.NONE, ForkCause.BRANCHED]
    require_owned_once(trajectory, engine)
    for sequence, sampling in ((one, engine.log[1]), (other, engine.log[2])):
        assert tuple(sequence.token_ids.tolist()) == sampling.prompt_ids + sampling.token_ids
    assert other.num_model_tokens == len(engine.log[2].token_ids)
    assert [call.sequence_indices for call in calls] == [(0,), (0,), (1,)]
    assert trajectory.history[-1].text == "Right."  # the latest among the longest
    assert [t.num_messages for t in trajectory.turns] == [2, 0, 1]


async def test_parallel_calls_and_retries_fork(directory):
    engine = ScriptedEngine(directory, ["One.", "Two.", "Three."])
    async with agent_world(directory, engine) as world:
        client = await world.recorded()
        answers = await asyncio.gather(*(answer_to(client, [USER]) for _ in range(3)))
        assert len({answer.content for answer in answers}) == 3
        trajectory = await world.recordings.close("r")
    causes = [s.fork_cause for s in trajectory.sequences]
    assert causes == [ForkCause.NONE, ForkCause.BRANCHED, ForkCause.BRANCHED]
    require_owned_once(trajectory, engine)


async def test_every_choice_is_owned(directory):
    engine = ScriptedEngine(directory, ["One.", "Two.", "Three.", "Four."])
    async with agent_world(directory, engine) as world:
        client = await world.recorded()
        answer = await ask(client, [USER], n=3)
        assert [choice.message.content for choice in answer.choices] == ["One.", "Two.", "Three."]
        second = answer.choices[1].message
        await answer_to(client, [USER, second, {"role": "user", "content": "On."}])
        trajectory = await world.recordings.close("r")
        calls = (await world.recordings.get("r")).calls
    require_owned_once(trajectory, engine)
    assert [call.sequence_indices for call in calls] == [(0, 1, 2), (1,)]
    assert [m.text for m in trajectory.history][1] == "Two."


async def test_a_sub_agent_is_a_sequence_of_its_own(directory):
    engine = ScriptedEngine(directory, ["Ask another.", "Seven.", "It is seven."])
    async with agent_world(directory, engine) as world:
        client = await world.recorded()
        main = [{"role": "system", "content": "You lead."}, USER]
        first = await answer_to(client, main)
        await answer_to(client, [{"role": "developer", "content": "You count."}, USER])
        await answer_to(client, [*main, first, {"role": "user", "content": "It said seven."}])
        trajectory = await world.recordings.close("r")
    assert [s.num_model_tokens for s in trajectory.sequences] == [
        len(engine.log[0].token_ids) + len(engine.log[2].token_ids),
        len(engine.log[1].token_ids),
    ]
    assert trajectory.sequences[1].fork_cause is ForkCause.HISTORY_REWRITTEN
    assert trajectory.history[0].text == "You lead."
    assert len(trajectory.history) == 5
    own = [s for s in trajectory.sequences[1].segments if s.source is Source.MODEL]
    assert [s.message_index for s in own] == [None]  # no message of the trajectory's history


async def test_other_tools_are_another_prompt(directory):
    engine = ScriptedEngine(directory, ["One.", "Two."])
    async with agent_world(directory, engine) as world:
        client = await world.recorded()
        first = await answer_to(client, [USER], tools=[ADD])
        more = [USER, first, {"role": "user", "content": "On."}]
        await answer_to(client, more, tools=[ADD], tool_choice="none")
        trajectory = await world.recordings.close("r")
    assert len(trajectory.sequences) == 2
    require_owned_once(trajectory, engine)


async def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_tokens(directory):
    engine = ScriptedEngine(directory, ["Thought: go\nObservation: no", "Done."])
    async with agent_world(directory, engine) as world:
        client = await world.recorded()
        first = await answer_to(client, [USER], stop=["Observation:"])
        assert first.content == "Thought: go\n"
        await answer_to(client, [USER, first, {"role": "user", "content": "yes"}])
        trajectory = await world.recordings.close("r")
        decoded = world.tokenizer.decode(trajectory.sequences[0].token_ids.tolist())
    assert len(trajectory.sequences) == 1
    assert "go\nObservation:<|im_end|>" in decoded
    require_owned_once(trajectory, engine)


async def test_plain_completions_continue_token_by_token(directory):
    engine = ScriptedEngine(directory, ["abc", "def"])
    async with agent_world(directory, engine) as world:
        client = await world.recorded()
        first = await client.completions.create(
            model="any", prompt=[5, 6, 7], extra_body={"return_token_ids": True}
        )
        told = first.choices[0].model_dump()["token_ids"]
        await client.completions.create(model="any", prompt=[5, 6, 7, *told, 9])
        trajectory = await world.recordings.close("r")
    (sequence,) = trajectory.sequences
    assert sequence.token_ids.tolist() == [5, 6, 7, *told, 9, *engine.log[1].token_ids]
    require_owned_once(trajectory, engine)


async def test_a_call_that_was_left_is_masked_and_marked(directory):
    gate = asyncio.Semaphore(3)
    engine = ScriptedEngine(directory, ["A long answer.", "Seven."], gate=gate)
    async with agent_world(directory, engine) as world:
        client = await world.recorded()
        with pytest.raises(openai.APITimeoutError):
            await ask(client, [USER], timeout=0.3)
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
        client = await world.recorded()
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
        client = await world.recorded()
        late = {"x-request-timeout-s": "0.2"}
        with pytest.raises(openai.InternalServerError):
            await ask(client, [USER], extra_headers=late)
        engine.gate = None
        with pytest.raises(openai.InternalServerError):
            await ask(client, [{"role": "user", "content": "Other."}], stream=False)
        await answer_to(client, [{"role": "user", "content": "Third."}])
        trajectory = await world.recordings.close("r")
    found = [(f.owner, f.reason) for f in trajectory.failures]
    assert found == [(Owner.INFERENCE, "DEADLINE_EXCEEDED"), (Owner.INFERENCE, "NOT_READY")]
    assert sampled_ids(trajectory) == [engine.log[-1].token_ids]


async def test_an_answer_of_all_its_length_is_whole(directory):
    engine = ScriptedEngine(directory, [40, "Seven."])
    async with agent_world(directory, engine) as world:
        client = await world.recorded()
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
        client = await world.recorded()
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
        client = await world.recorded()
        with pytest.raises(openai.BadRequestError):
            await ask(client, [USER], top_logprobs=3, logprobs=True)
        await answer_to(client, [USER])
        trajectory = await world.recordings.close("r")
        assert len((await world.recordings.get("r")).calls) == 1
    assert trajectory.failures == ()


async def test_other_temperatures_than_asked_are_not_trained(directory):
    engine = ScriptedEngine(directory, ["One.", "Two."])
    task = Task(task_id="t", environment="e", split="s", key="k", purpose=Purpose.TRAINING)
    async with agent_world(directory, engine) as world:
        sampling = SamplingParams(temperature=1.0)
        client = await world.recorded(task=task, sampling=sampling)
        await answer_to(client, [USER], temperature=0.5)
        trajectory = await world.recordings.close("r")
        client = await world.recorded("s", task=task, sampling=sampling)
        await answer_to(client, [USER])
        other = await world.recordings.close("s")
    assert [f.reason for f in trajectory.failures] == ["TEMPERATURE_DIFFERS"]
    assert other.failures == ()
    assert (other.task_key, other.environment) == ("k", "e")


async def test_closing_twice_gives_the_same_trajectory(directory):
    async with agent_world(directory, ScriptedEngine(directory, ["One."])) as world:
        client = await world.recorded()
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
        await world.recorded()
        with pytest.raises(PreconditionFailed) as caught:
            await world.recordings.close("r")
    assert caught.value.reason == "RECORDING_EMPTY"


async def test_recordings_are_bounded_in_number_calls_and_time(directory):
    now = [0.0]
    limits = RecordingLimits(max_recordings=2, max_calls=1, time_to_live_s=10)
    engine = ScriptedEngine(directory, ["One."])
    async with agent_world(directory, engine, limits=limits, clock=lambda: now[0]) as world:
        client = await world.recorded("a")
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
        assert world.book.num_recordings == 0


async def test_recording_ids_are_checked(directory):
    async with agent_world(directory, ScriptedEngine(directory, [])) as world:
        for wrong in ("", "a/b", "..", "x" * 129, "a b"):
            with pytest.raises(InvalidInput):
                await world.recordings.create(wrong)
        assert (await world.recordings.create("a")).endswith("/recordings/a/v1")
        await world.recordings.create("a")
        with pytest.raises(AlreadyExists):
            await world.recordings.create("a", group_id="other")


async def test_a_call_that_runs_when_the_recording_is_closed_is_marked(directory):
    gate = asyncio.Semaphore(0)
    engine = ScriptedEngine(directory, ["One.", "Two."], gate=None)
    async with agent_world(directory, engine) as world:
        client = await world.recorded()
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


async def test_log_probs_and_versions_are_those_of_the_engine(directory):
    engine = ScriptedEngine(directory, ["Seven."])
    async with agent_world(directory, engine) as world:
        client = await world.recorded()
        answer = await ask(client, [USER], logprobs=True)
        trajectory = await world.recordings.close("r")
    (sequence,) = trajectory.sequences
    told = [token.logprob for token in answer.choices[0].logprobs.content]
    assert np.allclose(sequence.inference_logprobs, told)
    assert sequence.policy_versions == (engine.policy_version,)


async def test_an_unknown_recording_is_not_found(directory):
    async with agent_world(directory, ScriptedEngine(directory, [])) as world:
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(world.client("nobody"), [USER])
        assert caught.value.code == "recording_not_found"
        answer: httpx.Response = await world.http.get(f"{world.url}/recordings/nobody/v1/models")
        assert answer.status_code == 404
