r"""The three ways to talk to an environment: messages, rendered text, token ids.

Text(prompt="<|im_start|>user\n3+4<|im_end|>...", response="7<|im_end|>")
Tokens(response=(55, 257))
"""

from __future__ import annotations

from enum import IntEnum

from dialoop.chat import ChatHistory
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.text_and_tokens import Text as Text
from dialoop.text_and_tokens import Tokens as Tokens


class InputMode(IntEnum):
    """The form of what a policy reads and sends: `history`, `text` or `tokens`."""

    HISTORY = 1
    TEXT = 2
    TOKENS = 3

    @classmethod
    def parse(cls, mode: InputMode | str) -> InputMode:
        """Return the mode with this name; InvalidConfig (UNKNOWN_MODE) lists the names."""
        modes = {member.name.lower(): member for member in cls}
        if isinstance(mode, cls):
            return mode
        if str(mode) not in modes:
            raise InvalidConfig(
                f"There is no input mode '{str(mode)[:40]}'.",
                reason=Reason.UNKNOWN_MODE,
                remedy=f"Choose one of: {', '.join(modes)}.",
            )
        return modes[str(mode)]


class RewardShape(IntEnum):
    """How often rewards come: once per episode, once per turn, or one number per token."""

    SPARSE = 1
    TURN = 2
    DENSE = 3


Answered = ChatHistory | Text | Tokens
"""What a policy sends to an environment, in one of the three modes."""
