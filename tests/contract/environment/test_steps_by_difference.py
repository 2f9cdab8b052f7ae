"""A step and its answer carry what was added, and digests of what came before."""

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import blake2b

import httpx
import pytest
from dialoop.chat import ChatHistory, History, Message
from dialoop.clients.channel import Channel
from dialoop.clients.conversations import Conversations
from dialoop.clients.environment import BATCH_STEP, STEP, EnvironmentClient, StepItem
from dialoop.clients.interact import InteractiveSessions
from dialoop.environments import (
    ArithmeticTasks,
    ChatEnv,
    Given,
    StepCounter,
    Text,
    Tokens,
    Transform,
)
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.environments.tasks.choosing import TaskChoice
from dialoop.local.client import LocalEnvironmentClient
from dialoop.testing import byte_tokenizer
from dialoop.wire import message_from_proto
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings

from tests.support.environment_doors import at, open_session, pb, reason_of, say

BYTES = byte_tokenizer()
TASKS = ArithmeticTasks()
NUM_TURNS = 12


class Echo(Transform):
    """A message of the user after each of the policy's."""

    num_steps = 0

    async def step(self, outcome):
        self.num_steps += 1
        return outcome.append(Message(role="user", content="Go on, please."))


class Rewrite(Transform):
    """Changes what the policy said, and at its third message forgets the second."""

    async def step(self, outcome):
        *past, last = outcome.episode.history
        if outcome.episode.step_index == 3:
            del past[2:4]
        history = History((*past, replace(last, content=last.text.upper())))
        return replace(outcome, episode=replace(outcome.episode, history=history))


def echo(mode="history", *transforms):
    tokenizer = None if mode == "history" else BYTES
    return ChatEnv(
        name="echo",
        tasks=TASKS,
        transforms=transforms or (Echo(),),
        input_mode=mode,
        tokenizer=tokenizer,
    )


def answer_in(mode, text="An answer of some words."):
    ids = (*BYTES.encode(text).ids, BYTES.end_of_turn_ids[0])
    return {"history": say(text), "text": Text(response=text), "tokens": Tokens(response=ids)}[mode]


def prompt_of(result):
    return result.history.prompt or (result.text or result.tokens).prompt


class Watched:
    """A channel that keeps the steps and their answers, and may damage an answer."""

    def __init__(self, channel):
        self._channel = channel
        self.steps = []
        self.damage = lambda answer: None

    async def call(self, rpc, request):
        answer = await self._channel.call(rpc, request)
        if rpc in (STEP, BATCH_STEP):
            self.damage(answer)
            self.steps.append((request, answer))
        return answer


@asynccontextmanager
async def watch_client(environment, door="sdk"):
    async with at(door, environment) as client:
        client._channel = Watched(client._channel)
        yield client, client._channel


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("door", ["grpc", "rest", "sdk"])
async def test_steps_are_as_small_at_the_end_and_their_results_are_whole(door, mode):
    local = LocalEnvironmentClient(echo(mode))
    async with watch_client(echo(mode), door) as (client, channel):
        question = {"question": Given(query="q")}
        openings = [await open_session(side, "echo", **question) for side in (client, local)]
        assert prompt_of(openings[0]) == prompt_of(openings[1])
        for index in range(NUM_TURNS):
            step = {"episode": 1, "step_index": index, "history": answer_in(mode)}
            results = [await side.step("s", **step) for side in (client, local)]
            assert results[0] == results[1]
        state = await client.get_session("s")
        assert prompt_of(state) == prompt_of(results[0])
        assert client.conversations.num_resends == 0
    sizes = [(request.ByteSize(), answer.ByteSize()) for request, answer in channel.steps]
    assert max(sizes)[0] - min(sizes)[0] <= 4  # a number of one digit more
    assert max(answer for _, answer in sizes) - min(answer for _, answer in sizes) <= 6


@pytest.mark.parametrize("form", ["response", "full", "prompt and response"])
async def test_the_callers_form_of_an_answer_makes_no_difference(form):
    async with watch_client(echo()) as (client, channel):
        prompt = (await open_session(client, "echo", question=Given(query="q"))).history.prompt
        for index in range(3):
            whole = ChatHistory(prompt=prompt).respond(Message(role="assistant", content="a"))
            answer = {
                "response": ChatHistory(response=whole.response),
                "full": ChatHistory(full=whole.full),
                "prompt and response": replace(whole, full=None),
            }[form]
            result = await client.step("s", episode=1, step_index=index, history=answer)
            prompt = result.history.prompt
        assert len(prompt) == 7
        for request, answer in channel.steps:
            assert not request.history.HasField("full")
            assert not request.history.HasField("prompt")
            assert not answer.HasField("history")


async def test_an_environment_that_edits_the_past_is_followed():
    local = LocalEnvironmentClient(echo("history", Rewrite()))
    async with watch_client(echo("history", Rewrite())) as (client, channel):
        for side in (client, local):
            await open_session(side, "echo", question=Given(query="q"))
        for index in range(5):
            step = {"episode": 1, "step_index": index, "history": say("abcde"[index])}
            results = [await side.step("s", **step) for side in (client, local)]
            assert results[0] == results[1]
        assert client.conversations.num_resends == 0
        assert [answer.change.num_kept for _, answer in channel.steps] == [1, 2, 2, 3, 4]


async def test_a_client_without_the_past_still_gets_whole_results():
    async with watch_client(echo()) as (client, channel):
        await open_session(client, "echo", question=Given(query="q"))
        first = await client.step("s", episode=1, step_index=0, history=say("a"))
        client.conversations = Conversations()  # as in a process that takes over
        alone = await client.step("s", episode=1, step_index=1, history=say("b"))
        client.conversations = Conversations()
        last = Message(role="assistant", content="c")
        whole = await client.step("s", episode=1, step_index=2, history=alone.history.respond(last))
        assert [m.text for m in whole.history.prompt][::2] == ["q", *["Go on, please."] * 3]
        assert whole.history.prompt.starts_with(first.history.prompt)
        assert client.conversations.num_resends == 0
        assert [answer.HasField("history") for _, answer in channel.steps] == [False, True, False]


@pytest.mark.parametrize("calls", ["step", "batch", "step_and_reset"])
async def test_a_step_on_another_prompt_costs_one_full_resend_and_is_counted(calls):
    transform = Echo()
    async with watch_client(echo("history", transform)) as (client, channel):
        prompt = (await open_session(client, "echo", question=Given(query="q"))).history.prompt
        shared = client.conversations._shared["s"]
        wrong = replace(shared, chain=shared.chain.extend(prompt))
        client.conversations._shared["s"] = wrong
        item = StepItem(session_id="s", episode=1, step_index=0, history=say("a"))
        if calls == "step":
            result = await client.step("s", episode=1, step_index=0, history=say("a"))
        elif calls == "batch":
            (result,) = await client.batch_step([item])
        else:
            following = {"next_split": "train", "next_task_key": TASKS.keys("train")[0]}
            result, _ = await client.step_and_reset(item, **following)
        assert [m.text for m in result.history.prompt] == ["q", "a", "Go on, please."]
        assert not result.replayed
        assert (client.conversations.num_resends, transform.num_steps) == (1, 1)
        await client.step("s", episode=1, step_index=1, history=say("b"))
        assert client.conversations.num_resends == 1
        assert channel.steps[-1][1].HasField("change")


@pytest.mark.parametrize("calls", ["step", "batch"])
async def test_an_answer_on_another_prompt_costs_one_full_resend_and_no_second_step(calls):
    transform = Echo()

    def damage(answer):
        for step in getattr(answer, "items", None) or [answer]:
            getattr(step, "response", step).change.messages[0].content = "Stop."
        channel.damage = lambda answer: None

    async with watch_client(echo("history", transform)) as (client, channel):
        await open_session(client, "echo", question=Given(query="q"))
        channel.damage = damage
        item = StepItem(session_id="s", episode=1, step_index=0, history=say("a"))
        if calls == "step":
            result = await client.step("s", episode=1, step_index=0, history=say("a"))
        else:
            (result,) = await client.batch_step([item])
        assert [m.text for m in result.history.prompt] == ["q", "a", "Go on, please."]
        assert not result.replayed
        assert (client.conversations.num_resends, transform.num_steps) == (1, 1)


async def test_another_prompt_is_refused_and_changes_nothing_and_the_service_counts_it():
    message = {"role": "assistant", "content": "a"}
    async with (
        serving(EnvironmentSettings(rest_port=0), Catalogue([echo()])) as server,
        Channel(server.address) as channel,
        httpx.AsyncClient(base_url=f"http://{server.rest_address}") as http,
    ):
        client = EnvironmentClient(channel)
        await open_session(client, "echo", question=Given(query="q"))
        step = pb.StepRequest(
            session_id="s",
            episode=1,
            history={"response": {"messages": [message]}},
            prompt={"length": 1, "digest": b"0123456789abcdef"},
        )
        assert await reason_of(channel.call(STEP, step)) == "PROMPT_MISMATCH"
        assert (await client.get_session("s")).next_step_index == 0
        digest = blake2b(b'{"content":"q","role":"user"}\n', digest_size=16).digest()
        step.prompt.digest = digest
        first = await channel.call(STEP, step)
        again = await channel.call(STEP, step)
        assert again.replayed
        assert again.change == first.change
        step.prompt.digest = b"0123456789abcdef"
        assert await reason_of(channel.call(STEP, step)) == "PROMPT_MISMATCH"
        metrics = (await http.get("/metrics")).text
        assert 'dialoop_step_resends_total{shown_by="step"} 2.0' in metrics


async def test_digests_are_as_the_proto_says():
    async with watch_client(echo()) as (client, channel):
        await open_session(client, "echo", question=Given(query="Grüße"))
        result = await client.step("s", episode=1, step_index=0, history=say('"a"\n', name="me"))
        ((request, answer),) = channel.steps
        lines = [
            json.dumps(message.to_chat(), sort_keys=True, separators=(",", ":")) + "\n"
            for message in result.history.prompt
        ]
        for proto, count in ((request.prompt, 1), (answer.prompt, 3)):
            whole = "".join(lines[:count]).encode()
            assert proto.length == count
            assert proto.digest == blake2b(whole, digest_size=16).digest()
        added = [message_from_proto(message).text for message in answer.change.messages]
        assert added == ["Go on, please."]


async def test_the_stream_sends_differences_too():
    async with (
        serving(EnvironmentSettings(), Catalogue([echo()])) as server,
        Channel(server.address) as channel,
        InteractiveSessions(channel) as sessions,
    ):
        exchanges = []
        ask = sessions._ask

        async def watch(**request):
            answer = await ask(**request)
            exchanges.append((request.get("step"), answer.step))
            return answer

        sessions._ask = watch
        await sessions.create_session("s", "echo")
        await sessions.reset("s", episode=1, question=Given(query="q"))
        del exchanges[:]
        for index in range(NUM_TURNS):
            result = await sessions.step(
                "s", episode=1, step_index=index, history=say("An answer.")
            )
        assert len(result.history.prompt) == 1 + 2 * NUM_TURNS
        sizes = [(step.ByteSize(), answer.ByteSize()) for step, answer in exchanges]
        assert max(sizes)[1] - min(sizes)[1] <= 6
        assert sessions.conversations.num_resends == 0


async def test_a_step_without_a_session_answers_with_what_was_added():
    async with watch_client(ChatEnv(name="echo", transforms=(StepCounter(9), Echo()))) as (
        client,
        _,
    ):
        choice = TaskChoice(question=Given(query="q"))
        prompt = History((Message(role="user", content="q"),))
        answered = ChatHistory(prompt=prompt).respond(Message(role="assistant", content="a"))
        result = await client.step_history("echo", choice, answered)
        assert [m.text for m in result.history.prompt] == ["q", "a", "Go on, please."]
