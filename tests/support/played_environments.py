"""Four environments that a policy is taught by examples: who answers, and what to say there.

Every demonstration is a scripted game against the environment itself, so that what tools answer in
it is what they answered.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dialoop.chat import History, Message
from dialoop.environments import (
    ChatEnv,
    EndOnText,
    EndWhenIncomplete,
    ExactResult,
    MaxTurns,
    McpServer,
    McpTools,
    PythonInterpreter,
    Rewards,
    RowTasks,
    TaskData,
    Transform,
    load_environment,
)

PROGRAM = Path(__file__).parent / "programs" / "mcp_program.py"
SUMS = ((3, 4), (8, 9), (20, 15), (31, 6))


def _asking(
    name: str, question: str, tool: Transform, answer: Callable[[int, int], int]
) -> ChatEnv:
    rows = [
        {"query": question.format(a, b), "answer": str(answer(a, b)), "left": a, "right": b}
        for a, b in SUMS
    ]
    ends = (EndWhenIncomplete(), EndOnText())
    return ChatEnv(
        name=name,
        tasks=RowTasks(rows),
        transforms=(*ends, tool, MaxTurns(3), Rewards([ExactResult()])),
    )


def python() -> ChatEnv:
    """Products, with a Python interpreter that lasts for the episode."""
    tool = PythonInterpreter(persistent=True)
    return _asking("python", "{}*{}", tool, lambda a, b: a * b)


def lab() -> ChatEnv:
    """Sums, with the tools of an MCP server."""
    tool = McpTools({"lab": McpServer(command=sys.executable, args=(str(PROGRAM),), shared=True)})
    return _asking("lab", "{} and {}", tool, lambda a, b: a + b)


def _submission(task: TaskData) -> str:
    return f"Result={task.answer}<submit>"


def _by_calculator(task: TaskData) -> tuple[str, ...]:
    return f"<request><Calculator>{task.question}<call>", _submission(task)


def _by_python(task: TaskData) -> tuple[str, ...]:
    return f"```python\nprint({task.question})\n```", _submission(task)


def _by_mcp(task: TaskData) -> tuple[str, ...]:
    left, right = task.metadata["left"], task.metadata["right"]
    return f'<tool>lab.add\n{{"left": {left}, "right": {right}}}</tool>', _submission(task)


def _by_questions(task: TaskData) -> tuple[str, ...]:
    return "Is it alive?", "Can you eat it?", f"[{task.answer}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An environment as a service's config names it, and how its tasks are solved."""

    name: str
    use: str
    solve: Callable[[TaskData], tuple[str, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    tool: str = ""

    @property
    def entry(self) -> dict[str, Any]:
        """As it stands in DIALOOP_ENVIRONMENT_ENVIRONMENTS."""
        return {"use": self.use, "options": dict(self.options)}


PLAYED = (
    Played(
        name="twenty_questions",
        use="twenty_questions",
        solve=_by_questions,
        options={"max_turns": 6},
    ),
    Played(name="arithmetic", use="arithmetic", solve=_by_calculator, tool="Calculator"),
    Played(name="python", use=f"{__name__}:python", solve=_by_python, tool="python"),
    Played(name="lab", use=f"{__name__}:lab", solve=_by_mcp, tool="lab.add"),
)


async def demonstrations(played: Played, num_tasks: int) -> list[tuple[History, tuple[str, ...]]]:
    """The first tasks of an environment, solved by running its tools, and what ends a message."""
    environment = load_environment(played.use, played.options)
    assert isinstance(environment, ChatEnv)
    stop = environment.traits.stop
    async with _holding(environment):
        return [
            (await _solve(environment, environment.tasks.get("train", key), played), stop)
            for key in environment.tasks.keys("train")[:num_tasks]
        ]


@asynccontextmanager
async def _holding(environment: ChatEnv) -> AsyncIterator[None]:
    await environment.acquire()
    try:
        yield
    finally:
        await environment.release()


async def _solve(environment: ChatEnv, task: TaskData, played: Played) -> History:
    opening = environment.reset(task, 0)
    episode, prompt = opening.episode, opening.history
    for text in played.solve(task):
        answer = prompt.respond(Message(role="assistant", content=text))
        outcome = await environment.step(episode, answer)
        episode, prompt = outcome.episode, outcome.history
    await environment.close(episode)
    assert episode.done, f"{played.name} goes on after {played.solve(task)}"
    assert sum(reward.value for reward in outcome.rewards) == 1.0
    return episode.history
