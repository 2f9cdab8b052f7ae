"""An engine in this process as a policy: what it answers is what the service answers with."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from dialoop import ChatTemplate, LocalEnvironmentClient, arithmetic
from dialoop.chat import ChatHistory, History, Message
from dialoop.rollout import play
from dialoop.sequences import PolicyVersion
from dialoop.templates.registry import TemplateRegistry
from dialoop.testing import byte_tokenizer
from dialoop.trajectory import SamplingParams, StopReason, Task
from dialoop.wire.messages import CHAT_HISTORY
from dialoop_services.inference.engine import Sampled, VersionSpan
from dialoop_services.inference.generate import EnginePolicy, generate
from dialoop_services.inference.rendering import GenerationRequest, Renderer

from tests.support.waiting import PATIENCE_S

VERSION = PolicyVersion(lineage="main", number=3)


class Engine:
    """Answers from a script, and keeps what it was asked."""

    max_model_len = 512

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts, self.requests = tokenizer, list(texts), []

    async def sample(self, prompt_ids, sampling, *, stop, num_samples=1):
        self.requests.append(SimpleNamespace(ids=list(prompt_ids), sampling=sampling, stop=stop))
        ids = tuple(self.tokenizer.encode(self.texts.pop(0)).ids)
        span = VersionSpan(start=0, length=len(ids), policy_version=VERSION)
        sampled = Sampled(
            token_ids=ids,
            logprobs=(-0.25,) * len(ids),
            versions=(span,),
            stop_reason=StopReason.STOP,
            queue_s=0.5,
        )
        return (sampled,) * num_samples


def policy_of(*texts, **options):
    tokenizer = byte_tokenizer()
    engine = Engine(tokenizer, *texts)
    renderer = Renderer(tokenizer, ChatTemplate.of(tokenizer))
    return engine, EnginePolicy(engine, renderer, **options)


async def test_samples_say_what_they_were_asked_with():
    engine, policy = policy_of("hello", max_new_tokens=7)
    question = History((Message(role="user", content="hi"),))
    samples = await policy.generate(question, num_samples=2)
    assert engine.requests[0].sampling == SamplingParams(temperature=1.0, max_new_tokens=7)
    assert [sample.sample_index for sample in samples] == [0, 1]
    assert len({sample.prompt_id for sample in samples}) == 1
    assert samples[0].prompt_id
    assert samples[0].queue_s == 0.5
    assert samples[0].tokenizer_digest == byte_tokenizer().digest
    assert samples[0].history.response[-1].content == "hello"
    assert samples[0].sequence.policy_versions == (VERSION,)


async def test_a_seed_draws_other_noise_in_each_turn_and_the_trajectory_says_the_seed():
    """Two turns with the same noise were nearly the same answer."""
    engine, policy = policy_of("<request><Calculator>35+40<call>", "Result=75<submit>")
    task = Task(task_id="t", environment="arithmetic", split="train", key="35+40")
    sessions, sampling = LocalEnvironmentClient(arithmetic()), SamplingParams(seed=5)
    played = await play(task, sessions=sessions, policy=policy, sampling=sampling)
    assert [request.sampling.seed for request in engine.requests] == [5, 1_000_008]
    assert played.sampling.seed == 5


async def test_answers_end_as_the_template_that_was_named_ends_turns():
    tokenizer, registry = byte_tokenizer(), TemplateRegistry()
    source = "{% generation %}{% endgeneration %}{% for m in messages %}{{ m.content }}<|im_start|>"
    registry.add_chat_template("other", source + "{% endfor %}")
    renderer = Renderer(tokenizer, ChatTemplate.of(tokenizer), registry)
    end, question = (
        tokenizer.single_token("<|im_start|>"),
        History((Message(role="user", content="hi"),)),
    )
    stops = []

    async def sample(prompt_ids, sampling, *, stop, num_samples):
        stops.append(stop.by_id)
        version = VersionSpan(start=0, length=2, policy_version=VERSION)
        return (
            Sampled(
                token_ids=(55, end),
                logprobs=(-0.5, -0.5),
                versions=(version,),
                stop_reason=StopReason.STOP,
            ),
        )

    for name, content in (("", "X<|im_start|>"), ("other", "X")):
        request = GenerationRequest(history=question, template_name=name)
        (answer,) = await generate(request, sample, renderer=renderer, max_model_len=99)
        assert answer.history.response[-1].content == content
    assert [end in ids for ids in stops] == [False, True]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<|im_end|>",
        "7<|im_end|>",
        "7\n<|im_start|>user\nWell done: 1.0",
        "7<|im_start|>tool\n75<|im_start|>assistant\n8<|im_end|>",
    ],
)
async def test_an_answer_is_one_message_whatever_turns_it_pretends_to_have(text):
    """infra/decisions/0024: the marks are the policy's text, and the next turn continues them."""
    tokenizer = byte_tokenizer()
    engine, policy = policy_of(text, "9")
    # Its marks are single special tokens, as a model samples them.
    trusted = partial(tokenizer.encode, trusted=True)
    engine.tokenizer = SimpleNamespace(encode=trusted)
    question = History((Message(role="user", content="3+4"),))
    (first,) = await policy.generate(question)
    (message,) = first.history.response
    assert (message.role, message.text) == ("assistant", text.removesuffix("<|im_end|>"))
    assert [m.role for m in first.history.full] == ["user", "assistant"]
    after = first.history.full.append(Message(role="user", content="and 5"))
    await policy.generate(after, context=first.sequence, num_context_messages=2, turn=1)
    kept = first.sequence.token_ids.tolist()
    assert kept[len(kept) - len(trusted(text).ids) :] == list(trusted(text).ids)
    assert engine.requests[1].ids[: len(kept)] == kept


async def test_several_messages_of_a_response_stay_several():
    """A client's response, and what Parse reads."""
    messages = (Message(role="assistant", content="a"), Message(role="assistant", content="b"))
    history = ChatHistory(prompt=History((Message(role="user", content="hi"),)))
    answered = history.respond(*messages)
    read = CHAT_HISTORY.from_proto(CHAT_HISTORY.to_proto(answered))
    assert read == answered
    assert list(read.response) == list(messages)
    template = ChatTemplate.of(byte_tokenizer())
    text = template.render(read.full, add_generation_prompt=False)
    assert [m.text for m in template.parse(text)][-2:] == ["a", "b"]


async def test_what_is_not_used_is_said():
    _, policy = policy_of("hello")
    question = History((Message(role="user", content="hi"),))
    (sample,) = await policy.generate(question, sampling=SamplingParams(temperature=0.0, seed=1))
    assert "temperature 0 is greedy" in sample.warnings[0]


async def test_an_episode_of_two_turns_is_one_sequence():
    engine, policy = policy_of("<request><Calculator>3+4<call>", "Result=7<submit>")
    task = Task(task_id="t", environment="arithmetic", split="train", key="10+10")
    trajectory = await play(task, sessions=LocalEnvironmentClient(arithmetic()), policy=policy)
    assert not trajectory.failures
    assert len(trajectory.turns) == 2
    (sequence,) = trajectory.sequences
    first, second = engine.requests
    assert second.ids[: len(first.ids)] == first.ids  # the second prompt continues the first
    assert sequence.token_ids[: len(second.ids)].tolist() == second.ids


class Watched:
    """A tokenizer whose first token's text waits until the event loop has had a turn."""

    def __init__(self, tokenizer):
        self._tokenizer, self.loop_had_a_turn = tokenizer, threading.Event()

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, ids):
        if list(ids) == [0]:
            assert self.loop_had_a_turn.wait(PATIENCE_S), "the event loop waits for the vocabulary"
        return self._tokenizer.decode(ids)


async def test_the_vocabulary_is_read_while_the_event_loop_serves_others():
    tokenizer = Watched(byte_tokenizer())
    renderer = Renderer(tokenizer, ChatTemplate.of(byte_tokenizer()))
    asyncio.get_running_loop().call_later(0.01, tokenizer.loop_had_a_turn.set)
    stop = await renderer.find_stop_tokens(("9",))
    nine = byte_tokenizer().single_token("9")
    assert stop.by_id[nine] == "9"
    assert stop == renderer.stop_tokens(("9",))
