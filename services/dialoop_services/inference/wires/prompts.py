"""From the messages or text of a client to the tokens to continue.

In a recording, a conversation that goes on from an earlier answer continues that answer's tokens.
Only the messages after it are rendered and tokenised.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dialoop.chat import History, Message
from dialoop.errors import InvalidInput, Unsupported
from dialoop.reasons import Reason
from dialoop.sequences import ForkCause, Sequence, Source, sequence_of
from dialoop.tokens.builder import Prompt

from dialoop_services.inference.recordings.matching import Origin
from dialoop_services.inference.recordings.store import CallPrompt, Recording
from dialoop_services.inference.rendering import GenerationRequest, Renderer
from dialoop_services.inference.wires.bodies import ContextTooLong, field_error

_COMPLETION = "completion"
_KNOWN = "Qwen, GLM, DeepSeek, Kimi, Llama, Mistral, Gemma or gpt-oss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the template gets beside the messages: tools and options."""

    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Return a digest that is equal for equal offers."""
        options = json.dumps(dict(self.options), sort_keys=True, default=str)
        text = json.dumps([self.tools, options])
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


class Prompts:
    """Makes the prompts of calls."""

    def __init__(self, renderer: Renderer, *, max_model_len: int) -> None:
        self._renderer = renderer
        self._max_model_len = max_model_len

    def chat(self, messages: History, offer: Offer, recording: Recording | None) -> CallPrompt:
        """Return the prompt of a conversation."""
        if offer.tools:
            self._require_tools_known()
        variant = offer.digest
        request = GenerationRequest(
            history=messages, tools=offer.tools, template_options=offer.options
        )
        past = None if recording is None else recording.find_past(messages, variant)
        if recording is None or past is None:
            return CallPrompt(messages=messages, prompt=self._prompt(request), variant=variant)
        own = recording.history_of(past.origin)
        prompt = self._prompt(
            replace(
                request,
                history=own.extend(messages[len(own) :]),
                context=recording.full(past.origin),
                num_context_messages=len(own),
                known_sampled=tuple(i for i, m in enumerate(own) if m.role == "assistant"),
            )
        )
        goes_on = prompt.appended.fork_cause is ForkCause.NONE
        return CallPrompt(
            messages=messages,
            prompt=prompt,
            past=past.origin,
            origin=past.origin if goes_on else None,
            variant=variant,
        )

    def _require_may_fit(self, num_characters: int) -> None:
        """Raise ContextTooLong for more text than the context can hold, before it is encoded."""
        if not self._renderer.may_fit(num_characters, self._max_model_len):
            raise ContextTooLong(
                f"The prompt has {num_characters} characters, which do not fit the context of "
                f"{self._max_model_len} tokens.",
                remedy="Send a shorter conversation, or start the service with a larger context.",
            )

    def _prompt(self, request: GenerationRequest) -> Prompt:
        self._require_may_fit(request.num_characters)
        made = self._renderer.prompt(request)
        assert isinstance(made, Prompt)  # the request has a history
        return made

    def completion(
        self,
        text_or_ids: str | list[int],
        recording: Recording | None,
        *,
        add_special_tokens: bool = True,
    ) -> CallPrompt:
        """Return the prompt of a plain completion: text or ids that are continued as they stand."""
        ids = self._ids(text_or_ids, add_special_tokens=add_special_tokens)
        origin = None if recording is None else self._find_origin(text_or_ids, ids, recording)
        if recording is None or origin is None:
            text = (
                text_or_ids
                if isinstance(text_or_ids, str)
                else self._renderer.tokenizer.decode(ids)
            )
            history = History((Message(role="user", content=text),))
            whole = _sequence_of(ids, Source.PROMPT, len(text), message_index=0)
            prompt = Prompt(history=history, sequence=whole, appended=whole, turn=0)
            return CallPrompt(messages=history, prompt=prompt, variant=_COMPLETION)
        return self._continue(text_or_ids, ids, origin, recording)

    def _require_tools_known(self) -> None:
        try:
            self._renderer.template.require_tools_shown()
        except Unsupported as error:
            raise field_error(
                "tools", error.message.rstrip("."), remedy=error.remedy, reason=Reason(error.reason)
            ) from None
        if not self._renderer.form(offers_tools=True).calls:
            raise field_error(
                "tools",
                "this policy's chat template writes calls in no known form",
                remedy=f"Serve a model that calls tools as {_KNOWN} do.",
                reason=Reason.TOOLS_UNSUPPORTED,
            )

    def _ids(self, text_or_ids: str | list[int], *, add_special_tokens: bool) -> list[int]:
        if not isinstance(text_or_ids, str):
            return text_or_ids
        self._require_may_fit(len(text_or_ids))
        ids = self._renderer.tokenizer.encode_prompt(
            text_or_ids, add_special_tokens=add_special_tokens
        )
        if not ids:
            raise InvalidInput(
                "prompt is empty: there is nothing to continue.",
                reason=Reason.NO_TOKENS,
                remedy="Send at least one character or token.",
            )
        return ids

    def _find_origin(
        self, text_or_ids: str | list[int], ids: list[int], recording: Recording
    ) -> Origin | None:
        """Return the recorded answer with the longest text or ids that the prompt begins with."""
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
                    text_or_ids.startswith(self._text_in(text_or_ids, full))
                    if isinstance(text_or_ids, str)
                    else ids[: len(full)] == full
                )
                if is_past:
                    best, best_length = origin, len(full)
        return best

    def _text_in(self, text: str, ids: list[int]) -> str:
        """Return the text of ids, without what the tokenizer put before a text such as this."""
        tokenizer = self._renderer.tokenizer
        prefix = list(tokenizer.prefix_ids)
        if ids[: len(prefix)] == prefix and not text.startswith(tokenizer.decode(prefix)):
            ids = ids[len(prefix) :]
        return tokenizer.decode(ids)

    def _continue(
        self, text_or_ids: str | list[int], ids: list[int], origin: Origin, recording: Recording
    ) -> CallPrompt:
        tokenizer = self._renderer.tokenizer
        context, own = recording.full(origin), recording.history_of(origin)
        if isinstance(text_or_ids, str):
            text = text_or_ids[len(self._text_in(text_or_ids, context.token_ids.tolist())) :]
            added = list(tokenizer.encode(text, trusted=True).ids)
        else:
            added = ids[len(context) :]
            text = tokenizer.decode(added)
        appended = _sequence_of(added, Source.ENVIRONMENT, len(text), message_index=len(own))
        history = own.append(Message(role="user", content=text)) if added else own
        prompt = Prompt(
            history=history, sequence=context.extended_by(appended), appended=appended, turn=0
        )
        return CallPrompt(
            messages=history, prompt=prompt, past=origin, origin=origin, variant=_COMPLETION
        )


def _sequence_of(ids: list[int], source: Source, length: int, *, message_index: int) -> Sequence:
    fields = {"source": source, "message_index": message_index, "char_length": length}
    return sequence_of([(ids, fields)])
