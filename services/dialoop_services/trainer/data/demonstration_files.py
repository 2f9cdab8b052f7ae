"""Files of demonstrations, and which of their lines fit the trainer's rows.

fitting_demonstrations("chats.jsonl", render, settings)
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.chat import History
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from dialoop.sequences import Sequence

    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)


def num_tokens_to_train(sequence: Sequence, settings: TrainerSettings) -> int:
    """Return how many of its tokens a step trains after `oversize`; 0 if it is dropped."""
    most = settings.packed_row_tokens
    if settings.oversize == "drop" and len(sequence.token_ids) > most:
        return 0
    return int(sequence.response_mask()[:most].sum())


def fitting_demonstrations(
    file: str | Path, render: Callable[[History], Sequence], settings: TrainerSettings
) -> list[History]:
    """Return the demonstrations of a file that have a token to train; warn about the others.

    Raises InvalidConfig (SEQUENCE_TOO_LONG), which names the line that is too long where `oversize`
    is "error", or the file if no demonstration of it is left.
    """
    histories, most = [], settings.packed_row_tokens
    for number, history in numbered_demonstrations(file):
        sequence = render(history)
        length = len(sequence.token_ids)
        if length > most and settings.oversize == "error":
            raise InvalidConfig(
                f"{file} line {number} has {length} tokens, more than the {most} of a row.",
                reason=Reason.SEQUENCE_TOO_LONG,
                remedy="Raise max_row_tokens in [train], shorten it, or set oversize.",
            )
        if num_tokens_to_train(sequence, settings):
            histories.append(history)
            continue
        log.warning(
            "A demonstration is dropped: it has no token to train in rows of %d tokens: "
            "%s line %d, %d tokens.",
            *(most, file, number, length),
        )
    if not histories:
        raise InvalidConfig(
            f"No demonstration of {file} has a token to train in rows of {most} tokens.",
            reason=Reason.SEQUENCE_TOO_LONG,
            remedy="Raise max_row_tokens in [train], or shorten the demonstrations.",
        )
    return histories


def numbered_demonstrations(path: Path | str) -> list[tuple[int, History]]:
    """Return all demonstrations of a JSONL file of {"messages": [...]} lines, with line numbers.

    Raises InvalidConfig, which names the wrong line.
    """
    path = Path(path)
    histories: list[tuple[int, History]] = []
    try:
        # Split at newlines only: JSON strings may hold every other line separator.
        lines = path.read_text("utf-8").split("\n")
    except OSError as error:
        raise InvalidConfig(
            f"Cannot read the demonstrations {path}: {error.strerror}.",
            remedy="Name a readable JSONL file of demonstrations.",
        ) from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            histories.append((number, _history(path, number, line)))
    if not histories:
        raise InvalidConfig(f"{path} holds no demonstration.", remedy="Add one per line.")
    return histories


def _history(path: Path, number: int, line: str) -> History:
    try:
        history: History = History.from_chats(json.loads(line)["messages"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(
            f"{path} line {number} is not a demonstration ({type(error).__name__}).",
            remedy='Write one {"messages": [{"role": ..., "content": ...}, ...]} per line.',
        ) from error
    if not any(message.role == "assistant" for message in history):
        raise InvalidConfig(
            f"{path} line {number} has no assistant message.", remedy="Add one to learn from."
        )
    return history
