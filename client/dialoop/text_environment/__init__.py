"""Episodes whose state is one growing text, as in TRL's TextEnvironment.

A policy, tools and a prompt enter; a `TextHistory` with its segments and its reward leaves.
"""

from dialoop.text_environment.environment import TextEnvironment, TextLimits, TextRun, each
from dialoop.text_environment.history import TextHistory, TextSegment
from dialoop.text_environment.playing import play_text
from dialoop.text_environment.setups import TextSetup

__all__ = [
    "TextEnvironment",
    "TextHistory",
    "TextLimits",
    "TextRun",
    "TextSegment",
    "TextSetup",
    "each",
    "play_text",
]
