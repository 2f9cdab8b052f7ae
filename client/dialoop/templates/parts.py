"""Prompt and full conversation as text or ids; the response is what follows the prompt in full.

text_of_parts(history.prompt, history.full, template).response     # the answer and its end
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dialoop.errors import PreconditionFailed
from dialoop.messages import Message
from dialoop.reasons import Reason
from dialoop.templates.chat_template import ChatTemplate
from dialoop.templates.masks import encode_conversation
from dialoop.text_and_tokens import Text, Tokens
from dialoop.tokens.tokenizer import Tokenizer

Part = Sequence[Message] | None


def text_of_parts(prompt: Part, full: Part, template: ChatTemplate, **options: Any) -> Text:
    """Render the prompt with the assistant's opening, full without; PROMPT_NOT_PREFIX."""
    prompt_text = None if prompt is None else template.render(prompt, **options)
    if full is None:
        return Text(prompt=prompt_text)
    full_text = template.render(full, **{**options, "add_generation_prompt": False})
    if prompt_text is None:
        return Text(full=full_text)
    if not full_text.startswith(prompt_text):
        raise not_prefix("text")
    response = full_text[len(prompt_text) :]
    return Text(prompt=prompt_text, response=response, full=full_text)


def tokens_of_parts(
    prompt: Part, full: Part, template: ChatTemplate, tokenizer: Tokenizer, **options: Any
) -> Tokens:
    """Encode as `text_of_parts` renders; special tokens that messages spell are only text."""

    def ids(part: Sequence[Message], opens: bool) -> tuple[int, ...]:
        options["add_generation_prompt"] = opens
        encoded = encode_conversation(template, tokenizer, part, with_mask=False, **options)
        return tuple(encoded.token_ids.tolist())

    prompt_ids = None if prompt is None else ids(prompt, True)
    full_ids = None if full is None else ids(full, False)
    if prompt_ids is None or full_ids is None:
        return Tokens(prompt=prompt_ids, full=full_ids)
    return divide_ids(prompt_ids, full_ids)


def divide_ids(prompt: tuple[int, ...], full: tuple[int, ...]) -> Tokens:
    """Return prompt, response and full; PROMPT_NOT_PREFIX where full begins otherwise."""
    if full[: len(prompt)] != prompt:
        raise not_prefix("ids")
    return Tokens(prompt=prompt, response=full[len(prompt) :], full=full)


def not_prefix(unit: str) -> PreconditionFailed:
    """Return the error for a prompt that full does not begin with."""
    return PreconditionFailed(
        f"full does not begin with the prompt's {unit}.",
        reason=Reason.PROMPT_NOT_PREFIX,
        remedy="The template renders the prompt differently once it is answered: use the "
        "sampled tokens.",
    )
