r"""A conversation as text and as token ids: prompt, response and full.

Text(prompt="<|im_start|>user\\n3+4<|im_end|>...", response="7<|im_end|>")
Tokens(response=(55, 257))
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from dialoop.errors import InvalidHistory
from dialoop.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A conversation as text; `None` is absent. If all are set, full == prompt + response."""

    prompt: str | None = None
    response: str | None = None
    full: str | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "response", "full"):
            part = getattr(self, name)
            if not isinstance(part, str | None):
                raise _wrong_type(name, part, "text")
        _require_agreement(self.prompt, self.response, self.full, "characters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A conversation as unpadded token ids; `None` is absent. full == prompt + response."""

    prompt: tuple[int, ...] | None = None
    response: tuple[int, ...] | None = None
    full: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "response", "full"):
            part = getattr(self, name)
            if part is not None and type(part) is not tuple:
                object.__setattr__(self, name, _ids(name, part))
        _require_agreement(self.prompt, self.response, self.full, "tokens")


def _ids(name: str, part: Any) -> tuple[int, ...]:
    """Return ids that came as a list or an array as a tuple."""
    try:
        return tuple(operator.index(token_id) for token_id in part)
    except TypeError:
        raise _wrong_type(name, part, "token ids") from None


def _wrong_type(name: str, part: Any, expected: str) -> InvalidHistory:
    return InvalidHistory(
        f"{name}: expected {expected}, found {type(part).__name__} {part!r:.40}.",
        reason=Reason.WRONG_TYPE,
        remedy=f"Give {expected}.",
    )


def _require_agreement(
    prompt: str | tuple[int, ...] | None,
    response: str | tuple[int, ...] | None,
    full: str | tuple[int, ...] | None,
    unit: str,
) -> None:
    if prompt is None or response is None or full is None:
        return
    if full != prompt + response:  # type: ignore[operator]  # both are text, or both are ids
        raise InvalidHistory(
            f"full has {len(full)} {unit} that are not the {len(prompt)} of prompt followed by the "
            f"{len(response)} of response.",
            reason=Reason.FULL_NOT_PROMPT_AND_RESPONSE,
            remedy="Send response alone.",
        )
