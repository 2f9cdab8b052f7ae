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
from dialoop.environments.chat_env import ChatEnv, Demonstrate, Demonstrations, Environment
from dialoop.environments.endings import EndOnText, EndWhenIncomplete, EndWithoutCall, MaxTurns
from dialoop.environments.episode import Episode, Opening, Outcome, Score, TaskData
from dialoop.environments.jsonl_tasks import JsonlTasks
from dialoop.environments.loading import load_environment
from dialoop.environments.rewards import ExactResult, NamedReward, RewardFunction, Rewards
from dialoop.environments.standard import arithmetic, jsonl, tool_environment, tool_transforms
from dialoop.environments.tasks import TaskPage, TaskRef, TaskSource, task_not_found
from dialoop.environments.tools import Tool, ToolCalls, ToolInputError
from dialoop.environments.transform import Traits, Transform

__all__ = [
    "ArithmeticDemonstrations",
    "ArithmeticTasks",
    "Calculator",
    "CallSyntax",
    "ChatEnv",
    "Demonstrate",
    "Demonstrations",
    "EndOnText",
    "EndWhenIncomplete",
    "EndWithoutCall",
    "Environment",
    "Episode",
    "ExactResult",
    "JsonlTasks",
    "MaxTurns",
    "NamedReward",
    "Opening",
    "Outcome",
    "RewardFunction",
    "Rewards",
    "Score",
    "TaskData",
    "TaskPage",
    "TaskRef",
    "TaskSource",
    "Tool",
    "ToolCalls",
    "ToolInputError",
    "Traits",
    "Transform",
    "arithmetic",
    "jsonl",
    "load_environment",
    "parse_call",
    "task_not_found",
    "tool_environment",
    "tool_transforms",
]
