"""A stop string ends the answer and no thought: in every engine, and as the answer is shown."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dialoop.chat import History
from dialoop.clients.inference import InferenceClient
from dialoop.episode import Sample
from dialoop.sequences import Source, sequence_of
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.trajectory import SamplingParams, StopReason
from dialoop_services.inference.answer_ends import sample_with
from dialoop_services.inference.engine import BASE_VERSION
from dialoop_services.inference.generate import EnginePolicy
from dialoop_services.inference.partial_answer import go_on
from dialoop_services.inference.rendering import Renderer

from tests.support.agent_world import (
    MODEL,
    ScriptedEngine,
    agent_world,
    make_tool_model,
    require_owned_once,
)
from tests.support.families import family

QUESTION = [{"role": "user", "content": "one?"}]
HISTORY = History.from_chats(QUESTION)
STOP = "Question:"
THOUGHT = "The Question: is easy."
ANSWERS = {
    "qwen3": f"<think>\n{THOUGHT}\n</think>\n\n7 Question: more",
    "qwen3_5": f"{THOUGHT}\n</think>\n\n7 Question: more",  # the opening begins the thought
    "gpt_oss": f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final"
    "<|message|>7 Question: more",
}


class _Trusting:
    """A tokenizer to whom the text of a mark is the mark."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str) -> Any:
        return self._tokenizer.encode(text, trusted=True)


class Ignorant(ScriptedEngine):
    """It looks for strings in all that it samples, and knows nothing of thoughts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tokenizer: Any = _Trusting(self._tokenizer)


class Whole:
    """An engine that does not stream."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.max_model_len, self.sample = engine.max_model_len, engine.sample


def content_of(sample: Sample) -> str:
    (message,) = sample.history.response or ()
    return message.text


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
async def test_a_stop_string_in_a_thought_does_not_end_the_answer(
    name: str, stream: bool, keeps: bool
) -> None:
    directory = family(name).directory
    engine = Ignorant(directory, [ANSWERS[name]] * 3)
    options: dict[str, Any] = {"stop": [STOP], "extra_body": {"include_stop_str_in_output": keeps}}
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        chat = {"model": MODEL, "messages": QUESTION, **options}
        if stream:
            chunks = await client.chat.completions.create(**chat, stream=True)
            choices = [chunk.choices[0] async for chunk in chunks]
            shown = [
                "".join(getattr(choice.delta, key, None) or "" for choice in choices)
                for key in ("content", "reasoning_content")
            ]
            reason = choices[-1].finish_reason
        else:
            choice = (await client.chat.completions.create(**chat)).choices[0]
            shown = [choice.message.content, choice.message.reasoning_content]
            reason = choice.finish_reason
        trajectory = await world.recordings.close("r")
    assert shown == ["7 Question:" if keeps else "7 ", THOUGHT]
    assert reason == "stop"
    require_owned_once(trajectory, engine)
    (sampled,) = engine.log
    assert world.tokenizer.decode(sampled.token_ids) == ANSWERS[name].removesuffix(" more")


@pytest.mark.parametrize("name", ANSWERS)
async def test_the_option_looks_for_it_in_thoughts_too(name: str) -> None:
    directory = family(name).directory
    engine = Ignorant(directory, [ANSWERS[name]] * 2)
    sampling = SamplingParams(stop=(STOP,), stop_in_reasoning=True)
    async with agent_world(directory, engine) as world:
        body = {"model": MODEL, "messages": QUESTION, "stop": STOP, "stop_in_reasoning": True}
        (choice,) = (await world.post("/v1/chat/completions", body)).json()["choices"]
        (sample,) = await InferenceClient(world.channel).generate(HISTORY, sampling=sampling)
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("", "The ")
    assert sample.sampling.stop_in_reasoning
    ended = ANSWERS[name].partition(STOP)[0] + STOP
    assert content_of(sample) == ended
    assert [world.tokenizer.decode(sampled.token_ids) for sampled in engine.log] == [ended] * 2


@pytest.mark.parametrize("name", ANSWERS)
async def test_generate_and_a_policy_in_this_process_end_at_the_same_token(name: str) -> None:
    directory, text = family(name).directory, ANSWERS[name]
    sampling = SamplingParams(stop=(STOP,), max_new_tokens=160)
    found = []
    engine = Ignorant(directory, [text] * 2)
    async with agent_world(directory, engine) as world:
        client = InferenceClient(world.channel)
        found += await client.generate(HISTORY, sampling=sampling)
        chunks = [c async for c in client.generate_stream(HISTORY, sampling=sampling)]
    found += chunks[-1].samples
    streamed = [token for chunk in chunks for token in chunk.token_ids]
    assert tuple(streamed) == engine.log[1].token_ids
    renderer = Renderer.of(directory)
    for other in (Ignorant(directory, [text] * 2), Whole(Ignorant(directory, [text] * 2))):
        policy = EnginePolicy(other, renderer)  # type: ignore[arg-type]
        found += await policy.generate(HISTORY, sampling=sampling, num_samples=2)
    assert {content_of(sample) for sample in found} == {text.removesuffix(" more")}
    assert {sample.stop_reason for sample in found} == {StopReason.STOP}
    assert {sample.stop_string for sample in found} == {STOP}
    assert {len(sample.sequence.inference_logprobs) for sample in found} == {len(streamed)}


async def test_an_answer_that_goes_on_elsewhere_is_read_from_its_beginning() -> None:
    directory, text = family("qwen3").directory, ANSWERS["qwen3"]
    renderer = Renderer.of(directory)
    form = renderer.form()
    stop = await renderer.find_stop_tokens((STOP,), form)
    ids = _Trusting(renderer.tokenizer).encode(text).ids
    for cut in (5, text.index("is easy"), text.index("Question: more") + 3):
        before = len(_Trusting(renderer.tokenizer).encode(text[:cut]).ids)
        engine = Ignorant(directory, [renderer.tokenizer.decode(ids[before:])])
        fields = {"source": Source.MODEL, "policy_version": BASE_VERSION}
        part = sequence_of([(ids[:before], fields)], logprobs=[-0.1] * before)
        answer = await go_on(
            part,
            partial(sample_with, engine),  # type: ignore[arg-type]
            [5, 6],
            SamplingParams(max_new_tokens=160, stop=(STOP,)),
            stop=stop,
            decode=renderer.tokenizer.decode,
        )
        assert renderer.tokenizer.decode(answer.token_ids) == text.removesuffix(" more")
        assert (answer.stop_reason, answer.stop_string) == (StopReason.STOP, STOP)
        ended = sequence_of([(answer.token_ids, fields)], logprobs=answer.logprobs)
        again = await go_on(
            ended,
            None,  # type: ignore[arg-type]  # nothing is sampled any more
            [5, 6],
            SamplingParams(max_new_tokens=160, stop=(STOP,)),
            stop=stop,
            decode=renderer.tokenizer.decode,
        )
        assert again.token_ids == answer.token_ids


@pytest.mark.parametrize("stop", ["7", " more", "e", "\n"])
async def test_a_stop_string_may_be_one_token_or_a_part_of_one(stop: str) -> None:
    directory = family("qwen3").directory
    engine = Ignorant(
        directory, ["<think>\nThe 7 is\nthere, no more.\n</think>\n\nSo 7, no more\n."]
    )
    async with agent_world(directory, engine) as world:
        body = {"model": MODEL, "messages": QUESTION, "stop": stop}
        (choice,) = (await world.post("/v1/chat/completions", body)).json()["choices"]
    message = choice["message"]
    assert message["content"] == "So 7, no more\n.".partition(stop)[0]
    assert message["reasoning_content"] == "The 7 is\nthere, no more."


async def test_where_there_are_no_thoughts_every_stop_string_ends_the_answer(
    tmp_path: Path,
) -> None:
    directory, text = make_tool_model(tmp_path / "model"), ANSWERS["qwen3"]
    async with agent_world(directory, ScriptedEngine(directory, [text] * 2)) as world:
        body = {"model": MODEL, "messages": QUESTION, "stop": STOP}
        (choice,) = (await world.post("/v1/chat/completions", body)).json()["choices"]
    assert choice["message"]["content"] == "<think>\nThe "
    directory = family("qwen3").directory
    async with agent_world(directory, ScriptedEngine(directory, [text] * 2)) as world:
        body = {"model": MODEL, "prompt": "one?", "stop": STOP}
        (choice,) = (await world.post("/v1/completions", body)).json()["choices"]
        sampling = SamplingParams(stop=(STOP,))
        (sample,) = await InferenceClient(world.channel).generate(text="one?", sampling=sampling)
    assert choice["text"] == "<think>\nThe "
    assert sample.text is not None
    assert sample.text.response == "<think>\nThe Question:"


@pytest.mark.parametrize(("name", "mark"), [("qwen3", "</think>"), ("gpt_oss", "<|end|>")])
async def test_a_stop_at_the_mark_that_ends_a_thought_ends_the_answer_there(
    name: str, mark: str
) -> None:
    directory = family(name).directory
    engine = Ignorant(directory, [ANSWERS[name]])
    async with agent_world(directory, engine) as world:
        sampling = SamplingParams(stop=(mark,))
        (sample,) = await InferenceClient(world.channel).generate(HISTORY, sampling=sampling)
    (sampled,) = engine.log
    assert world.tokenizer.decode(sampled.token_ids) == ANSWERS[name].partition(mark)[0] + mark
    assert sample.stop_reason is StopReason.STOP
