"""Steps for which nothing has to wait: they need no task, and are retried as all others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from dialoop.chat import ChatHistory, History, Message, ToolCall
from dialoop.environments import ChatEnv, Given, MaxTurns, TaskChoice
from dialoop.environments.modes import Text
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.environments.sessions.engine import SessionEngine
from dialoop.environments.sessions.prompts import (
    PromptChain,
    change_of,
    change_of_step,
    full_of,
)
from dialoop.environments.sessions.records import ResetCall, SessionLimits, StepCall
from dialoop.errors import PreconditionFailed
from dialoop.reasons import Reason

PLAIN = ChatEnv(name="plain")


class Counting(ChatEnv):
    """Has a step of its own."""

    async def step(self, episode: Any, answered: Any) -> Any:
        """Tell that it was called."""
        return (await ChatEnv.step(self, episode, answered)).tell(by="own step")


@dataclass
class Wrapping:
    """Passes everything but `step` on to another environment."""

    environment: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.environment, name)

    async def step(self, episode: Any, answered: Any) -> Any:
        """Tell that it was called."""
        return (await self.environment.step(episode, answered)).tell(by="own step")


def run(coroutine: Any) -> Any:
    """Return the result of a coroutine that never waits, without an event loop."""
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    return ended.value.value


def engine_of(environment: Any) -> SessionEngine:
    engine = SessionEngine(Catalogue([environment]), SessionLimits())
    engine.create("s", environment.name)
    choice = TaskChoice(question=Given(query="3+4?"))
    run(engine.reset(ResetCall(session_id="s", episode=1, choice=choice)))
    return engine


def call(text: str, index: int = 0) -> StepCall:
    response = History((Message(role="assistant", content=text),))
    answered = ChatHistory(response=response)
    return StepCall(session_id="s", episode=1, step_index=index, answered=answered)


def test_a_step_without_transforms_waits_for_nothing_and_is_retried_and_refused_as_others():
    engine = engine_of(PLAIN)
    first = run(engine.step(call("7")))
    again = run(engine.step(call("7")))
    assert (first.replayed, again.replayed) == (False, True)
    assert again.outcome is first.outcome
    with pytest.raises(PreconditionFailed) as conflict:
        engine.step_at_once(call("8"))
    assert conflict.value.reason == Reason.STEP_CONFLICT
    with pytest.raises(PreconditionFailed) as gap:
        engine.step_at_once(call("8", index=2))
    assert gap.value.reason == Reason.STEP_GAP
    assert run(engine.step(call("8", index=1))).outcome.episode.step_index == 2


@pytest.mark.parametrize("environment", [Counting(name="own"), Wrapping(PLAIN)])
async def test_an_environment_with_a_step_of_its_own_has_it_called(environment):
    engine = engine_of(environment)
    assert engine.step_at_once(call("7")) is None
    assert (await engine.step(call("7"))).outcome.info == {"by": "own step"}


async def test_a_transform_that_may_wait_gets_a_task():
    engine = engine_of(ChatEnv(name="limited", transforms=(MaxTurns(1),)))
    assert engine.step_at_once(call("7")) is None
    assert (await engine.step(call("7"))).outcome.episode.truncated


def test_an_error_at_once_is_a_failed_step_and_a_bad_answer_changes_nothing(monkeypatch):
    engine = engine_of(PLAIN)
    wrong = StepCall(session_id="s", episode=1, step_index=0, answered=ChatHistory())
    with pytest.raises(Exception, match="full is missing"):
        engine.step_at_once(wrong)

    def break_(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(ChatEnv, "step_at_once", break_)
    played = run(engine.step(call("7")))
    assert [failure.reason for failure in played.outcome.failures] == [Reason.STEP_FAILED]


def test_the_digest_of_a_plain_message_is_that_of_its_sorted_json():
    messages = (
        Message(role="user", content='a "quote", \n, \u00e9, \U0001f600 and \ud800'),
        Message(
            role="assistant", content="x", tool_calls=(ToolCall(name="f", arguments_json="{}"),)
        ),
        Message(role="assistant", content="cut", is_complete=False, name="n"),
    )
    for message in messages:
        text = json.dumps(message.to_chat(), sort_keys=True, separators=(",", ":")) + "\n"
        as_text = PromptChain.of(text).digest.digest
        assert PromptChain.of(History((message,))).digest.digest == as_text


def test_a_change_that_is_found_in_one_comparison_is_that_of_the_general_way():
    hi, yes, more, other = (Message(role="user", content=text) for text in "abcd")
    before, response = History((hi,)), History((yes,))
    sent = [
        ChatHistory(response=response),
        ChatHistory(prompt=before, response=response),
        ChatHistory(full=History((hi, yes))),
        ChatHistory(response=History()),
    ]
    afters = [(), (hi,), (hi, yes), (hi, yes, more), (hi, other, more), (other, yes), (hi, more)]
    for answered in sent:
        for after in map(History, afters):
            change = change_of_step(before, answered, after)
            full = full_of(before, answered)
            assert change == change_of(full, after)
            assert change.apply(full) == after
    assert change_of_step("ab", Text(response="c"), "abcd").added == "d"


def test_a_chain_follows_what_grows_and_begins_anew_where_the_past_has_changed():
    hi, yes, other = (Message(role="user", content=text) for text in "abc")
    chain = PromptChain.of(History((hi,)))
    for after in ((hi, yes), (other, yes), ()):
        followed = chain.follow(History((hi,)), History(after))
        assert followed.digest == PromptChain.of(History(after)).digest
