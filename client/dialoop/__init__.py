"""Dialoop: reinforcement learning for chat models as asynchronous services.

Every name below is imported when it is first used, so that `import dialoop` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dialoop.old_names import refuse, tell_old_names

if TYPE_CHECKING:
    from dialoop.chat import ChatHistory, Histories, History
    from dialoop.clients.blocking.connection import BlockingDialoop
    from dialoop.clients.channel import Channel
    from dialoop.clients.connection import Dialoop
    from dialoop.clients.environment import EnvironmentClient
    from dialoop.clients.inference import InferenceClient
    from dialoop.clients.interact import InteractiveSessions
    from dialoop.clients.replay import ReplayClient
    from dialoop.clients.retry import RetryPolicy
    from dialoop.clients.scorer import ScorerClient
    from dialoop.clients.template import TemplateClient
    from dialoop.clients.trainer import TrainerClient
    from dialoop.collection import CollectedBatch, Collection, collect
    from dialoop.environments import ChatEnv, arithmetic, load_environment, tool_environment
    from dialoop.errors import DialoopError
    from dialoop.local.client import LocalEnvironmentClient
    from dialoop.messages import ContentPart, Message, ToolCall, ToolDefinition
    from dialoop.rollout import play, play_group
    from dialoop.sequences import PolicyVersion, Segment, Sequence, Source
    from dialoop.templates.chat_template import ChatTemplate
    from dialoop.templates.declared_parser import TemplateParser
    from dialoop.templates.registry import TemplateRegistry, add_chat_template
    from dialoop.tokens.builder import TokenBuilder
    from dialoop.tokens.tokenizer import Tokenizer
    from dialoop.trajectory import Group, Reward, SamplingParams, Task, Trajectory, Turn

__version__ = "0.1.0"

_HOMES = {
    "BlockingDialoop": "clients.blocking.connection",
    "Channel": "clients.channel",
    "ChatEnv": "environments",
    "ChatHistory": "chat",
    "ChatTemplate": "templates.chat_template",
    "CollectedBatch": "collection",
    "Collection": "collection",
    "ContentPart": "messages",
    "Dialoop": "clients.connection",
    "DialoopError": "errors",
    "EnvironmentClient": "clients.environment",
    "Group": "trajectory",
    "Histories": "chat",
    "History": "chat",
    "InferenceClient": "clients.inference",
    "InteractiveSessions": "clients.interact",
    "LocalEnvironmentClient": "local.client",
    "Message": "messages",
    "PolicyVersion": "sequences",
    "ReplayClient": "clients.replay",
    "RetryPolicy": "clients.retry",
    "Reward": "trajectory",
    "SamplingParams": "trajectory",
    "ScorerClient": "clients.scorer",
    "Segment": "sequences",
    "Sequence": "sequences",
    "Source": "sequences",
    "Task": "trajectory",
    "TemplateClient": "clients.template",
    "TemplateParser": "templates.declared_parser",
    "TemplateRegistry": "templates.registry",
    "TokenBuilder": "tokens.builder",
    "Tokenizer": "tokens.tokenizer",
    "ToolCall": "messages",
    "ToolDefinition": "messages",
    "TrainerClient": "clients.trainer",
    "Trajectory": "trajectory",
    "Turn": "trajectory",
    "add_chat_template": "templates.registry",
    "arithmetic": "environments",
    "collect": "collection",
    "load_environment": "environments",
    "play": "rollout",
    "play_group": "rollout",
    "tool_environment": "environments",
}

__all__ = [
    "BlockingDialoop",
    "Channel",
    "ChatEnv",
    "ChatHistory",
    "ChatTemplate",
    "CollectedBatch",
    "Collection",
    "ContentPart",
    "Dialoop",
    "DialoopError",
    "EnvironmentClient",
    "Group",
    "Histories",
    "History",
    "InferenceClient",
    "InteractiveSessions",
    "LocalEnvironmentClient",
    "Message",
    "PolicyVersion",
    "ReplayClient",
    "RetryPolicy",
    "Reward",
    "SamplingParams",
    "ScorerClient",
    "Segment",
    "Sequence",
    "Source",
    "Task",
    "TemplateClient",
    "TemplateParser",
    "TemplateRegistry",
    "TokenBuilder",
    "Tokenizer",
    "ToolCall",
    "ToolDefinition",
    "TrainerClient",
    "Trajectory",
    "Turn",
    "add_chat_template",
    "arithmetic",
    "collect",
    "load_environment",
    "play",
    "play_group",
    "tool_environment",
]

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
