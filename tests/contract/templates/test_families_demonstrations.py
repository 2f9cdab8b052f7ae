"""Random demonstrations in each family's template: what is taught, and what is context.

The context and what is taught are transformers' rendering of the conversation, token by token;
whatever the assistant's messages hold is taught, with the end of each turn, or refused by name.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from dialoop.answers import AnswerForm, AnswerReader
from dialoop.chat import History, Message
from dialoop.errors import InvalidInput, Unsupported
from dialoop.messages import ContentPart, ToolCall
from dialoop.sequences import Sequence, Source
from dialoop.templates.chat_template import ChatTemplate
from dialoop.templates.masks import encode_conversation
from dialoop.templates.probe import KEPT, turn_ends
from dialoop.tokens.builder import TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.support.families import FAMILIES, family
from tests.support.families.conversations import chats_for, conversation_of, tool_dict
from tests.support.families.table import CHECKPOINTS

_REWRITES = {"deepseek_r1_distill"}
_THOUGHT_MARKS = re.compile("</?think>")
_OPENED_THOUGHTS = {"deepseek_v3", "deepseek_r1_distill", "nemotron_3_nano"}
"""Their opening begins a thought, which they do not write where a message has none."""
ASK = Message(role="user", content="one?")
FEW, MANY = range(10), range(10, 310)
_LEAST_TAUGHT = {"gemma": 0.2, "llama3_1": 0.3, "llama3_2": 0.3, "mistral": 0.5}
_LEAST_TAUGHT |= {"deepseek_r1_distill": 0.3}
"""The share that is taught where templates refuse system messages or calls; 0.6 for others."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_few_conversations_are_taught_as_they_are_rendered(name: str) -> None:
    _check(name, FEW)


@pytest.mark.heavy(reason="300 conversations for each family")
@pytest.mark.parametrize("name", FAMILIES)
def test_many_conversations_are_taught_as_they_are_rendered(name: str) -> None:
    _check(name, MANY)


def _check(name: str, seeds: range) -> None:
    known = family(name)
    tokenizer = Tokenizer.from_directory(known.directory)
    theirs = PreTrainedTokenizerFast.from_pretrained(known.directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    num_taught = num_conversations = 0
    for seed in seeds:
        conversation = conversation_of(known, seed)
        answered = max(
            (i for i, m in enumerate(conversation.messages) if m.role == "assistant"), default=-1
        )
        messages = conversation.messages[: answered + 1]
        if not known.reads.reasoning:  # which is refused, as below
            messages = tuple(replace(message, reasoning="") for message in messages)
        history = History(messages)
        if not history or any(map(_THOUGHT_MARKS.search, chain(*map(_texts, history)))):
            continue  # templates read a thought's marks in a content for their meaning
        num_conversations += 1
        tools = conversation.tools and [tool_dict(tool) for tool in conversation.tools]
        options = {"tools": tools} if tools else {}
        try:
            sequences = builder.demonstrations(history, options=options)
        except Unsupported:
            continue
        except InvalidInput as error:
            if error.reason != "TEMPLATE_REFUSED":
                raise
            continue
        num_taught += 1
        where = f"{name}, seed {seed}"
        _require_all_taught(history, sequences, builder, where)
        expected = theirs.apply_chat_template(
            chats_for(history, known.reads), tokenize=False, add_generation_prompt=False, **options
        )
        # A thought behind an opening that begins it may be shown nowhere (DeepSeek's), and R1's
        # template writes the past otherwise with each call.
        is_shown = builder.template.profile["reasoning"].verdict == KEPT
        if name not in _REWRITES and (is_shown or not history[-1].reasoning):
            _require_rendered(sequences[-1], expected, tokenizer, where)
    share = _LEAST_TAUGHT.get(name, 0.6) if seeds is MANY else 0.1
    assert num_taught >= share * num_conversations


def _require_rendered(sequence: Sequence, expected: str, tokenizer: Tokenizer, where: str) -> None:
    last = sequence.segments[-1]
    # As the tokenizer gives it back: some change Unicode's forms, or drop blanks behind a mark.
    expected = tokenizer.decode(tokenizer.encode(expected, trusted=True).ids)
    text = tokenizer.decode(sequence.token_ids.tolist())
    if not expected.startswith(text):  # the next role's mark ends the turn
        text = tokenizer.decode(sequence.token_ids[: last.end - 1].tolist())
    assert expected.startswith(text), where
    rest = expected[len(text) :]
    for special in tokenizer.added_texts(rest):
        rest = rest.replace(special, "")
    assert not rest.strip(), where


def _require_all_taught(
    history: History, sequences: tuple[Sequence, ...], builder: TokenBuilder, where: str
) -> None:
    tokenizer = builder.tokenizer
    answers = [message for message in history if message.role == "assistant"]
    taught = [
        tokenizer.decode(sequence.token_ids[s.start : s.end].tolist())
        for sequence in sequences
        for s in sequence.segments
        if s.source is Source.MODEL
    ]
    assert len(taught) == len(answers), where
    for message, text in zip(answers, taught, strict=True):
        for part in _texts(message):
            plain = tokenizer.decode(tokenizer.encode(part).ids).strip()
            escaped = (json.dumps(plain, ensure_ascii=False), json.dumps(plain), repr(plain))
            shown = (plain, _quoted(plain), *(each[1:-1] for each in escaped))
            assert any(each in text for each in shown), (where, part, text)
        assert any(text.endswith(end) for end in builder.ends.texts), (where, text)


def _quoted(text: str) -> str:
    """Escape as LFM2's template does."""
    for character, escape in (("\\", r"\\"), ("'", r"\'"), ("\n", r"\n"), ("\r", r"\r")):
        text = text.replace(character, escape)
    return text


def _texts(message: Message) -> Iterator[str]:
    yield message.text
    yield message.reasoning
    for call in message.tool_calls:
        yield call.name
        yield from _strings(json.loads(call.arguments_json))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in _OPENED_THOUGHTS])
def test_all_that_follows_the_prompt_is_taught(name: str) -> None:
    """An empty thought too, as Qwen3's and GLM's: the policy is asked before it."""
    tokenizer = Tokenizer.from_directory(family(name).directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    question = History((ASK,))
    prompt = builder.prompt(question).sequence
    sequence = builder.demonstration(question.append(Message(role="assistant", content="two")))
    assert sequence.token_ids[: len(prompt)].tolist() == prompt.token_ids.tolist()
    assert sequence.response_mask().tolist() == [n >= len(prompt) for n in range(len(sequence))]


def test_what_is_hidden_is_named() -> None:
    tokenizer = Tokenizer.from_directory(family("llama3_1").directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    answer = Message(role="assistant", content="4", reasoning="I add.")
    with pytest.raises(Unsupported, match="leaves out the reasoning of message 1"):
        builder.demonstrations(History((Message(role="user", content="2+2?"), answer)))


def test_a_thought_in_the_content_is_taught_behind_an_opening_that_begins_it() -> None:
    """R1's template shows no thought of the past, and data sets write it in the content."""
    tokenizer = Tokenizer.from_directory(family("deepseek_r1_distill").directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    for answer in (
        Message(role="assistant", content="<think>\nI add.\n</think>\n\n4"),
        Message(role="assistant", content="4", reasoning="I add."),
    ):
        history = History((Message(role="user", content="2+2?"), answer))
        (sequence,) = builder.demonstrations(history)
        last = sequence.segments[-1]
        context, taught = (
            tokenizer.decode(ids.tolist())
            for ids in (sequence.token_ids[: last.start], sequence.token_ids[last.start :])
        )
        assert context.endswith("<think>\n")
        assert taught == f"I add.\n</think>\n\n4{tokenizer.special_token('eos_token')}"


@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
def test_parts_of_a_content_are_taught_whole(name: str) -> None:
    tokenizer = Tokenizer.from_directory(family(name).directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    parts = tuple(ContentPart(type="text", text=text) for text in ("three ", "four"))
    history = History((ASK, Message(role="assistant", content=parts)))
    last = builder.demonstration(history).segments[-1]
    ids = builder.demonstration(history).token_ids[last.start : last.end]
    assert tokenizer.decode(ids.tolist()).endswith(f"three four{builder.ends.texts[0]}")


def test_a_tool_named_like_a_mark_is_taught_as_any_other() -> None:
    tokenizer = Tokenizer.from_directory(family("qwen3").directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    call = ToolCall(id="c", name="Qz0k99z", arguments_json='{"Qz1k5z": "Qz2k7z"}')
    history = History((ASK, Message(role="assistant", tool_calls=(call,))))
    last = builder.demonstration(history).segments[-1]
    ids = builder.demonstration(history).token_ids[last.start : last.end]
    assert '{"name": "Qz0k99z", "arguments": {"Qz1k5z": "Qz2k7z"}}' in tokenizer.decode(
        ids.tolist()
    )


_AWKWARD = ["it's", 'say "hi"', "both ' and \"", "back\\slash", "a\nb", "né 世 👩", "'", "x)]"]


@pytest.mark.parametrize("name", [name for name, own in CHECKPOINTS.items() if own.reads.calls])
def test_a_taught_call_reads_back_as_it_was(name: str) -> None:
    """However its template quotes it; the last two of LFM do not escape what they quote."""
    known = family(name)
    tokenizer = Tokenizer.from_directory(known.directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    for given in ({"a": text, "b": "c"} for text in _AWKWARD):
        call = ToolCall(id="c23456789", name="f", arguments_json=json.dumps(given))
        said = Message(role="assistant", tool_calls=(call,))
        sequence = builder.demonstration(History((ASK, said)))
        last = sequence.segments[-1]
        reader = AnswerReader(AnswerForm(calls=known.grammar), builder.tokenizer)
        reader.add(sequence.token_ids[last.start : last.end].tolist())
        (read,) = reader.finish().calls
        assert json.loads(read.arguments_json) == given


def test_half_a_character_in_arguments_is_shown_as_a_replacement() -> None:
    tokenizer = Tokenizer.from_directory(family("qwen3").directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    call = ToolCall(id="c", name="f", arguments_json='{"a": "\\ud83d", "b": "\\ud83d\\ude00"}')
    history = History((ASK, Message(role="assistant", tool_calls=(call,)), ASK))
    text = tokenizer.decode(builder.prompt(history).sequence.token_ids.tolist())
    assert '{"a": "\ufffd", "b": "\U0001f600"}' in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"k": "v", "<|im_end|>": 1}', "SPECIAL_TOKEN_SPELLED"),
        ('{"a":' * 500 + "1" + "}" * 500, "MASK_UNAVAILABLE"),
    ],
)
def test_arguments_that_cannot_be_taught_are_refused(arguments: str, reason: str) -> None:
    tokenizer = Tokenizer.from_directory(family("qwen3").directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    call = ToolCall(id="c", name="f", arguments_json=arguments)
    history = History((ASK, Message(role="assistant", tool_calls=(call,))))
    with pytest.raises(Unsupported) as caught:
        builder.demonstrations(history)
    assert caught.value.reason == reason


def test_a_cut_answer_is_taught_without_an_end() -> None:
    tokenizer = Tokenizer.from_directory(family("qwen3").directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    cut = Message(role="assistant", content="cut", is_complete=False)
    sequence = builder.demonstration(History((ASK, cut)))
    last = sequence.segments[-1]
    taught = tokenizer.decode(sequence.token_ids[last.start : last.end].tolist())
    assert taught == "<think>\n\n</think>\n\ncut"


def test_a_conversation_that_the_assistant_begins_has_its_mask() -> None:
    tokenizer = Tokenizer.from_directory(family("qwen3").directory)
    template = ChatTemplate.of(tokenizer)
    answers = [Message(role="assistant", content=text) for text in ("one", "two")]
    encoded = encode_conversation(
        template, tokenizer, History((answers[0], ASK, answers[1])), add_generation_prompt=False
    )
    assert tokenizer.decode(encoded.token_ids[encoded.assistant_mask].tolist()) == "onetwo"


@pytest.mark.parametrize("name", ["qwen3", "phi3", "lfm2_5", "lfm2_5_v2", "smollm3"])
def test_a_mask_has_the_end_of_turn_where_asked_and_nothing_around_it(name: str) -> None:
    """The last three write the end, and smollm3 the opening, within their generation blocks."""
    tokenizer = Tokenizer.from_directory(family(name).directory)
    template = ChatTemplate.of(tokenizer)
    answers = [Message(role="assistant", content=text) for text in ("one ", "two\n")]
    history = History((ASK, answers[0], ASK, answers[1]))
    for include_eos in (False, True):
        encoded = encode_conversation(
            template,
            tokenizer,
            history,
            include_eos=include_eos,
            add_generation_prompt=False,
        )
        end = turn_ends(template.profile, tokenizer).texts[0] if include_eos else ""
        text = tokenizer.decode(encoded.token_ids[encoded.assistant_mask].tolist())
        assert text == f"one {end}two\n{end}"


def test_a_special_token_that_swallows_blanks_of_an_answer_is_no_part_of_it() -> None:
    tokenizer = Tokenizer.from_directory(family("phi3").directory)
    history = History((ASK, Message(role="assistant", content=" two")))
    encoded = encode_conversation(
        ChatTemplate.of(tokenizer), tokenizer, history, add_generation_prompt=False
    )
    assert tokenizer.decode(encoded.token_ids[encoded.assistant_mask].tolist()) == "two"


@pytest.mark.parametrize("name", ["lfm2_5", "lfm2_5_v2"])
def test_a_mask_keeps_the_mark_that_ends_a_call(name: str) -> None:
    tokenizer = Tokenizer.from_directory(family(name).directory)
    call = ToolCall(id="c", name="f", arguments_json="{}")
    history = History((ASK, Message(role="assistant", tool_calls=(call,))))
    encoded = encode_conversation(
        ChatTemplate.of(tokenizer), tokenizer, history, add_generation_prompt=False
    )
    text = tokenizer.decode(encoded.token_ids[encoded.assistant_mask].tolist())
    assert text == "<|tool_call_start|>[f()]<|tool_call_end|>"


def test_a_long_conversation_is_taught_in_reasonable_time() -> None:
    """What a turn costs grows with what stands before it, not with its square."""
    tokenizer = Tokenizer.from_directory(family("qwen3_5").directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    seconds = []
    for num_pairs in (20, 80):
        pairs = (ASK, Message(role="assistant", content="two")) * num_pairs
        began = time.process_time()
        builder.demonstrations(History(pairs))
        seconds.append(time.process_time() - began)
    assert seconds[1] < 40 * seconds[0]


def test_calls_that_share_an_id_are_answered_in_order() -> None:
    calls = tuple(ToolCall(name=name, arguments_json="{}") for name in ("f", "g"))
    answers = tuple(Message(role="tool", content=text) for text in ("r1", "r2"))
    history = History((ASK, Message(role="assistant", tool_calls=calls), *answers))
    tokenizer = Tokenizer.from_directory(family("kimi_k2").directory)
    text = ChatTemplate.of(tokenizer).render(history)
    assert text.index("functions.f:0\nr1") < text.index("functions.g:1\nr2")
