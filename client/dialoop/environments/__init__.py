"""What an environment's author writes against: no protobuf, no grpc, no torch.

def capital(country: str) -> str:
    return {"France": "Paris"}[country]

environment = tool_environment(
    name="capitals", tasks=JsonlTasks("capitals.jsonl"), tools=[capital], rewards=[ExactResult()]
)
"""

from dialoop.environments.arithmetic_tasks import ArithmeticDemonstrations, ArithmeticTasks
from dialoop.environments.calculator import Calculator
from dialoop.environments.call_syntax import CallSyntax, parse_call
from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.choosing import TaskChoice, chosen_task
from dialoop.environments.data_loading import DataCursor, DataLoadingPrimer, DataSource, Loaded
from dialoop.environments.endings import EndOnText, EndWhenIncomplete, EndWithoutCall, MaxTurns
from dialoop.environments.environment import (
    Demonstrate,
    Demonstrations,
    Environment,
    Given,
    Managed,
    Stateless,
    TakesQuestions,
)
from dialoop.environments.episode import Episode, Opening, Outcome, Score, TaskData
from dialoop.environments.jsonl_tasks import JsonlTasks
from dialoop.environments.loading import load_environment
from dialoop.environments.modes import Answered, InputMode, RewardShape, Text, Tokens
from dialoop.environments.python_interpreter import PythonInterpreter
from dialoop.environments.rewards import ExactResult, NamedReward, RewardFunction, Rewards
from dialoop.environments.standard import arithmetic, jsonl, tool_environment, tool_transforms
from dialoop.environments.tasks import NoTasks, TaskPage, TaskRef, TaskSource, task_not_found
from dialoop.environments.tools import Tool, ToolCalls, ToolInputError
from dialoop.environments.transform import Traits, Transform

__all__ = [
    "Answered",
    "ArithmeticDemonstrations",
    "ArithmeticTasks",
    "Calculator",
    "CallSyntax",
    "ChatEnv",
    "DataCursor",
    "DataLoadingPrimer",
    "DataSource",
    "Demonstrate",
    "Demonstrations",
    "EndOnText",
    "EndWhenIncomplete",
    "EndWithoutCall",
    "Environment",
    "Episode",
    "ExactResult",
    "Given",
    "InputMode",
    "JsonlTasks",
    "Loaded",
    "Managed",
    "MaxTurns",
    "NamedReward",
    "NoTasks",
    "Opening",
    "Outcome",
    "PythonInterpreter",
    "RewardFunction",
    "RewardShape",
    "Rewards",
    "Score",
    "Stateless",
    "TakesQuestions",
    "TaskChoice",
    "TaskData",
    "TaskPage",
    "TaskRef",
    "TaskSource",
    "Text",
    "Tokens",
    "Tool",
    "ToolCalls",
    "ToolInputError",
    "Traits",
    "Transform",
    "arithmetic",
    "chosen_task",
    "jsonl",
    "load_environment",
    "parse_call",
    "task_not_found",
    "tool_environment",
    "tool_transforms",
]
