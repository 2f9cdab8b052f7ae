"""From what a client asks to the tokens to continue, through the service's one renderer.

In a recording, a conversation that goes on from an earlier answer continues that answer's tokens:
only what was added is rendered and tokenised.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dialoop.chat import History, Message
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.sequences import ForkCause, Sequence, Source, sequence_of
from dialoop.tokens.builder import Prompt

from dialoop_services.inference.openai.errors import refused
from dialoop_services.inference.openai.tool_calls import CALL_START, AnswerSyntax
from dialoop_services.inference.recordings.matching import Origin
from dialoop_services.inference.recordings.store import CallPrompt
from dialoop_services.inference.rendering import GenerationRequest

if TYPE_CHECKING:
    from dialoop.chat import ToolDefinition

    from dialoop_services.inference.recordings.store import Recording
    from dialoop_services.inference.rendering import Renderer

_COMPLETION = "completion"
_THINK, _THINK_END = "<think>", "</think>"
_NUM_LOOKED_AT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the template is told beside the messages."""

    tools: tuple[ToolDefinition, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Equal for equal offers."""
        tools = [(t.name, t.description, t.parameters_json) for t in self.tools]
        text = json.dumps([tools, dict(self.options)], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


class Prompts:
    """Makes the prompts of calls."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def chat(self, asked: History, offer: Offer, recording: Recording | None) -> CallPrompt:
        """The prompt of a conversation."""
        if offer.tools:
            self._require_tools_known()
        variant = offer.digest
        request = GenerationRequest(
            history=asked, tools=offer.tools, template_options=offer.options
        )
        past = None if recording is None else recording.find_past(asked, variant)
        if recording is None or past is None:
            return CallPrompt(asked=asked, prompt=self._prompt(request), variant=variant)
        known = recording.spelled(past.origin)
        prompt = self._prompt(
            replace(
                request,
                history=known.extend(asked[len(known) :]),
                context=recording.full(past.origin),
                num_context_messages=len(known),
                vouched=tuple(i for i, m in enumerate(known) if m.role == "assistant"),
            )
        )
        goes_on = prompt.appended.fork_cause is ForkCause.NONE
        return CallPrompt(
            asked=asked,
            prompt=prompt,
            past=past.origin,
            origin=past.origin if goes_on else None,
            variant=variant,
        )

    def _prompt(self, request: GenerationRequest) -> Prompt:
        made = self._renderer.prompt(request)
        assert isinstance(made, Prompt)  # a history was asked
        return made

    def completion(self, asked: str | list[int], recording: Recording | None) -> CallPrompt:
        """The prompt of a plain completion: text or ids that are continued as they stand."""
        ids = self._ids(asked)
        origin = None if recording is None else self._continued(asked, ids, recording)
        if recording is None or origin is None:
            text = asked if isinstance(asked, str) else self._renderer.tokenizer.decode(ids)
            history = History((Message(role="user", content=text),))
            whole = _written(ids, Source.PROMPT, len(text), message_index=0)
            prompt = Prompt(history=history, sequence=whole, appended=whole, turn=0)
            return CallPrompt(asked=history, prompt=prompt, variant=_COMPLETION)
        return self._continuing(asked, ids, origin, recording)

    def syntax(self, prompt: CallPrompt, *, reads_calls: bool) -> AnswerSyntax:
        """What to look for in the answers."""
        last = prompt.prompt.sequence.token_ids[-_NUM_LOOKED_AT:].tolist()
        opening = self._renderer.tokenizer.decode(last).rstrip("\n")
        return AnswerSyntax(
            reads_calls=reads_calls,
            reads_reasoning=any(mark in self._source for mark in (_THINK, _THINK_END)),
            starts_in_reasoning=opening.endswith(_THINK),
        )

    @property
    def _source(self) -> str:
        return self._renderer.template.source

    def _require_tools_known(self) -> None:
        if "tools" not in self._source or CALL_START not in self._source:
            raise refused(
                "tools",
                f"this policy's chat template shows no tools or has no {CALL_START}",
                remedy="Serve a model whose template has tools, as Qwen's.",
                reason=Reason.TOOLS_UNSUPPORTED,
            )

    def _ids(self, asked: str | list[int]) -> list[int]:
        if not isinstance(asked, str):
            return asked
        ids = list(self._renderer.tokenizer.encode(asked, trusted=True).ids)
        if not ids:
            raise InvalidInput(
                "prompt: there is nothing to continue.",
                reason=Reason.NO_TOKENS,
                remedy="Send at least one character or token.",
            )
        return ids

    def _continued(
        self, asked: str | list[int], ids: list[int], recording: Recording
    ) -> Origin | None:
        """The answer with the longest text, or row of ids, that the prompt begins with."""
        best, best_length = None, 0
        for index, call in enumerate(recording.calls):
            if call.prompt.variant != _COMPLETION:
                continue
            for number in range(len(call.choices)):
                origin = Origin(call=index, choice=number)
                full = recording.full(origin).token_ids.tolist()
                if len(full) < best_length:
                    continue
                is_past = (
                    asked.startswith(self._renderer.tokenizer.decode(full))
                    if isinstance(asked, str)
                    else ids[: len(full)] == full
                )
                if is_past:
                    best, best_length = origin, len(full)
        return best

    def _continuing(
        self, asked: str | list[int], ids: list[int], origin: Origin, recording: Recording
    ) -> CallPrompt:
        tokenizer = self._renderer.tokenizer
        context, known = recording.full(origin), recording.spelled(origin)
        if isinstance(asked, str):
            text = asked[len(tokenizer.decode(context.token_ids.tolist())) :]
            added = list(tokenizer.encode(text, trusted=True).ids)
        else:
            added = ids[len(context) :]
            text = tokenizer.decode(added)
        appended = _written(added, Source.ENVIRONMENT, len(text), message_index=len(known))
        history = known.append(Message(role="user", content=text)) if added else known
        prompt = Prompt(
            history=history, sequence=context.extended_by(appended), appended=appended, turn=0
        )
        return CallPrompt(
            asked=history, prompt=prompt, past=origin, origin=origin, variant=_COMPLETION
        )


def _written(ids: list[int], source: Source, length: int, *, message_index: int) -> Sequence:
    fields = {"source": source, "message_index": message_index, "char_length": length}
    return sequence_of([(ids, fields)])
