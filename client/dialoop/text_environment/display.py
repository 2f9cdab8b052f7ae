"""Text histories in colour: who wrote what, as text and as tokens.

prompt: grey; system (queries and tools): green, cyan where tokens alternate; model: blue; reward:
plum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from dialoop.sequences import Source

if TYPE_CHECKING:
    from dialoop.text_environment.history import TextHistory, TextSegment
    from dialoop.tokens.tokenizer import Tokenizer

_PROMPT = ("grey50", "grey70")
_SYSTEM = ("green", "cyan3")
_MODEL = ("bright_blue", "deep_sky_blue1")
_REWARD = "plum1"


def shown_text(history: TextHistory, *, show_legend: bool = False) -> None:
    """Print the text, coloured by author, and the reward."""
    text = Text()
    for segment in history.segments:
        text.append(segment.text, style=_colours(segment)[0])
    if history.reward is not None:
        text.append(f"\n\nReward: {history.reward}", style=_REWARD)
    _print(text, show_legend=show_legend)


def shown_tokens(history: TextHistory, tokenizer: Tokenizer, *, show_legend: bool = False) -> None:
    """Print each token's own text; shades alternate, so that the borders show."""
    text = Text()
    for segment in history.segments:
        for index, token in enumerate(segment.token_ids):
            text.append(tokenizer.decode([token]), style=_colours(segment)[index % 2])
    _print(text, show_legend=show_legend)


def shown_legend() -> None:
    """Print which colour is whose."""
    Console().print(_legend())


def _print(text: Text, *, show_legend: bool) -> None:
    console = Console()
    console.print(text)
    if show_legend:
        console.print(_legend())


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


def _colours(segment: TextSegment) -> tuple[str, str]:
    if segment.source is Source.PROMPT:
        return _PROMPT
    return _MODEL if segment.source is Source.MODEL else _SYSTEM
