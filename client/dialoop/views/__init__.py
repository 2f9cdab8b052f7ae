"""Views of a turn or trajectory: text, tokens, log-probs, masks, padded arrays, TensorDicts.

Domain values (`Turn`, `Trajectory`) enter; arrays and printable tables leave. Nothing here changes
them.
"""

from dialoop.views.views import LogProbRow as LogProbRow
from dialoop.views.views import LogProbs as LogProbs
from dialoop.views.views import Masks as Masks
from dialoop.views.views import TurnView as TurnView
