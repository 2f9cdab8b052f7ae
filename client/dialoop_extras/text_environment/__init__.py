"""Episodes whose state is one growing text, as in TRL's TextEnvironment.

A policy, tools and a prompt enter; a `TextHistory` with its segments and its reward leaves.
"""

from dialoop_extras.text_environment.environment import TextEnvironment, TextLimits, TextRun, each
from dialoop_extras.text_environment.history import TextHistory, TextSegment
from dialoop_extras.text_environment.playing import play_text
from dialoop_extras.text_environment.setups import TextSetup

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
