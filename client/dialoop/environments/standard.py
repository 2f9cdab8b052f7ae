"""The usual environments in one call, and the built-in ones, such as arithmetic."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import (
    EndOnTag,
    EndOnText,
    EndWhenIncomplete,
    EndWithoutCall,
    MaxTurns,
)
from dialoop.environments.environment import Demonstrate
from dialoop.environments.rewards.functions import ExactResult, RewardCallable, Rewards
from dialoop.environments.stamps import StepCounter
from dialoop.environments.tasks.arithmetic_tasks import ArithmeticDemonstrations, ArithmeticTasks
from dialoop.environments.tasks.data_loading import DataLoadingPrimer
from dialoop.environments.tasks.row_tasks import Collate, Rows, RowTasks, text_to_query
from dialoop.environments.tasks.source import TaskSource
from dialoop.environments.tasks.stored import JsonlTasks
from dialoop.environments.tools.answer_tags import AnswerTagReward
from dialoop.environments.tools.calculator import Calculator
from dialoop.environments.tools.mcp_tools import McpTools
from dialoop.environments.tools.text_tools import CallSyntax, ToolCalls, ToolFunction
from dialoop.environments.transform import Transform
from dialoop.episode import Redo
from dialoop.errors import InvalidConfig
from dialoop.tokens.tokenizer import Tokenizer

_RAW = "{% for message in messages %}{{ message.content }}{% endfor %}"


def tool_transforms(  # noqa: PLR0913 - the options are the interface
    *,
    tools: Mapping[str, ToolFunction] | Sequence[ToolFunction],
    rewards: Sequence[RewardCallable],
    max_turns: int = 4,
    max_tool_response: int = 100,
    tool_timeout_s: float = 10.0,
    syntax: CallSyntax | None = None,
    remembers: bool = False,
) -> tuple[Transform, ...]:
    """Return the usual transforms, in the order in which they run.

    A cut-off message ends the episode whatever its text is. A submit wins over a call. The turn
    limit comes after the tools, so that the trajectory includes the last tool's answer.
    """
    syntax = syntax or CallSyntax()
    return (
        EndWhenIncomplete(),
        EndOnText(syntax.submit),
        EndWithoutCall(syntax),
        ToolCalls(
            tools,
            syntax=syntax,
            max_tool_response=max_tool_response,
            timeout_s=tool_timeout_s,
            remembers=remembers,
        ),
        MaxTurns(max_turns),
        Rewards(rewards),
    )


def tool_environment(  # noqa: PLR0913 - the options are the interface
    *,
    name: str,
    tasks: TaskSource,
    tools: Mapping[str, ToolFunction] | Sequence[ToolFunction],
    rewards: Sequence[RewardCallable],
    max_turns: int = 4,
    system_prompt: str = "",
    version: str = "1",
    description: str = "",
    max_tool_response: int = 100,
    tool_timeout_s: float = 10.0,
    demonstrate: Demonstrate | None = None,
    redo: Redo | str = "never",
    remembers: bool = False,
) -> ChatEnv:
    """Return a chat environment with tools, rewards, a submit marker and a turn limit.

    remembers: whether tools use `Episode.remember`, so that a step needs its session.
    """
    transforms = tool_transforms(
        tools=tools,
        rewards=rewards,
        max_turns=max_turns,
        max_tool_response=max_tool_response,
        tool_timeout_s=tool_timeout_s,
        remembers=remembers,
    )
    return ChatEnv(
        name=name,
        version=version,
        description=description,
        tasks=tasks,
        transforms=transforms,
        system_prompt=system_prompt,
        demonstrate=demonstrate,
        redo=redo,
    )


def arithmetic(
    *,
    operations: str = "+",
    low: int = 10,
    high: int = 99,
    num_heldout: int = 256,
    max_turns: int = 3,
    direct: float = 0.6,
) -> ChatEnv:
    """Return the built-in `arithmetic` environment: two-digit sums, with a calculator.

    user 35+40, assistant <request><Calculator>35+40<call>, tool 75<response>, assistant
    Result=75<submit>: reward 1. `direct` is the share of demonstrations without a tool call.
    """
    return tool_environment(
        name="arithmetic",
        description="Sums of two numbers, with a calculator.",
        tasks=ArithmeticTasks(operations=operations, low=low, high=high, num_heldout=num_heldout),
        tools=[Calculator()],
        rewards=[ExactResult()],
        max_turns=max_turns,
        demonstrate=ArithmeticDemonstrations(direct=direct),
        redo="safe",
    )


def chat(  # noqa: PLR0913 - the options are the interface
    *,
    name: str = "chat",
    system_prompt: str = "",
    input_mode: str = "history",
    tokenizer: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_steps: int | None = None,
    end_on_tag: str = "",
    mcp_servers: Mapping[str, Mapping[str, Any]] | None = None,
) -> ChatEnv:
    """Return the built-in `chat` environment: the caller's own questions, perhaps with MCP tools.

    `end_on_tag="answer"` rewards an answer block that equals the `answer` of the reset's data.
    """
    transforms: list[Transform] = []
    if end_on_tag:
        transforms.append(EndOnTag(end_on_tag))
    if mcp_servers:
        transforms.append(McpTools(mcp_servers))
    if max_steps is not None:
        transforms.append(StepCounter(max_steps))
    if end_on_tag:
        transforms.append(AnswerTagReward(tag=end_on_tag))
    return ChatEnv(
        name=name,
        description="The caller's own questions.",
        transforms=tuple(transforms),
        system_prompt=system_prompt,
        input_mode=input_mode,
        tokenizer=tokenizer,
        template_kwargs=template_kwargs or {},
    )


def completion(
    *,
    tokenizer: Tokenizer | str | Path,
    name: str = "completion",
    input_mode: str = "text",
    max_steps: int | None = None,
    transforms: Sequence[Transform] = (),
) -> ChatEnv:
    """Return the built-in `completion` environment: raw text without turns or a chat template.

    The next prompt is the prompt and what the policy wrote, as text or as tokens.
    """
    limit = () if max_steps is None else (StepCounter(max_steps),)
    return ChatEnv(
        name=name,
        description="The caller's own text, continued.",
        transforms=(*transforms, *limit),
        input_mode=input_mode,
        tokenizer=tokenizer,
        chat_template=_RAW,
    )


def dataset_chat_env(  # noqa: PLR0913 - the options are the interface
    dataset: TaskSource | Rows | Mapping[str, Rows],
    *,
    name: str = "dataset",
    split: str = "",
    shuffle: bool = True,
    seed: int | None = None,
    repeats: int = 1,
    group_repeats: bool = False,
    collate: Collate = text_to_query,
    transforms: Sequence[Transform] = (),
    max_steps: int | None = None,
    **options: Any,
) -> ChatEnv:
    """Return a ChatEnv that loads its own questions; a reset without a task takes the next one.

    The split is "train" by default, if there is one. Without `seed` the order is random. `options`
    are those of ChatEnv.
    """
    tasks = dataset if isinstance(dataset, TaskSource) else RowTasks(dataset, collate=collate)
    shuffle_seed = 0 if not shuffle else random.randrange(1, 2**31) if seed is None else seed
    if shuffle and shuffle_seed == 0:
        raise InvalidConfig(
            "seed is 0, which would keep the order of the rows.",
            remedy="Use another seed, or shuffle=False.",
        )
    primer = DataLoadingPrimer(
        tasks, split=split, shuffle_seed=shuffle_seed, repeats=repeats, group_repeats=group_repeats
    )
    limit = () if max_steps is None else (StepCounter(max_steps),)
    return ChatEnv(name=name, transforms=(primer, *transforms, *limit), **options)


def jsonl(
    *,
    path: str,
    heldout_path: str | None = None,
    heldout_fraction: float = 0.0,
    max_turns: int = 4,
    system_prompt: str = "",
    ignore_columns: Sequence[str] = (),
) -> ChatEnv:
    """Return the built-in `jsonl` environment: problems from a file, with a calculator.

    Rows have `question`, `answer` and perhaps `id`. Other columns are refused, unless they are
    among ignore_columns.
    """
    return tool_environment(
        name="jsonl",
        description="Problems with one numeric answer from a file, with a calculator.",
        tasks=JsonlTasks(
            path,
            heldout_path=heldout_path,
            heldout_fraction=heldout_fraction,
            metadata=False,
            ignore_columns=ignore_columns,
        ),
        tools=[Calculator()],
        rewards=[ExactResult()],
        max_turns=max_turns,
        system_prompt=system_prompt,
    )
