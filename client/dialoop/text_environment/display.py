"""Text histories in colour: who wrote what, as text and as tokens.

prompt: grey; system (queries and tools): green, cyan where tokens alternate; model: blue; reward:
plum.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from dialoop.sequences import Source

Pieces = Iterable[tuple[Source, Iterable[str]]]
"""Who wrote each segment, and its text: whole, or token by token."""

_PROMPT = ("grey50", "grey70")
_SYSTEM = ("green", "cyan3")
_MODEL = ("bright_blue", "deep_sky_blue1")
_REWARD = "plum1"


def print_text(segments: Pieces, reward: float | None = None, *, show_legend: bool = False) -> None:
    """Print segments coloured by author, then the reward; shades alternate within a segment."""
    text = Text()
    for source, pieces in segments:
        for index, piece in enumerate(pieces):
            text.append(piece, style=_colours(source)[index % 2])
    if reward is not None:
        text.append(f"\n\nReward: {reward}", style=_REWARD)
    console = Console()
    console.print(text)
    if show_legend:
        console.print(_legend())


def print_legend() -> None:
    """Print which colour is whose."""
    Console().print(_legend())


def _legend() -> Text:
    return Text.assemble(
        ("Prompt", _PROMPT[0]),
        " ",
        ("System", _SYSTEM[0]),
        " ",
        ("Model", _MODEL[0]),
        " ",
        ("Reward", _REWARD),
    )


def _colours(source: Source) -> tuple[str, str]:
    if source is Source.PROMPT:
        return _PROMPT
    return _MODEL if source is Source.MODEL else _SYSTEM
