"""A session is the truth: a step answers with what it added, and nobody else keeps the past."""

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from dialoop.chat import ChatHistory, History, Message
from dialoop.clients.channel import Channel
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
from dialoop.environments.sessions.records import full_of
from dialoop.environments.tasks.choosing import TaskChoice
from dialoop.local.client import LocalEnvironmentClient
from dialoop.testing import byte_tokenizer
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
    """A channel that keeps the steps and their answers."""

    def __init__(self, channel):
        self._channel = channel
        self.steps = []

    async def call(self, rpc, request):
        answer = await self._channel.call(rpc, request)
        if rpc in (STEP, BATCH_STEP):
            self.steps.append((request, answer))
        return answer


@asynccontextmanager
async def watch_client(environment, door="sdk"):
    async with at(door, environment) as client:
        client._channel = Watched(client._channel)
        yield client, client._channel


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("door", ["grpc", "rest", "sdk"])
async def test_answers_are_as_small_at_the_end_and_their_results_are_whole(door, mode):
    local = LocalEnvironmentClient(echo(mode))
    async with watch_client(echo(mode), door) as (client, channel):
        question = {"question": Given(query="q")}
        openings = [await open_session(side, "echo", **question) for side in (client, local)]
        prompt = prompt_of(openings[0])
        assert prompt == prompt_of(openings[1])
        for index in range(NUM_TURNS):
            answer = replace(answer_in(mode), prompt=prompt)
            step = {"episode": 1, "step_index": index, "history": answer}
            results = [await side.step("s", **step) for side in (client, local)]
            assert results[0] == results[1]
            prompt = prompt_of(results[0])
        state = await client.get_session("s")
        assert prompt_of(state) == prompt
    sizes = [answer.ByteSize() for _, answer in channel.steps]
    assert max(sizes) - min(sizes) <= 6


@pytest.mark.parametrize("form", ["response", "full", "prompt and response", "all"])
async def test_the_callers_form_of_an_answer_makes_no_difference(form):
    async with watch_client(echo()) as (client, channel):
        prompt = (await open_session(client, "echo", question=Given(query="q"))).history.prompt
        for index in range(3):
            whole = ChatHistory(prompt=prompt).respond(Message(role="assistant", content="a"))
            answer = {
                "response": ChatHistory(response=whole.response),
                "full": ChatHistory(full=whole.full),
                "prompt and response": replace(whole, full=None),
                "all": whole,
            }[form]
            result = await client.step("s", episode=1, step_index=index, history=answer)
            assert result.history.prompt[:-1] == whole.full
            prompt = result.history.prompt
        assert len(prompt) == 7
        for request, answer in channel.steps:
            assert answer.HasField("history") == (form == "response")
            # What a caller has of the prompt is sent once, for the session to compare.
            assert request.history.HasField("prompt") == (form == "prompt and response")


async def test_an_environment_that_edits_the_past_answers_with_all_of_it():
    local = LocalEnvironmentClient(echo("history", Rewrite()))
    async with watch_client(echo("history", Rewrite())) as (client, channel):
        for side in (client, local):
            opening = await open_session(side, "echo", question=Given(query="q"))
        prompt = opening.history.prompt
        for index in range(5):
            said = say("abCDe"[index])  # what is upper case already is not changed
            step = {"episode": 1, "step_index": index, "history": replace(said, prompt=prompt)}
            results = [await side.step("s", **step) for side in (client, local)]
            assert results[0] == results[1]
            prompt = results[0].history.prompt
        is_whole = [answer.HasField("history") for _, answer in channel.steps]
        assert is_whole == [True, True, True, False, True]


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("form", ["full", "prompt and response", "prompt beside full"])
@pytest.mark.parametrize("door", ["grpc", "rest", "sdk"])
async def test_another_prompt_is_refused_and_changes_nothing(door, form, mode):
    environment = echo(mode)
    async with at(door, environment) as client:
        opening = await open_session(client, "echo", question=Given(query="q"))
        other = prompt_of(await open_session(client, "echo", "other", question=Given(query="w")))
        answer = replace(answer_in(mode), prompt=other)
        if form == "full":
            answer = type(answer)(full=full_of(other, answer))
        elif form == "prompt beside full":
            whole = full_of(prompt_of(opening), answer_in(mode))
            answer = type(answer)(prompt=other, full=whole)
        step = {"episode": 1, "step_index": 0, "history": answer}
        assert await reason_of(client.step("s", **step)) == "HISTORY_REWRITTEN"
        assert (await client.get_session("s")).next_step_index == 0
        assert environment.transforms[0].num_steps == 0
        ours = replace(answer_in(mode), prompt=prompt_of(opening))
        first = await client.step("s", **step | {"history": ours})
        again = await client.step("s", **step | {"history": answer_in(mode)})
        assert again == replace(first, replayed=True)
        assert await reason_of(client.step("s", **step)) == "STEP_CONFLICT"


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("door", ["grpc", "sdk", "in_process"])
async def test_another_response_than_in_full_is_refused_and_changes_nothing(door, mode):
    environment = echo(mode)
    async with at(door, environment) as client:
        opening = await open_session(client, "echo", question=Given(query="q"))
        whole = full_of(prompt_of(opening), answer_in(mode))
        other = answer_in(mode, "Another answer.").response
        answer = replace(answer_in(mode), full=whole, response=other)
        step = client.step("s", episode=1, step_index=0, history=answer)
        assert await reason_of(step) == "FULL_NOT_PROMPT_AND_RESPONSE"
        assert environment.transforms[0].num_steps == 0
        assert (await client.get_session("s")).next_step_index == 0


async def test_of_two_clients_of_a_session_the_one_behind_asks_get_session():
    async with at("sdk", echo()) as ahead:
        behind = EnvironmentClient(ahead._channel)
        prompt = (await open_session(ahead, "echo", question=Given(query="q"))).history.prompt
        mine = ChatHistory(prompt=prompt).respond(Message(role="assistant", content="mine"))
        theirs = ChatHistory(prompt=prompt).respond(Message(role="assistant", content="theirs"))
        await ahead.step("s", episode=1, step_index=0, history=mine)
        for index, reason in ((0, "STEP_CONFLICT"), (1, "HISTORY_REWRITTEN")):
            step = behind.step("s", episode=1, step_index=index, history=theirs)
            assert await reason_of(step) == reason
        state = await behind.get_session("s")
        answer = state.history.respond(Message(role="assistant", content="theirs"))
        result = await behind.step("s", episode=1, step_index=state.next_step_index, history=answer)
        assert [m.text for m in result.history.prompt][1::2] == ["mine", "theirs"]


async def test_an_earlier_client_that_sends_a_digest_is_refused():
    async with watch_client(echo()) as (client, channel):
        await open_session(client, "echo", question=Given(query="q"))
        step = pb.StepRequest(session_id="s", episode=1, history={"response": {"messages": []}})
        step.MergeFromString(bytes([7 << 3 | 2, 2, 8, 1]))
        assert await reason_of(channel.call(STEP, step)) == "UNKNOWN_FIELD"


async def test_batches_and_step_and_reset_answer_so_too():
    async with watch_client(echo("history", StepCounter(2), Echo())) as (client, _):
        prompt = (await open_session(client, "echo", question=Given(query="q"))).history.prompt
        whole = ChatHistory(prompt=prompt).respond(Message(role="assistant", content="a"))
        item = StepItem(session_id="s", episode=1, step_index=0, history=whole)
        (first,) = await client.batch_step([item])
        assert [m.text for m in first.history.prompt] == ["q", "a", "Go on, please."]
        whole = first.history.respond(Message(role="assistant", content="b"))
        last, opening = await client.step_and_reset(
            replace(item, step_index=1, history=whole),
            next_split="train",
            next_task_key=TASKS.keys("train")[0],
        )
        assert last.history.prompt[:4] == whole.full
        assert opening is not None


async def test_the_stream_answers_so_too():
    async with (
        serving(EnvironmentSettings(), Catalogue([echo()])) as server,
        Channel(server.address) as channel,
        InteractiveSessions(channel) as sessions,
    ):
        exchanges = []
        ask = sessions._ask

        async def watch(**request):
            answer = await ask(**request)
            exchanges.append(answer.step)
            return answer

        sessions._ask = watch
        await sessions.create_session("s", "echo")
        prompt = (await sessions.reset("s", episode=1, question=Given(query="q"))).history.prompt
        del exchanges[:]
        for index in range(NUM_TURNS):
            answer = ChatHistory(prompt=prompt).respond(Message(role="assistant", content="a"))
            result = await sessions.step("s", episode=1, step_index=index, history=answer)
            prompt = result.history.prompt
        assert len(prompt) == 1 + 2 * NUM_TURNS
        sizes = [step.ByteSize() for step in exchanges]
        assert max(sizes) - min(sizes) <= 6


async def test_a_step_without_a_session_answers_with_what_was_added():
    async with watch_client(ChatEnv(name="echo", transforms=(StepCounter(9), Echo()))) as (
        client,
        _,
    ):
        choice = TaskChoice(question=Given(query="q"))
        prompt = History((Message(role="user", content="q"),))
        answered = ChatHistory(prompt=prompt).respond(Message(role="assistant", content="a"))
        for sent in (answered, ChatHistory(full=answered.full), replace(answered, full=None)):
            result = await client.step_history("echo", choice, sent)
            assert [m.text for m in result.history.prompt] == ["q", "a", "Go on, please."]
