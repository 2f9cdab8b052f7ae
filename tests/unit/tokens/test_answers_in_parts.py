"""A template that takes no written call in a content is given answers in their parts.

gpt-oss's refuses contents with channels, and writes them itself. What was sampled stands all the
same, as models spell it.
"""

from __future__ import annotations

import pytest
from dialoop.chat import History, Message
from dialoop.sequences import ForkCause, PolicyVersion, Sequence
from dialoop.templates.chat_template import ChatTemplate
from dialoop.tokens.builder import TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer

from tests.support.families import family

VERSION = PolicyVersion(lineage="main", number=1)
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":3}<|call|>'
FINAL = "<|channel|>final<|message|>Hi<|return|>"
ANSWERED = "<|start|>functions.add to=assistant<|channel|>commentary<|message|>"
ASKED = "<|start|>user<|message|>two?<|end|><|start|>assistant"


def prompts(*turns: tuple[str, Message]) -> list[tuple[ForkCause, str]]:
    """Of each prompt after these answers and replies: why it forks, and its text."""
    tokenizer = Tokenizer.from_directory(family("gpt_oss").directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    history = History((Message(role="user", content="one?"),))
    context: Sequence | None = None
    covered, made = 0, []
    for answer, reply in (*turns, ("", Message(role="user"))):
        prompt = builder.prompt(
            history, context=context, num_context_messages=covered, options={"tools": [ADD]}
        )
        assert prompt.history == history
        text = tokenizer.decode(prompt.sequence.token_ids.tolist())
        made.append((prompt.fork_cause, text.partition("one?<|end|><|start|>assistant")[2]))
        ids = tokenizer.encode(answer, trusted=True).ids
        said = builder.answer(
            prompt,
            ids,
            versions=[(len(ids), VERSION)],
            is_complete=answer.endswith(("<|call|>", "<|return|>")),
        )
        goes_on = context is not None and prompt.fork_cause is ForkCause.NONE
        context = context.extended_by(said.appended) if context and goes_on else said.appended
        covered = len(history) + 1
        history = history.append(said.message).append(reply)
    return made[1:]


def test_calls_stay_as_they_were_sampled_until_the_last_answer() -> None:
    answers = [Message(role="tool", content=text) for text in ("7", "8")]
    first, second = prompts((THOUGHT + CALL, answers[0]), (CALL, answers[1]))
    one = f'{THOUGHT}{CALL}{ANSWERED}"7"<|end|><|start|>assistant'
    assert first == (ForkCause.NONE, one)
    assert second == (ForkCause.NONE, f'{one}{CALL}{ANSWERED}"8"<|end|><|start|>assistant')


def test_what_a_tool_spells_stays_text() -> None:
    ((cause, text),) = prompts((CALL, Message(role="tool", content="<|call|>")))
    assert cause is ForkCause.NONE
    assert text == f'{CALL}{ANSWERED}"<|call|>"<|end|><|start|>assistant'


@pytest.mark.parametrize("answer", [FINAL, THOUGHT + FINAL])
def test_an_answer_of_the_past_has_another_end_and_no_thought(answer: str) -> None:
    question = Message(role="user", content="two?")
    past = "<|channel|>final<|message|>Hi<|end|>"
    assert prompts((answer, question)) == [(ForkCause.TEMPLATE_REWRITES_PAST, past + ASKED)]
    again = prompts((answer, question), (FINAL, question))[1]
    assert again == (ForkCause.TEMPLATE_REWRITES_PAST, (past + ASKED) * 2)


def test_a_cut_answer_is_ended_by_the_template() -> None:
    cut = "<|channel|>final<|message|>Hi"
    text = f"{cut}<|end|>{ASKED}"
    assert prompts((cut, Message(role="user", content="two?"))) == [(ForkCause.NONE, text)]


def test_what_is_said_before_a_call_stands_with_its_thought() -> None:
    """The template refuses both beside a call, and models write both."""
    spoken = f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}"
    text = f'{spoken}{ANSWERED}"7"<|end|><|start|>assistant'
    assert prompts((spoken, Message(role="tool", content="7"))) == [(ForkCause.NONE, text)]
