"""A conversation is continued by its tokens: what was sampled stays, whatever its words spell."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from contextlib import asynccontextmanager

import numpy as np
import pytest
from dialoop.chat import History, Message
from dialoop.clients.inference import GENERATE, InferenceClient
from dialoop.errors import InvalidInput
from dialoop.sequences import Along, Column, ForkCause, Source
from dialoop.trajectory import SamplingParams, StopReason
from dialoop.v1 import inference_service_pb2 as pb
from dialoop_services.inference.engine import Sampled, VersionSpan
from dialoop_services.inference.rendering import Renderer

from tests.support.inference_world import (  # noqa: F401
    QUESTION,
    assert_refused,
    model_dir,
    publish,
    world,
)
from tests.support.rest_world import MAIN_3, TwinEngine

FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('!')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GREEDY = SamplingParams(max_new_tokens=3, temperature=0.0)


class SpellingEngine(TwinEngine):
    """Answers with digits that depend on the prompt, one token a character; keeps the prompts."""

    max_model_len = 100_000

    def __init__(self, tokenizer, spoken=""):
        self._tokenizer = tokenizer
        self._spoken = spoken  # what every answer begins with
        self.vocab_size = tokenizer.vocab_size
        self.prompts = []

    async def sample(self, prompt_ids, sampling, *, stop, num_samples=1):
        self.prompts.append(list(prompt_ids))
        digest = hashlib.blake2b(repr(list(prompt_ids)).encode()).digest()
        text = f"{self._spoken}user{digest[0] + 100}"
        ids = [self._tokenizer.encode(character).ids[0] for character in text]
        assert ids != self._tokenizer.encode(text).ids  # another tokenisation would be another one
        ids = (*ids, *self._tokenizer.end_of_turn_ids[:1])
        sampled = Sampled(
            token_ids=ids,
            logprobs=tuple(-i / 100 for i in range(len(ids))),
            versions=(VersionSpan(start=0, length=len(ids), policy_version=MAIN_3),),
            stop_reason=StopReason.STOP,
        )
        return (sampled,) * num_samples


@asynccontextmanager
async def spelling_world(model_dir, root, spoken=""):
    engine = SpellingEngine(Renderer.of(model_dir).tokenizer, spoken)
    async with world(model_dir, root, engine=engine) as w:
        yield w, engine


async def play(ask, *, turns, events=None):
    """Play turns of the same words; return the sequences and the fork causes as a rollout does.

    An event of a turn may rewrite the history before it.
    """
    causes, sequences, history, covered = [], [], QUESTION, 0
    for turn in range(turns):
        history = (events or {}).get(turn, lambda h: h)(history)
        (sample,) = await ask(
            history,
            context=sequences[-1] if sequences else None,
            num_context_messages=covered,
            sampling=GREEDY,
            turn=turn,
        )
        assert sample.history.prompt == history
        if sequences and sample.sequence.fork_cause is ForkCause.NONE:
            sequences[-1] = sequences[-1].extended_by(sample.sequence)
        else:
            sequences.append(sample.sequence)
        causes.append(sample.sequence.fork_cause)
        covered = len(sample.history.full)
        history = sample.history.full.append(Message(role="user", content="go on"))
    return sequences, causes


async def stream(client, history, **fields):
    """Ask by the stream; return the samples of its last answer, whose tokens all came before."""
    token_ids, samples = [], ()
    async for chunk in client.generate_stream(history, **fields):
        token_ids += chunk.token_ids
        samples = chunk.samples or samples
    sampled = [s for s in samples[0].sequence.segments if s.source is Source.MODEL]
    assert token_ids == list(samples[0].sequence.token_ids[sampled[0].start : sampled[0].end])
    return samples


def rewrite(history):
    """Return the history with other words in the answer before last."""
    messages = list(history)
    messages[-4] = Message(role="assistant", content="something else")
    return History(tuple(messages))


@pytest.mark.parametrize("by_stream", [False, True])
async def test_every_turn_continues_the_sampled_ids_until_the_past_is_rewritten(
    model_dir, tmp_path, by_stream
):
    async with spelling_world(model_dir, tmp_path / "w") as (w, engine):

        async def ask(*args, **fields):
            return await (stream(w.client, *args, **fields) if by_stream
                          else w.client.generate(*args, **fields))  # fmt: skip

        (first, second), causes = await play(ask, turns=12, events={9: rewrite})
    assert [causes.index(ForkCause.HISTORY_REWRITTEN), len(set(causes))] == [9, 2]
    for number, prompt in enumerate(engine.prompts):
        whole = (first if number < 9 else second).token_ids.tolist()
        assert whole[: len(prompt)] == prompt
        if number not in (0, 9):
            assert prompt[: len(engine.prompts[number - 1])] == engine.prompts[number - 1]


async def test_a_template_that_rewrites_the_past_forks(model_dir, tmp_path):
    directory = shutil.copytree(model_dir, tmp_path / "forgetful")
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(config | {"chat_template": FORGETFUL}), encoding="utf-8")
    async with spelling_world(directory, tmp_path / "w", spoken="12!") as (w, _):
        _, causes = await play(w.client.generate, turns=4)
    assert causes == [ForkCause.NONE, *[ForkCause.TEMPLATE_REWRITES_PAST] * 3]


async def test_each_sample_of_a_group_is_continued_by_its_own_context(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        hot = SamplingParams(max_new_tokens=5)
        samples = await w.client.generate(QUESTION, sampling=hot, num_samples=4)
        for sample in samples:
            longer = sample.history.full.append(Message(role="user", content="go on"))
            (next_one,) = await w.client.generate(
                longer, context=sample.sequence, num_context_messages=2, sampling=GREEDY, turn=1
            )
            assert next_one.sequence.fork_cause is ForkCause.NONE
            assert next_one.history.prompt == longer


async def test_a_context_outlives_a_load_of_weights(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        (first,) = await w.client.generate(QUESTION, sampling=GREEDY)
        await w.client.load_weights(publish(tmp_path / "w", model_dir, number=1))
        longer = first.history.full.append(Message(role="user", content="go on"))
        fields = {"context": first.sequence, "num_context_messages": 2, "sampling": GREEDY}
        (second,) = await w.client.generate(longer, **fields, turn=1)
        whole = first.sequence.extended_by(second.sequence)
        assert [version.number for version in whole.policy_versions] == [0, 1]


async def test_a_context_travels_without_its_numbers(model_dir, tmp_path):
    sent = []

    class Channel:
        async def call(self, rpc, request, **options):
            sent.append(request)
            return await w.channel.call(rpc, request, **options)

    async with world(model_dir, tmp_path / "w") as w:
        client = InferenceClient(Channel())
        (first,) = await client.generate(QUESTION, sampling=GREEDY)
        numbers = Column(values=np.zeros(len(first.sequence)), along=Along.TOKENS)
        context = dataclasses.replace(first.sequence, columns={"mine": numbers})
        longer = first.history.full.append(Message(role="user", content="go on"))
        await client.generate(longer, context=context, num_context_messages=2, sampling=GREEDY)
    assert [column.name for column in sent[1].context.columns] == ["token_ids"]
    assert len(sent[1].context.segments) == len(context.segments)


async def test_an_earlier_client_that_names_its_context_by_digests_is_refused(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        prompt = {"prompt": {"messages": [{"role": "user", "content": "go on"}]}}
        request = pb.GenerateRequest(history=prompt)
        known_context = bytes([15 << 3 | 2, 2, 10, 0])
        request.MergeFromString(known_context)
        await assert_refused(w.channel.call(GENERATE, request), InvalidInput, "UNKNOWN_FIELD")
