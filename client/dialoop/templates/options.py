"""The options of `History.apply_chat_template`, and what it returns."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np

from dialoop.errors import InvalidInput
from dialoop.messages import Message, processor_chat
from dialoop.reasons import Reason
from dialoop.templates.chat_template import require_variables
from dialoop.templates.masks import EncodedConversation, encode_conversations
from dialoop.templates.registry import DEFAULT_REGISTRY, TemplateRegistry
from dialoop.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from dialoop.templates.chat_template import ChatTemplate, Tools


class TemplateOptions(TypedDict, total=False):
    """Options of apply_chat_template; all may be left out.

    add_generation_prompt: open the assistant's turn (true unless the final message is continued).
    continue_final_message: leave the last message open. chat_template: a source, or
    chat_template_name: a name in `registry`; else as `TemplateRegistry.choose` says.
    tokenize: give token ids (true when a mask, a dict or tensors are asked for), else text.
    return_dict: give input_ids, attention_mask and, with return_assistant_tokens_mask,
    assistant_masks. include_eos: the mask covers the end of the assistant's turns too.
    padding: True or "longest", or "max_length". truncation: cut at max_length, on the right.
    return_tensors: "np" for arrays. template_kwargs: further variables of the template.
    """

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str
    chat_template_name: str
    registry: TemplateRegistry
    tokenize: bool
    padding: bool | Literal["longest", "max_length"]
    padding_side: Literal["left", "right"]
    truncation: bool
    max_length: int
    return_tensors: Literal["np"]
    return_dict: bool
    return_assistant_tokens_mask: bool
    include_eos: bool
    tools: Tools
    template_kwargs: Mapping[str, Any]


_NAMES = frozenset(TemplateOptions.__annotations__)
_FLAG = (False, True)
# What an option may be; None stands for the default.
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, *_FLAG),
    "continue_final_message": _FLAG,
    "tokenize": _FLAG,
    "padding": (False, True, "longest", "max_length"),
    "padding_side": ("left", "right"),
    "truncation": _FLAG,
    "return_tensors": (None, "np"),
    "return_dict": _FLAG,
    "return_assistant_tokens_mask": _FLAG,
    "include_eos": _FLAG,
}


def _require_one_of(name: str, value: Any, values: tuple[Any, ...]) -> None:
    if any(value is allowed or (value == allowed and type(value) is str) for allowed in values):
        return
    is_torch = name == "return_tensors" and value == "pt"
    hint = " Give its result to torch.from_numpy for tensors of torch." if is_torch else ""
    raise InvalidInput(
        f"{name} is {value!r:.40}.",
        reason=Reason.BAD_OPTIONS,
        remedy=f"Use one of: {', '.join(map(repr, values))}.{hint}",
    )


def choose_template(
    tokenizer: Any,
    chat_template: str | None = None,
    chat_template_name: str | None = None,
    registry: TemplateRegistry | None = None,
) -> ChatTemplate:
    """Choose the template for a tokenizer, ours or a fast one of transformers."""
    return (registry or DEFAULT_REGISTRY).choose(
        as_tokenizer(tokenizer),
        chat_template=chat_template,
        chat_template_name=chat_template_name,
    )


def as_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """Return our tokenizer; one of transformers is read as it is now."""
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise InvalidInput(
            f"tokenizer: expected a dialoop or fast transformers tokenizer, found "
            f"{type(tokenizer).__name__}.",
            reason=Reason.WRONG_TYPE,
            remedy="Use Tokenizer.from_directory, or AutoTokenizer.from_pretrained.",
        )
    return _read(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=4)
def _read(tokenizer: Any, chat_template: str) -> Tokenizer:
    return Tokenizer.from_transformers(tokenizer)


def apply_to_history(history: Sequence[Message], tokenizer: Any, options: TemplateOptions) -> Any:
    """Return what `History.apply_chat_template` answers: text, ids, or a dict of one row."""
    answer = apply_to_histories((history,), tokenizer, options)
    if not isinstance(answer, dict):
        return answer[0]
    return {name: rows[0] for name, rows in answer.items()}


def apply_to_histories(
    histories: Iterable[Sequence[Message]], tokenizer: Any, options: TemplateOptions
) -> Any:
    """Return what `Histories.apply_chat_template` answers: a list, or a dict of rows."""
    unknown = sorted(options.keys() - _NAMES)
    if unknown:
        raise InvalidInput(
            f"apply_chat_template has no option '{unknown[0]}'.",
            reason=Reason.BAD_OPTIONS,
            remedy="Give variables of the template in template_kwargs.",
        )
    if hasattr(tokenizer, "image_processor"):
        return _apply_processor(histories, tokenizer, options)
    for name in options.keys() & _VALUES.keys():
        _require_one_of(name, options.get(name), _VALUES[name])
    ours = as_tokenizer(tokenizer)
    template = choose_template(
        ours,
        options.get("chat_template"),
        options.get("chat_template_name"),
        options.get("registry"),
    ).for_tools(options.get("tools"))
    require_variables(options.get("template_kwargs", {}))
    rendering = {
        "add_generation_prompt": options.get("add_generation_prompt"),
        "continue_final_message": options.get("continue_final_message", False),
        "tools": options.get("tools"),
        **options.get("template_kwargs", {}),
    }
    with_mask = options.get("return_assistant_tokens_mask", False)
    arrays = options.get("return_tensors") is not None
    as_dict = options.get("return_dict", with_mask)
    if not options.get("tokenize", with_mask or arrays or as_dict):
        return [template.render(history, **rendering) for history in histories]
    if ours is None:
        raise InvalidInput(
            "Token ids need a tokenizer, and there is none.",
            reason=Reason.TOKENIZER_MISSING,
            remedy="Give tokenizer, or tokenize=False.",
        )
    include_eos = options.get("include_eos", False)
    encoded = encode_conversations(
        template, ours, histories, with_mask=with_mask, include_eos=include_eos, **rendering
    )
    columns = _columns(encoded, ours, options)
    if arrays:
        stacked = {name: _stack(rows) for name, rows in columns.items()}
        return stacked if as_dict else stacked["input_ids"]
    if not as_dict:
        return [row.tolist() for row in columns["input_ids"]]
    return {name: [row.tolist() for row in rows] for name, rows in columns.items()}


def _apply_processor(
    histories: Iterable[Sequence[Message]], processor: Any, options: TemplateOptions
) -> Any:
    """Return what a multimodal processor of transformers makes of the conversations.

    Text by default. With `return_dict` it adds pixel_values and whatever else the model reads.
    """
    ours = [name for name in ("registry", "include_eos", "chat_template_name") if name in options]
    if ours:
        raise InvalidInput(
            f"A multimodal processor has no option '{ours[0]}'.",
            reason=Reason.BAD_OPTIONS,
            remedy="Leave it out, or give the processor's tokenizer for conversations of text.",
        )
    chats = [[processor_chat(message) for message in history] for history in histories]
    rendering = {"tokenize": options.get("return_dict", False), **options}
    extra: Any = rendering.pop("template_kwargs", {})
    return processor.apply_chat_template(chats, **rendering, **extra)


def _columns(
    encoded: Sequence[EncodedConversation], tokenizer: Tokenizer, options: TemplateOptions
) -> dict[str, list[NDArray[np.int32]]]:
    """Return truncated and padded rows of ids, attention mask and assistant mask."""
    limit = options.get("max_length", tokenizer.model_max_length)
    cut = limit if options.get("truncation") else None
    padding = options.get("padding", False)
    if limit is None and (options.get("truncation") or padding == "max_length"):
        raise InvalidInput(
            "There is no max_length to cut or pad to.",
            reason=Reason.BAD_OPTIONS,
            remedy="Give max_length.",
        )
    ids = [conversation.token_ids[:cut] for conversation in encoded]
    columns = {"input_ids": ids, "attention_mask": [np.ones(len(row), np.int32) for row in ids]}
    if options.get("return_assistant_tokens_mask"):
        masks = [
            conversation.assistant_mask
            for conversation in encoded
            if conversation.assistant_mask is not None
        ]
        columns["assistant_masks"] = [mask[:cut].astype(np.int32) for mask in masks]
    if not padding:
        return columns
    width = max((len(row) for row in ids), default=0)
    if padding == "max_length" and limit is not None:
        width = max(width, limit)
    fills = {"input_ids": _pad_id(tokenizer)}
    side = options.get("padding_side", "left")
    return {
        name: [_pad(row, width, fills.get(name, 0), side) for row in rows]
        for name, rows in columns.items()
    }


def _pad_id(tokenizer: Tokenizer) -> int:
    for name in ("pad_token", "eos_token"):
        text = tokenizer.special_token(name)
        token = None if text is None else tokenizer.single_token(text)
        if token is not None:
            return token
    raise InvalidInput(
        "The tokenizer has neither a pad_token nor an eos_token.",
        reason=Reason.BAD_OPTIONS,
        remedy="Set a pad_token, or leave padding out.",
    )


def _pad(row: NDArray[np.int32], width: int, fill: int, side: str) -> NDArray[np.int32]:
    lacking = width - len(row)
    return np.pad(row, (lacking, 0) if side == "left" else (0, lacking), constant_values=fill)


def _stack(rows: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    if len({len(row) for row in rows}) > 1:
        raise InvalidInput(
            "The conversations have different lengths, which one array cannot hold.",
            reason=Reason.BAD_OPTIONS,
            remedy="Ask with padding=True, or without return_tensors.",
        )
    return np.stack(rows) if rows else np.zeros((0, 0), np.int32)
