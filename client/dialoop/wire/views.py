"""Log-probs and masks of a conversation to protobuf and back."""

from __future__ import annotations

import numpy as np

from dialoop.trajectory import Distribution
from dialoop.v1 import chat_pb2
from dialoop.views.views import LogProbRow, LogProbs, Masks

_VIEWS = ("prompt", "response", "full")


def log_probs_to_proto(log_probs: LogProbs) -> chat_pb2.LogProbs:
    """Prompt, response and full, each only when known."""
    rows = {name: getattr(log_probs, name) for name in _VIEWS}
    return chat_pb2.LogProbs(
        temperature_scaled=log_probs.temperature_scaled,
        distribution=int(log_probs.distribution or 0),  # type: ignore[arg-type]  # enums are ints
        **{
            name: chat_pb2.LogProbValues(values=row.values.tolist(), start=row.start)
            for name, row in rows.items()
            if row is not None
        },
    )


def log_probs_from_proto(proto: chat_pb2.LogProbs) -> LogProbs:
    """Prompt, response and full; raises InvalidInput where a first token has a value."""
    rows = {name: getattr(proto, name) for name in _VIEWS if proto.HasField(name)}
    return LogProbs(
        temperature_scaled=proto.temperature_scaled,
        distribution=next((d for d in Distribution if int(d) == int(proto.distribution)), None),
        **{
            name: LogProbRow(values=np.array(row.values, dtype=np.float32), start=row.start)
            for name, row in rows.items()
        },
    )


def masks_to_proto(masks: Masks) -> chat_pb2.Masks:
    """Both masks; an absent one is empty."""

    def listed(mask: object) -> list[bool]:
        return mask.tolist() if isinstance(mask, np.ndarray) else []

    return chat_pb2.Masks(
        all_attention_mask=listed(masks.all_attention_mask),
        all_assistant_mask=listed(masks.all_assistant_mask),
    )


def masks_from_proto(proto: chat_pb2.Masks) -> Masks:
    """Both masks; an empty one is absent."""
    attention = np.array(proto.all_attention_mask, dtype=np.bool_)
    assistant = np.array(proto.all_assistant_mask, dtype=np.bool_)
    return Masks(
        all_attention_mask=attention if len(attention) else None,
        all_assistant_mask=assistant if len(assistant) else None,
    )
