"""Dialoop: reinforcement learning for chat models as asynchronous services.

Every name below is imported when it is first used, so that `import dialoop` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dialoop.old_names import refuse, tell_old_names

if TYPE_CHECKING:
    from dialoop.chat import ChatHistory as ChatHistory
    from dialoop.chat import Histories as Histories
    from dialoop.chat import History as History
    from dialoop.clients.blocking.connection import BlockingDialoop as BlockingDialoop
    from dialoop.clients.channel import Channel as Channel
    from dialoop.clients.connection import Dialoop as Dialoop
    from dialoop.clients.environment import EnvironmentClient as EnvironmentClient
    from dialoop.clients.inference import InferenceClient as InferenceClient
    from dialoop.clients.interact import InteractiveSessions as InteractiveSessions
    from dialoop.clients.replay import ReplayClient as ReplayClient
    from dialoop.clients.retry import RetryPolicy as RetryPolicy
    from dialoop.clients.scorer import ScorerClient as ScorerClient
    from dialoop.clients.template import TemplateClient as TemplateClient
    from dialoop.clients.trainer import TrainerClient as TrainerClient
    from dialoop.collection import CollectedBatch as CollectedBatch
    from dialoop.collection import Collection as Collection
    from dialoop.collection import collect as collect
    from dialoop.environments import ChatEnv as ChatEnv
    from dialoop.environments import arithmetic as arithmetic
    from dialoop.environments import load_environment as load_environment
    from dialoop.environments import tool_environment as tool_environment
    from dialoop.errors import DialoopError as DialoopError
    from dialoop.local.client import LocalEnvironmentClient as LocalEnvironmentClient
    from dialoop.messages import ContentPart as ContentPart
    from dialoop.messages import Message as Message
    from dialoop.messages import ToolCall as ToolCall
    from dialoop.messages import ToolDefinition as ToolDefinition
    from dialoop.rollout import play as play
    from dialoop.rollout import play_group as play_group
    from dialoop.sequences import PolicyVersion as PolicyVersion
    from dialoop.sequences import Segment as Segment
    from dialoop.sequences import Sequence as Sequence
    from dialoop.sequences import Source as Source
    from dialoop.templates.chat_template import ChatTemplate as ChatTemplate
    from dialoop.templates.declared_parser import TemplateParser as TemplateParser
    from dialoop.templates.registry import TemplateRegistry as TemplateRegistry
    from dialoop.templates.registry import add_chat_template as add_chat_template
    from dialoop.tokens.builder import TokenBuilder as TokenBuilder
    from dialoop.tokens.tokenizer import Tokenizer as Tokenizer
    from dialoop.trajectory import Group as Group
    from dialoop.trajectory import Reward as Reward
    from dialoop.trajectory import SamplingParams as SamplingParams
    from dialoop.trajectory import Task as Task
    from dialoop.trajectory import Trajectory as Trajectory
    from dialoop.trajectory import Turn as Turn

__version__ = "0.1.0"

_NAMES = {
    "chat": ("ChatHistory", "Histories", "History"),
    "clients.blocking.connection": ("BlockingDialoop",),
    "clients.channel": ("Channel",),
    "clients.connection": ("Dialoop",),
    "clients.environment": ("EnvironmentClient",),
    "clients.inference": ("InferenceClient",),
    "clients.interact": ("InteractiveSessions",),
    "clients.replay": ("ReplayClient",),
    "clients.retry": ("RetryPolicy",),
    "clients.scorer": ("ScorerClient",),
    "clients.template": ("TemplateClient",),
    "clients.trainer": ("TrainerClient",),
    "collection": ("CollectedBatch", "Collection", "collect"),
    "environments": ("ChatEnv", "arithmetic", "load_environment", "tool_environment"),
    "errors": ("DialoopError",),
    "local.client": ("LocalEnvironmentClient",),
    "messages": ("ContentPart", "Message", "ToolCall", "ToolDefinition"),
    "rollout": ("play", "play_group"),
    "sequences": ("PolicyVersion", "Segment", "Sequence", "Source"),
    "templates.chat_template": ("ChatTemplate",),
    "templates.declared_parser": ("TemplateParser",),
    "templates.registry": ("TemplateRegistry", "add_chat_template"),
    "tokens.builder": ("TokenBuilder",),
    "tokens.tokenizer": ("Tokenizer",),
    "trajectory": ("Group", "Reward", "SamplingParams", "Task", "Trajectory", "Turn"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = list(_HOMES)

tell_old_names()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        refuse(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
