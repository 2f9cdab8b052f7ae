"""What an environment's author writes against. It imports no protobuf, no grpc and no torch.

Tasks, transforms, tools and reward functions enter; environments that sessions play leave.

def capital(country: str) -> str:
    return {"France": "Paris"}[country]

environment = tool_environment(
    name="capitals", tasks=JsonlTasks("capitals.jsonl"), tools=[capital], rewards=[ExactResult()]
)
"""

from dialoop.environments.chat_env import ChatEnv as ChatEnv
from dialoop.environments.endings import EndOnTag as EndOnTag
from dialoop.environments.endings import EndOnText as EndOnText
from dialoop.environments.endings import EndWhenIncomplete as EndWhenIncomplete
from dialoop.environments.endings import EndWithoutCall as EndWithoutCall
from dialoop.environments.endings import MaxLength as MaxLength
from dialoop.environments.endings import MaxTurns as MaxTurns
from dialoop.environments.endings import OneTurn as OneTurn
from dialoop.environments.environment import Demonstrate as Demonstrate
from dialoop.environments.environment import Demonstrations as Demonstrations
from dialoop.environments.environment import Environment as Environment
from dialoop.environments.environment import Given as Given
from dialoop.environments.environment import Managed as Managed
from dialoop.environments.environment import OpensSlowly as OpensSlowly
from dialoop.environments.environment import Stateless as Stateless
from dialoop.environments.environment import TakesQuestions as TakesQuestions
from dialoop.environments.episode import Episode as Episode
from dialoop.environments.episode import Opening as Opening
from dialoop.environments.episode import Outcome as Outcome
from dialoop.environments.episode import Score as Score
from dialoop.environments.episode import TaskData as TaskData
from dialoop.environments.episode import current_call_id as current_call_id
from dialoop.environments.episode import current_episode as current_episode
from dialoop.environments.loading import load_environment as load_environment
from dialoop.environments.modes import Answered as Answered
from dialoop.environments.modes import InputMode as InputMode
from dialoop.environments.modes import RewardShape as RewardShape
from dialoop.environments.modes import Text as Text
from dialoop.environments.modes import Tokens as Tokens
from dialoop.environments.rewards.functions import ExactResult as ExactResult
from dialoop.environments.rewards.functions import NamedReward as NamedReward
from dialoop.environments.rewards.functions import RewardFunction as RewardFunction
from dialoop.environments.rewards.functions import Rewards as Rewards
from dialoop.environments.rewards.kl_reward import KLReward as KLReward
from dialoop.environments.spec import EnvironmentSpec as EnvironmentSpec
from dialoop.environments.spec import FieldSpec as FieldSpec
from dialoop.environments.spec import shape_rewards as shape_rewards
from dialoop.environments.spec import spec_of as spec_of
from dialoop.environments.stamps import PolicyVersions as PolicyVersions
from dialoop.environments.stamps import PolicyVersionStamp as PolicyVersionStamp
from dialoop.environments.stamps import StepCounter as StepCounter
from dialoop.environments.stamps import TemplateTransform as TemplateTransform
from dialoop.environments.stamps import TokenizeTransform as TokenizeTransform
from dialoop.environments.standard import arithmetic as arithmetic
from dialoop.environments.standard import completion as completion
from dialoop.environments.standard import dataset_chat_env as dataset_chat_env
from dialoop.environments.standard import jsonl as jsonl
from dialoop.environments.standard import tool_environment as tool_environment
from dialoop.environments.standard import tool_transforms as tool_transforms
from dialoop.environments.tasks.arithmetic_tasks import (
    ArithmeticDemonstrations as ArithmeticDemonstrations,
)
from dialoop.environments.tasks.arithmetic_tasks import ArithmeticTasks as ArithmeticTasks
from dialoop.environments.tasks.choosing import TaskChoice as TaskChoice
from dialoop.environments.tasks.choosing import choose_task as choose_task
from dialoop.environments.tasks.data_loading import DataCursor as DataCursor
from dialoop.environments.tasks.data_loading import DataLoadingPrimer as DataLoadingPrimer
from dialoop.environments.tasks.data_loading import DataSource as DataSource
from dialoop.environments.tasks.data_loading import Loaded as Loaded
from dialoop.environments.tasks.row_tasks import RowTasks as RowTasks
from dialoop.environments.tasks.source import NoTasks as NoTasks
from dialoop.environments.tasks.source import TaskPage as TaskPage
from dialoop.environments.tasks.source import TaskRef as TaskRef
from dialoop.environments.tasks.source import TaskSource as TaskSource
from dialoop.environments.tasks.source import task_not_found as task_not_found
from dialoop.environments.tasks.stored import JsonlTasks as JsonlTasks
from dialoop.environments.thinking import AddThinkingPrompt as AddThinkingPrompt
from dialoop.environments.tools.answer_tags import AnswerTagReward as AnswerTagReward
from dialoop.environments.tools.answer_tags import tag_text as tag_text
from dialoop.environments.tools.calculator import Calculator as Calculator
from dialoop.environments.tools.function_tools import ArgumentTool as ArgumentTool
from dialoop.environments.tools.function_tools import FunctionTool as FunctionTool
from dialoop.environments.tools.mcp_tools import McpServer as McpServer
from dialoop.environments.tools.mcp_tools import McpTools as McpTools
from dialoop.environments.tools.python_interpreter import PythonInterpreter as PythonInterpreter
from dialoop.environments.tools.text_tools import CallSyntax as CallSyntax
from dialoop.environments.tools.text_tools import Tool as Tool
from dialoop.environments.tools.text_tools import ToolCalls as ToolCalls
from dialoop.environments.tools.text_tools import ToolInputError as ToolInputError
from dialoop.environments.tools.text_tools import parse_call as parse_call
from dialoop.environments.tools.tool_syntaxes import BlockCalls as BlockCalls
from dialoop.environments.tools.tool_syntaxes import JsonCalls as JsonCalls
from dialoop.environments.tools.tool_syntaxes import NativeCalls as NativeCalls
from dialoop.environments.tools.tool_syntaxes import ParsedCall as ParsedCall
from dialoop.environments.tools.tool_syntaxes import ToolSyntax as ToolSyntax
from dialoop.environments.tools.tool_syntaxes import XmlCalls as XmlCalls
from dialoop.environments.tools.tool_use import EndWithoutCalls as EndWithoutCalls
from dialoop.environments.tools.tool_use import ToolUse as ToolUse
from dialoop.environments.transform import Traits as Traits
from dialoop.environments.transform import Transform as Transform
