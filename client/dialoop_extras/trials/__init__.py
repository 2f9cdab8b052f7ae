"""Trials: a game played turn by turn between an agent function and an environment function.

Agents, a `Game` and its settings enter; a scored `Trial`, or an episode of a chat environment,
leaves.
"""

from dialoop_extras.trials.agents import DirectOutputAgent, ScriptedAgent
from dialoop_extras.trials.game import Game, Move
from dialoop_extras.trials.playing import play_trial
from dialoop_extras.trials.trial import (
    Action,
    Agent,
    MaskScope,
    Trial,
    TrialOptions,
    TrialResult,
    run_trial,
)
from dialoop_extras.trials.twenty_questions import TwentyQuestions

__all__ = [
    "Action",
    "Agent",
    "DirectOutputAgent",
    "Game",
    "MaskScope",
    "Move",
    "ScriptedAgent",
    "Trial",
    "TrialOptions",
    "TrialResult",
    "TwentyQuestions",
    "play_trial",
    "run_trial",
]
