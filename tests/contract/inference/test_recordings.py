"""Recordings: every sampled token is owned once, whatever the shape of the conversation."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from dialoop.sequences import ForkCause, Source
from dialoop.trajectory import DoneReason, Purpose, Reward, SamplingParams, Task

from tests.support.agent_world import (
    ADD,
    USER,
    ScriptedEngine,
    agent_world,
    answer_to,
    ask,
    call_text,
    make_tool_model,
    require_owned_once,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tool_model(tmp_path_factory.mktemp("agents") / "model")


async def test_a_conversation_is_one_sequence_with_the_ids_the_engine_saw(directory):
    engine = ScriptedEngine(directory, ["Seven.", "Fourteen."])
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
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
        client = await world.start_recording()
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
        tool_message = {"role": "tool", "tool_call_id": call.id, "content": "7"}
        await answer_to(client, [USER, respelled, tool_message], tools=[ADD])
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
        client = await world.start_recording()
        message = (await answer_to(client, [USER], tools=[ADD])).model_dump(exclude_none=True)
        message["tool_calls"][0]["function"]["arguments"] = '{"a": 4}'
        tool_message = {
            "role": "tool",
            "tool_call_id": message["tool_calls"][0]["id"],
            "content": "8",
        }
        await answer_to(client, [USER, message, tool_message], tools=[ADD])
        trajectory = await world.recordings.close("r")
    causes = [s.fork_cause for s in trajectory.sequences]
    assert causes == [ForkCause.NONE, ForkCause.HISTORY_REWRITTEN]
    require_owned_once(trajectory, engine)


async def test_a_call_with_a_repetition_penalty_marks_the_whole_trajectory(directory):
    engine = ScriptedEngine(directory, ["Seven.", "Fourteen."])
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        first = await answer_to(client, [USER])
        more = [USER, first, {"role": "user", "content": "Twice?"}]
        await answer_to(client, more, extra_body={"repetition_penalty": 1.5})
        trajectory = await world.recordings.close("r")
    assert trajectory.sampling.repetition_penalty == 1.5
    assert trajectory.sampling.alters  # the trainer drops it


async def test_the_seed_of_a_recording_draws_other_noise_in_each_call(directory):
    engine = ScriptedEngine(directory, [])
    async with agent_world(directory, engine) as world:
        client = await world.start_recording(sampling=SamplingParams(seed=5))
        for own in ({}, {}, {"seed": 5}):
            await answer_to(client, [USER], **own)
    assert [sample.seed for sample in engine.log] == [5, 1_000_008, 5]


async def test_tool_call_ids_are_given_out_once(directory):
    engine = ScriptedEngine(directory, [call_text("add", a=1)] * 3)
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        answers = [await answer_to(client, [USER], tools=[ADD]) for _ in range(3)]
    assert len({answer.tool_calls[0].id for answer in answers}) == 3


async def test_branches_share_their_prefix_as_context(directory):
    engine = ScriptedEngine(directory, ["Seven.", "Left.", "Right."])
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        first = await answer_to(client, [USER])
        for word in ("left", "right"):
            await answer_to(client, [USER, first, {"role": "user", "content": word}])
        trajectory = await world.recordings.close("r")
        calls = (await world.recordings.get("r")).calls
    first, second = trajectory.sequences
    assert [first.fork_cause, second.fork_cause] == [ForkCause.NONE, ForkCause.BRANCHED]
    require_owned_once(trajectory, engine)
    for sequence, sampling in ((first, engine.log[1]), (second, engine.log[2])):
        assert tuple(sequence.token_ids.tolist()) == sampling.prompt_ids + sampling.token_ids
    assert second.num_model_tokens == len(engine.log[2].token_ids)
    assert [call.sequence_indices for call in calls] == [(0,), (0,), (1,)]
    assert trajectory.history[-1].text == "Right."  # the latest among the longest
    assert [t.num_messages for t in trajectory.turns] == [2, 0, 1]


async def test_parallel_calls_and_retries_fork(directory):
    engine = ScriptedEngine(directory, ["One.", "Two.", "Three."])
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        answers = await asyncio.gather(*(answer_to(client, [USER]) for _ in range(3)))
        assert len({answer.content for answer in answers}) == 3
        trajectory = await world.recordings.close("r")
    causes = [s.fork_cause for s in trajectory.sequences]
    assert causes == [ForkCause.NONE, ForkCause.BRANCHED, ForkCause.BRANCHED]
    require_owned_once(trajectory, engine)


async def test_calls_beside_each_other_rewrite_nothing(directory):
    """A lead, three sub-agents at once that begin alike, and one that tells an answer otherwise."""
    engine = ScriptedEngine(directory, ["Split.", "One.", "Two.", "Three.", "Done."])
    system = {"role": "system", "content": "You count."}
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        await answer_to(client, [USER])
        questions = ({"role": "user", "content": word} for word in ("a", "b", "c"))
        await asyncio.gather(*(answer_to(client, [system, question]) for question in questions))
        otherwise = {"role": "assistant", "content": "Split it."}
        await answer_to(client, [USER, otherwise, {"role": "user", "content": "On."}])
        trajectory = await world.recordings.close("r")
    causes = [sequence.fork_cause for sequence in trajectory.sequences]
    branched = [ForkCause.BRANCHED] * 3
    assert causes == [ForkCause.NONE, *branched, ForkCause.HISTORY_REWRITTEN]
    require_owned_once(trajectory, engine)


async def test_every_choice_is_owned(directory):
    engine = ScriptedEngine(directory, ["One.", "Two.", "Three.", "Four."])
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
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
        client = await world.start_recording()
        main = [{"role": "system", "content": "You lead."}, USER]
        first = await answer_to(client, main)
        await answer_to(client, [{"role": "developer", "content": "You count."}, USER])
        await answer_to(client, [*main, first, {"role": "user", "content": "It said seven."}])
        trajectory = await world.recordings.close("r")
    assert [s.num_model_tokens for s in trajectory.sequences] == [
        len(engine.log[0].token_ids) + len(engine.log[2].token_ids),
        len(engine.log[1].token_ids),
    ]
    assert trajectory.sequences[1].fork_cause is ForkCause.BRANCHED
    assert trajectory.history[0].text == "You lead."
    assert len(trajectory.history) == 5
    own = [s for s in trajectory.sequences[1].segments if s.source is Source.MODEL]
    assert [s.message_index for s in own] == [None]  # no message of the trajectory's history


async def test_other_tools_are_another_prompt(directory):
    engine = ScriptedEngine(directory, ["One.", "Two."])
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        first = await answer_to(client, [USER], tools=[ADD])
        more = [USER, first, {"role": "user", "content": "On."}]
        await answer_to(client, more, tools=[ADD], tool_choice="none")
        trajectory = await world.recordings.close("r")
    assert len(trajectory.sequences) == 2
    require_owned_once(trajectory, engine)


async def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_tokens(directory):
    engine = ScriptedEngine(directory, ["Thought: go\nObservation: no", "Done."])
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
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
        client = await world.start_recording()
        first = await client.completions.create(
            model="any", prompt=[5, 6, 7], extra_body={"return_token_ids": True}
        )
        token_ids = first.choices[0].model_dump()["token_ids"]
        await client.completions.create(model="any", prompt=[5, 6, 7, *token_ids, 9])
        trajectory = await world.recordings.close("r")
    (sequence,) = trajectory.sequences
    assert sequence.token_ids.tolist() == [5, 6, 7, *token_ids, 9, *engine.log[1].token_ids]
    require_owned_once(trajectory, engine)


async def test_other_temperatures_than_asked_are_not_trained(directory):
    engine = ScriptedEngine(directory, ["One.", "Two."])
    task = Task(task_id="t", environment="e", split="s", key="k", purpose=Purpose.TRAINING)
    async with agent_world(directory, engine) as world:
        sampling = SamplingParams(temperature=1.0)
        client = await world.start_recording(task=task, sampling=sampling)
        await answer_to(client, [USER], temperature=0.5)
        trajectory = await world.recordings.close("r")
        client = await world.start_recording("s", task=task, sampling=sampling)
        await answer_to(client, [USER])
        other = await world.recordings.close("s")
    assert [f.reason for f in trajectory.failures] == ["TEMPERATURE_DIFFERS"]
    assert other.failures == ()
    assert (other.task_key, other.environment) == ("k", "e")


async def test_log_probs_and_versions_are_those_of_the_engine(directory):
    engine = ScriptedEngine(directory, ["Seven."])
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        answer = await ask(client, [USER], logprobs=True)
        trajectory = await world.recordings.close("r")
    (sequence,) = trajectory.sequences
    logprobs = [token.logprob for token in answer.choices[0].logprobs.content]
    assert np.allclose(sequence.inference_logprobs, logprobs)
    assert sequence.policy_versions == (engine.policy_version,)


async def test_a_template_that_drops_past_reasoning_forks_and_owns_once(tmp_path):
    directory = make_tool_model(tmp_path / "model")
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    marked = "'<|im_start|>assistant\\n' + message.content }}"
    kept = "'<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}"
    assert marked in config["chat_template"]
    config["chat_template"] = config["chat_template"].replace(marked, kept)
    path.write_text(json.dumps(config), encoding="utf-8")
    engine = ScriptedEngine(directory, ["<think>\nhm\n</think>\n\nSeven.", "Fourteen."])
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        first = await answer_to(client, [USER])
        assert (first.content, first.reasoning_content) == ("Seven.", "hm")
        plain = {"role": "assistant", "content": "Seven."}
        await answer_to(client, [USER, plain, {"role": "user", "content": "Twice?"}])
        trajectory = await world.recordings.close("r")
        shown = world.tokenizer.decode(engine.log[1].prompt_ids)
    causes = [s.fork_cause for s in trajectory.sequences]
    assert causes == [ForkCause.NONE, ForkCause.TEMPLATE_REWRITES_PAST]
    assert "hm" not in shown
    assert "assistant\nSeven.<|im_end|>" in shown
    require_owned_once(trajectory, engine)
    assert trajectory.history[1].reasoning == "hm"
    last = engine.log[1]
    assert tuple(trajectory.sequences[1].token_ids.tolist()) == last.prompt_ids + last.token_ids
