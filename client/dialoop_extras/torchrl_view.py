"""Turns as TorchRL's containers, and back: the extra `dialoop-extras[tensordict]`.

    chat = to_torchrl([TurnView.of_turn(trajectory, 0, tokenizer)])
    chat["tokens"].response        # torchrl's Tokens, ragged, with "text", "masks", "log_probs"
    from_torchrl(chat)             # the same turns

torch is imported when a function is called, and not by anything else of the SDK.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from dialoop.chat import ChatHistory, History
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.reasons import Reason
from dialoop.trajectory import Distribution
from dialoop.views.views import LogProbRow, LogProbs, Masks, Text, Tokens, TurnView

if TYPE_CHECKING:
    from collections.abc import Sequence

_PARTS = ("prompt", "response", "full")


def to_torchrl(views: Sequence[TurnView]) -> Any:
    """Make a TensorDict [B] of torchrl's Tokens, LogProbs, Masks, and Text and ChatHistory if any.

    Rows keep their own lengths. Unknown log-probs are NaN, on tokens of a row that has some; a part
    that is unknown in any turn is absent.
    """
    torch, tensordict, torchrl = _libraries()
    if not views:
        raise InvalidInput("There are no turns.", remedy="Give at least one.")
    rows = []
    for view in views:
        row = tensordict.TensorDict(
            {
                "tokens": torchrl.Tokens(**_tokens(torch, view.tokens), padded=False),
                "log_probs": torchrl.LogProbs(**_log_probs(torch, view), padded=False),
                "masks": torchrl.Masks(
                    all_attention_mask=_tensor(torch, view.masks.all_attention_mask),
                    all_assistant_mask=_tensor(torch, view.masks.all_assistant_mask),
                    padded=False,
                ),
                "temperature_scaled": torch.tensor(view.log_probs.temperature_scaled),
                "distribution": torch.tensor(view.log_probs.distribution or 0),
            }
        )
        if view.text is not None:
            row["text"] = torchrl.Text(**{p: getattr(view.text, p) for p in _PARTS})
        if view.history is not None:
            row["history"] = _history(torchrl, view.history)
        rows.append(row)
    return tensordict.lazy_stack(rows)


def from_torchrl(batch: Any) -> list[TurnView]:
    """Read what `to_torchrl` makes; raise InvalidInput for padded rows, which have no lengths."""
    _libraries()
    return [_turn(row) for row in batch.unbind(0)]


def _turn(row: Any) -> TurnView:
    tokens, log_probs, masks = row["tokens"], row["log_probs"], row["masks"]
    if any(bool(part.padded) for part in (tokens, log_probs, masks)):
        raise InvalidInput(
            "The rows are padded, and their lengths are unknown.",
            reason=Reason.LENGTHS_MISSING,
            remedy="Give rows of their own lengths (padded=False).",
        )
    text, history = row.get("text", None), row.get("history", None)
    return TurnView(
        tokens=Tokens(**{p: _ids(getattr(tokens, p)) for p in _PARTS}),
        log_probs=LogProbs(
            **{p: _without_unknown(getattr(log_probs, p)) for p in _PARTS},
            temperature_scaled=bool(row["temperature_scaled"]),
            distribution=next((d for d in Distribution if d == int(row["distribution"])), None),
        ),
        masks=Masks(
            all_attention_mask=_array(masks.all_attention_mask),
            all_assistant_mask=_array(masks.all_assistant_mask),
        ),
        text=None if text is None else Text(**{p: getattr(text, p) for p in _PARTS}),
        history=None if history is None else _chat_history(history),
    )


def _tokens(torch: Any, tokens: Tokens) -> dict[str, Any]:
    rows = {part: getattr(tokens, part) for part in _PARTS}
    return {
        part: None if row is None else torch.tensor(row, dtype=torch.int64)
        for part, row in rows.items()
    }


def _log_probs(torch: Any, view: TurnView) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for part in _PARTS:
        row, ids = getattr(view.log_probs, part), getattr(view.tokens, part)
        if row is not None and ids is not None:
            columns[part] = torch.from_numpy(row.align(len(ids)))
    return columns


def _without_unknown(values: Any) -> LogProbRow | None:
    """Return the values without the unknown ones before them."""
    if values is None:
        return None
    row = values.numpy().astype(np.float32)
    start = int(np.isnan(row).sum())
    if np.isnan(row[start:]).any():
        raise InvalidInput(
            "Log-probs are unknown in the middle of a row.",
            reason=Reason.RAGGED,
            remedy="Give rows whose unknown values come first.",
        )
    return LogProbRow(values=row[start:], start=start)


def _history(torchrl: Any, history: ChatHistory) -> Any:
    parts = {part: getattr(history, part) for part in _PARTS}
    return torchrl.ChatHistory(
        **{
            part: torchrl.History.from_chats(_plain(messages))
            for part, messages in parts.items()
            if messages is not None
        }
    )


def _plain(history: History) -> list[dict[str, Any]]:
    """Return messages of text alone: what torchrl's History holds without loss."""
    for message in history:
        if message.tool_calls or message.reasoning or not isinstance(message.content, str):
            raise InvalidInput(
                f"The {message.role} message has more than text.",
                reason=Reason.PARTS_UNSUPPORTED,
                remedy="Leave history out of the view (dataclasses.replace(view, history=None)): "
                "tokens and text hold it all.",
            )
    return [{"role": m.role, "content": m.content, "is_complete": m.is_complete} for m in history]


def _chat_history(history: Any) -> ChatHistory:
    parts: dict[str, History] = {}
    for part in _PARTS:
        messages = getattr(history, part)
        if messages is not None:
            parts[part] = History.from_chats(
                {"role": m.role, "content": m.content, "is_complete": bool(m.is_complete)}
                for m in messages.unbind(-1)
            )
    return ChatHistory(**parts)


def _tensor(torch: Any, mask: Any) -> Any:
    return None if mask is None else torch.from_numpy(mask)


def _array(mask: Any) -> Any:
    return None if mask is None else mask.numpy().astype(np.bool_)


def _ids(row: Any) -> tuple[int, ...] | None:
    return None if row is None else tuple(int(value) for value in row.tolist())


def _libraries() -> tuple[Any, Any, Any]:
    """Import torch, tensordict and, in one namespace, torchrl's containers; else InvalidConfig."""
    try:
        import tensordict
        import torch
        from torchrl.data.llm import History as TheirHistory
        from torchrl.modules.llm.policies import common
    except ImportError as error:
        raise InvalidConfig(
            f"TorchRL's containers do not import ({error.name} is missing).",
            reason=Reason.TENSORDICT_MISSING,
            remedy="pip install 'dialoop-extras[tensordict]'.",
        ) from error
    containers = type("Containers", (), {})()
    for name in ("ChatHistory", "LogProbs", "Masks", "Text", "Tokens"):
        setattr(containers, name, getattr(common, name))
    containers.History = TheirHistory
    return torch, tensordict, containers
