"""What an environment's author writes against. It imports no protobuf, no grpc and no torch.

Tasks, transforms, tools and reward functions enter; environments that sessions play leave.

def capital(country: str) -> str:
    return {"France": "Paris"}[country]

environment = tool_environment(
    name="capitals", tasks=JsonlTasks("capitals.jsonl"), tools=[capital], rewards=[ExactResult()]
)
"""

from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import (
    EndOnTag,
    EndOnText,
    EndWhenIncomplete,
    EndWithoutCall,
    MaxLength,
    MaxTurns,
    OneTurn,
)
from dialoop.environments.environment import (
    Demonstrate,
    Demonstrations,
    Environment,
    Given,
    Managed,
    OpensSlowly,
    Stateless,
    TakesQuestions,
)
from dialoop.environments.episode import Episode, Opening, Outcome, Score, TaskData, current_episode
from dialoop.environments.loading import load_environment
from dialoop.environments.modes import Answered, InputMode, RewardShape, Text, Tokens
from dialoop.environments.rewards.functions import ExactResult, NamedReward, RewardFunction, Rewards
from dialoop.environments.rewards.kl_reward import KLReward
from dialoop.environments.spec import EnvironmentSpec, FieldSpec, shape_rewards, spec_of
from dialoop.environments.stamps import (
    PolicyVersions,
    PolicyVersionStamp,
    StepCounter,
    TemplateTransform,
    TokenizeTransform,
)
from dialoop.environments.standard import (
    arithmetic,
    completion,
    dataset_chat_env,
    jsonl,
    tool_environment,
    tool_transforms,
)
from dialoop.environments.tasks.arithmetic_tasks import ArithmeticDemonstrations, ArithmeticTasks
from dialoop.environments.tasks.choosing import TaskChoice, choose_task
from dialoop.environments.tasks.data_loading import (
    DataCursor,
    DataLoadingPrimer,
    DataSource,
    Loaded,
)
from dialoop.environments.tasks.jsonl_tasks import JsonlTasks
from dialoop.environments.tasks.row_tasks import RowTasks
from dialoop.environments.tasks.source import NoTasks, TaskPage, TaskRef, TaskSource, task_not_found
from dialoop.environments.thinking import AddThinkingPrompt
from dialoop.environments.tools.answer_tags import AnswerTagReward, tag_text
from dialoop.environments.tools.calculator import Calculator
from dialoop.environments.tools.function_tools import ArgumentTool, FunctionTool
from dialoop.environments.tools.mcp_tools import McpServer, McpTools
from dialoop.environments.tools.python_interpreter import PythonInterpreter
from dialoop.environments.tools.text_tools import (
    CallSyntax,
    Tool,
    ToolCalls,
    ToolInputError,
    parse_call,
)
from dialoop.environments.tools.tool_syntaxes import (
    BlockCalls,
    JsonCalls,
    NativeCalls,
    ParsedCall,
    ToolSyntax,
    XmlCalls,
)
from dialoop.environments.tools.tool_use import EndWithoutCalls, ToolUse
from dialoop.environments.transform import Traits, Transform

__all__ = [
    "AddThinkingPrompt",
    "AnswerTagReward",
    "Answered",
    "ArgumentTool",
    "ArithmeticDemonstrations",
    "ArithmeticTasks",
    "BlockCalls",
    "Calculator",
    "CallSyntax",
    "ChatEnv",
    "DataCursor",
    "DataLoadingPrimer",
    "DataSource",
    "Demonstrate",
    "Demonstrations",
    "EndOnTag",
    "EndOnText",
    "EndWhenIncomplete",
    "EndWithoutCall",
    "EndWithoutCalls",
    "Environment",
    "EnvironmentSpec",
    "Episode",
    "ExactResult",
    "FieldSpec",
    "FunctionTool",
    "Given",
    "InputMode",
    "JsonCalls",
    "JsonlTasks",
    "KLReward",
    "Loaded",
    "Managed",
    "MaxLength",
    "MaxTurns",
    "McpServer",
    "McpTools",
    "NamedReward",
    "NativeCalls",
    "NoTasks",
    "OneTurn",
    "Opening",
    "OpensSlowly",
    "Outcome",
    "ParsedCall",
    "PolicyVersionStamp",
    "PolicyVersions",
    "PythonInterpreter",
    "RewardFunction",
    "RewardShape",
    "Rewards",
    "RowTasks",
    "Score",
    "Stateless",
    "StepCounter",
    "TakesQuestions",
    "TaskChoice",
    "TaskData",
    "TaskPage",
    "TaskRef",
    "TaskSource",
    "TemplateTransform",
    "Text",
    "TokenizeTransform",
    "Tokens",
    "Tool",
    "ToolCalls",
    "ToolInputError",
    "ToolSyntax",
    "ToolUse",
    "Traits",
    "Transform",
    "XmlCalls",
    "arithmetic",
    "choose_task",
    "completion",
    "current_episode",
    "dataset_chat_env",
    "jsonl",
    "load_environment",
    "parse_call",
    "shape_rewards",
    "spec_of",
    "tag_text",
    "task_not_found",
    "tool_environment",
    "tool_transforms",
]
