"""Views of a turn or trajectory: text, tokens, log-probs, masks, padded arrays, TensorDicts.

Domain values (`Turn`, `Trajectory`) enter; arrays and printable tables leave. Nothing here changes
them.
"""

from dialoop.views.views import LogProbRow, LogProbs, Masks, TurnView

__all__ = [
    "LogProbRow",
    "LogProbs",
    "Masks",
    "TurnView",
]
