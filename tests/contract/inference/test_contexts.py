"""A context by its digests gives the tokens of the context itself, at the same bytes each turn."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from contextlib import asynccontextmanager
from functools import partial

import pytest
from dialoop.chat import ChatHistory, History, Message
from dialoop.clients.inference import GENERATE, InferenceClient
from dialoop.clients.inference_messages import Question, samples_from_proto
from dialoop.episode import Sample
from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.sequences import ForkCause, Source, sequence_of
from dialoop.trajectory import SamplingParams, StopReason
from dialoop.v1 import inference_service_pb2 as pb
from dialoop_services.inference.contexts import ContextStore
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
SEEN = {"messages": {"length": 2, "digest": b"a"}, "token_ids": {"length": 9, "digest": b"b"}}


class DigestEngine(TwinEngine):
    """Answers with three digits that depend on every token of the prompt."""

    max_model_len = 100_000

    def __init__(self, tokenizer, spoken=""):
        self._tokenizer = tokenizer
        self._spoken = spoken  # what every answer begins with
        self.vocab_size = tokenizer.vocab_size

    async def sample(self, prompt_ids, sampling, *, stop, num_samples=1):
        digest = hashlib.blake2b(repr(list(prompt_ids)).encode()).digest()
        digits = f"{self._spoken}{digest[0] + 100}"
        ids = (*self._tokenizer.encode(digits).ids, *self._tokenizer.end_of_turn_ids[:1])
        sampled = Sampled(
            token_ids=ids,
            logprobs=tuple(-byte / 100 for byte in digest[: len(ids)]),
            versions=(VersionSpan(start=0, length=len(ids), policy_version=MAIN_3),),
            stop_reason=StopReason.STOP,
        )
        return (sampled,) * num_samples


@asynccontextmanager
async def digest_world(model_dir, root, spoken="", **options):
    engine = DigestEngine(Renderer.of(model_dir).tokenizer, spoken)
    async with world(model_dir, root, engine=engine, **options) as w:
        yield w


class Recorded:
    """A channel that notes the bytes of what passes it."""

    def __init__(self, channel):
        self._channel = channel
        self.requests, self.sizes = [], []

    async def call(self, rpc, request, **options):
        answer = await self._channel.call(rpc, request, **options)
        self.requests.append(request)
        self.sizes.append((request.ByteSize(), answer.ByteSize()))
        return answer

    async def stream(self, rpc, request, **options):
        self.requests.append(request.request)
        async for answer in self._channel.stream(rpc, request, **options):
            yield answer


async def ask_in_full(channel, history, **fields):
    question = Question(history=history, **fields)
    return samples_from_proto(await channel.call(GENERATE, question.to_proto()))


async def play(ask, *, turns, events=None):
    """Play turns of the same words; return each sample and the sequences as a rollout keeps them.

    An event of a turn may rewrite the history before it.
    """
    samples, sequences, history, covered = [], [], QUESTION, 0
    for turn in range(turns):
        history = (events or {}).get(turn, lambda h: h)(history)
        (sample,) = await ask(
            history,
            context=sequences[-1] if sequences else None,
            num_context_messages=covered,
            sampling=GREEDY,
            turn=turn,
        )
        if sequences and sample.sequence.fork_cause is ForkCause.NONE:
            sequences[-1] = sequences[-1].extended_by(sample.sequence)
        else:
            sequences.append(sample.sequence)
        samples.append(dataclasses.replace(sample, generate_s=0.0, queue_s=0.0))
        covered = len(sample.history.full)
        history = sample.history.full.append(Message(role="user", content="go on"))
    return samples, sequences


async def stream(client, history, **fields):
    """Ask by the stream; return the samples of its last answer, whose tokens all came before."""
    token_ids, samples = [], ()
    async for chunk in client.generate_stream(history, **fields):
        token_ids += chunk.token_ids
        samples = chunk.samples or samples
    sampled = [s for s in samples[0].sequence.segments if s.source is Source.MODEL]
    assert token_ids == list(samples[0].sequence.token_ids[sampled[0].start : sampled[0].end])
    return samples


def forgetful(model_dir, root):
    """Return a copy of the model whose template leaves what stands before a "!" out of the past."""
    directory = shutil.copytree(model_dir, root / "forgetful")
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(config | {"chat_template": FORGETFUL}), encoding="utf-8")
    return directory


def rewrite(history):
    """Return the history with other words in the answer before last."""
    messages = list(history)
    messages[-4] = Message(role="assistant", content="something else")
    return History(tuple(messages))


async def test_thirty_turns_by_difference_have_the_tokens_of_thirty_in_full(model_dir, tmp_path):
    contexts = ContextStore()

    def forget(history):
        contexts._contexts.clear()
        return history

    async with digest_world(model_dir, tmp_path / "w", contexts=contexts) as w:
        full_channel, channel = Recorded(w.channel), Recorded(w.channel)
        client = InferenceClient(channel)
        expected = await play(partial(ask_in_full, full_channel), turns=30, events={9: rewrite})
        events = {9: rewrite, 20: forget}
        assert await play(client.generate, turns=30, events=events) == expected

    samples, sequences = expected
    causes = [s.sequence.fork_cause for s in samples if s.sequence.fork_cause != ForkCause.NONE]
    assert causes == [ForkCause.HISTORY_REWRITTEN]
    assert len(sequences) == 2
    # The forgotten context cost one request more; the forked one was sent in full.
    assert client.seen_contexts.num_resends == 1
    assert contexts.num_resends == {"context_unknown": 1}
    in_full = [i for i, request in enumerate(channel.requests) if request.HasField("context")]
    assert in_full == [9, 20]


async def test_a_template_that_rewrites_the_past_forks_by_difference_too(model_dir, tmp_path):
    directory = forgetful(model_dir, tmp_path)
    async with digest_world(directory, tmp_path / "w", spoken="12!") as w:
        channel = Recorded(w.channel)
        client = InferenceClient(channel)
        expected = await play(partial(ask_in_full, w.channel), turns=4)
        assert await play(client.generate, turns=4) == expected
    samples, _ = expected
    causes = [sample.sequence.fork_cause for sample in samples]
    assert causes == [ForkCause.NONE, *[ForkCause.TEMPLATE_REWRITES_PAST] * 3]
    # A fork carries all its tokens, so each next turn continues it by difference.
    by_difference = [request.HasField("known_context") for request in channel.requests]
    assert by_difference == [False, True, True, True]
    assert client.seen_contexts.num_resends == 0


async def test_a_stream_continues_a_context_and_resends_once_where_it_was_forgotten(
    model_dir, tmp_path
):
    contexts = ContextStore()

    def forget(history):
        contexts._contexts.clear()
        return history

    async with digest_world(model_dir, tmp_path / "w", contexts=contexts) as w:
        channel = Recorded(w.channel)
        client = InferenceClient(channel)
        expected = await play(partial(ask_in_full, w.channel), turns=6)
        assert await play(partial(stream, client), turns=6, events={4: forget}) == expected
        # Text has no context; what is wrong with the request itself is not sent twice.
        async for chunk in client.generate_stream(text="1+2", sampling=GREEDY):
            assert chunk.samples == () or chunk.samples[0].text.prompt == "1+2"
        num_sent = len(channel.requests)
        with pytest.raises(InvalidInput):
            await stream(client, History(), sampling=GREEDY)
        assert len(channel.requests) == num_sent + 1
    by_difference = [request.HasField("known_context") for request in channel.requests[:7]]
    assert by_difference == [False, True, True, True, True, False, True]
    assert client.seen_contexts.num_resends == 1
    assert contexts.num_resends == {"context_unknown": 1}


async def test_bytes_are_the_same_at_every_turn(model_dir, tmp_path):
    async with digest_world(model_dir, tmp_path / "w") as w:
        channel = Recorded(w.channel)
        await play(InferenceClient(channel).generate, turns=120)
    # Lengths of more digits take a few bytes more.
    early, late = channel.sizes[1], channel.sizes[-1]
    assert late[0] <= early[0] + 8
    assert late[1] <= early[1] + 40


async def test_each_sample_of_a_group_is_continued_by_its_own_context(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        channel = Recorded(w.channel)
        client = InferenceClient(channel)
        hot = SamplingParams(max_new_tokens=5)
        samples = await client.generate(QUESTION, sampling=hot, num_samples=4)
        for sample in samples:
            fields = {
                "context": sample.sequence,
                "num_context_messages": 2,
                "sampling": GREEDY,
                "turn": 1,
            }
            longer = sample.history.full.append(Message(role="user", content="go on"))
            (ours,) = await client.generate(longer, **fields)
            (theirs,) = await ask_in_full(w.channel, longer, **fields)
            assert ours.sequence == theirs.sequence
            assert ours.history == theirs.history
            assert channel.requests[-1].HasField("known_context")


async def test_a_context_outlives_a_load_of_weights(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        (first,) = await w.client.generate(QUESTION, sampling=GREEDY)
        await w.client.load_weights(publish(tmp_path / "w", model_dir, number=1))
        longer = first.history.full.append(Message(role="user", content="go on"))
        fields = {"context": first.sequence, "num_context_messages": 2, "sampling": GREEDY}
        (second,) = await w.client.generate(longer, **fields, turn=1)
        (in_full,) = await ask_in_full(w.channel, longer, **fields, turn=1)
        assert second.sequence == in_full.sequence
        whole = first.sequence.extended_by(second.sequence)
        assert [version.number for version in whole.policy_versions] == [0, 1]
        assert w.client.seen_contexts.num_resends == 0


async def test_an_unknown_context_is_refused_and_two_forms_at_once_too(model_dir, tmp_path):
    async with digest_world(model_dir, tmp_path / "w") as w:
        prompt = {"prompt": {"messages": [{"role": "user", "content": "go on"}]}}
        request = pb.GenerateRequest(history=prompt, known_context=SEEN)
        await assert_refused(
            w.channel.call(GENERATE, request), PreconditionFailed, "CONTEXT_UNKNOWN"
        )
        keeping = pb.GenerateRequest(history=prompt, keep_context=True)
        kept = (await w.channel.call(GENERATE, keeping)).samples[0]
        assert not kept.history.HasField("full")
        both = pb.GenerateRequest(
            history=prompt, known_context=kept.context, num_context_messages=2
        )
        await assert_refused(w.channel.call(GENERATE, both), InvalidInput, "BAD_CONTEXT")
        of_text = pb.GenerateRequest(text="a", keep_context=True)
        await assert_refused(w.channel.call(GENERATE, of_text), InvalidInput, "BAD_CONTEXT")


def test_the_store_drops_what_was_continued_and_then_what_is_oldest():
    def answer(prompt, text):
        sequence = sequence_of([(range(50), {"source": Source.PROMPT})])
        history = ChatHistory(prompt=prompt).respond(Message(role="assistant", content=text))
        return Sample(history=history, sequence=sequence, stop_reason=StopReason.STOP)

    size = ContextStore().keep(answer(QUESTION, "a"), context=None, after=None).num_bytes
    store = ContextStore(max_bytes=4 * size)
    older, first = (
        store.keep(answer(QUESTION, text), context=None, after=None) for text in ("a", "b")
    )
    longer = first.history.append(Message(role="user", content="go on"))
    after = store.keep(answer(longer, "c"), context=first.sequence, after=first)
    assert len(after.sequence) == 100
    last = store.keep(answer(QUESTION, "d"), context=None, after=None)
    for kept in (older, after, last):
        assert store.find(kept.to_proto()) is kept
    with pytest.raises(PreconditionFailed, match="no context of 2 messages"):
        store.find(first.to_proto())
    assert store.num_resends == {"context_unknown": 1}
