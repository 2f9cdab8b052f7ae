"""The page's table of methods and arguments: each name is there, and each line to write runs."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import dialoop_extras.compat as compat
import pytest
from dialoop.chat import Message
from dialoop.environments import TaskData
from dialoop.testing import ScriptedPolicy, byte_tokenizer
from dialoop_extras.trials import ScriptedAgent

PAGE = (Path(__file__).parents[4] / "docs" / "compat.md").read_text("utf-8")
TABLE = PAGE.partition("## Methods and arguments\n")[2].partition("\n## ")[0]
ROWS = [row.strip("| \n").split(" | ") for row in TABLE.splitlines() if row.startswith("| `")]
NOT_OURS = {"TensorDict", "TensorClass", "set_list_to_stack", "add_chat_template"}
"""Names of tensordict, and a function of two modules, which the row names too."""


def names_in(cell: str) -> list[str]:
    """The paths before arguments: `History.append(...)` is History.append."""
    return [re.split(r"[(\[ ]", text)[0] for text in re.findall("`([^`]+)`", cell)]


async def namespace() -> dict[str, Any]:
    env = compat.ChatEnv()
    opening = env.reset(TaskData(key="1", question="Hello"), seed=0)
    chat = [{"role": "user", "content": "Hello"}]
    made = compat.TransformersWrapper(ScriptedPolicy(["Hi."]))
    return {
        **{name: getattr(compat, name) for name in compat.OFFERED},
        **{"TaskData": TaskData, "env": env, "opening": opening, "chat": chat, "nested": [[chat]]},
        **{
            "tokenizer": byte_tokenizer(),
            "answer": Message(role="assistant", content="Hi."),
            "message": chat[0],
        },
        **{
            "messages": chat,
            "policy": ScriptedPolicy(["Hi."]),
            "view": await made(opening.history),
        },
        **{"trials": compat.TwentyQuestionsEnv(), "inputs": [{"solution": "apple"}]},
        **{
            "agent": ScriptedAgent(["[apple]"]),
            "history": compat.History(role="user", content="a"),
        },
    }


def test_the_table_has_rows_of_three_cells() -> None:
    assert len(ROWS) >= 15
    assert {len(row) for row in ROWS} == {3}


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_each_name_is_there_or_left_out_by_name(row: list[str]) -> None:
    for path in names_in(row[0]):
        name, _, method = path.partition(".")
        if name in compat.LEFT_OUT:
            with pytest.raises(AttributeError, match=name):
                getattr(compat, name)
        elif name in ("chat", "history"):
            assert callable(__import__(f"dialoop_extras.compat.{name}", fromlist=[""]).History)
        elif name not in NOT_OURS:
            assert callable(getattr(compat, name))
            assert not method or "refused" in row[1] or "none" in row[1] or is_of(name, method)


def is_of(name: str, method: str) -> bool:
    """Whether what the name makes has the method; a reset and a step have names of their own."""
    made = {
        "ChatEnv": compat.ChatEnv(),
        "TextHistory": compat.TextHistory("a", [1]),
        "MultistepEnv": compat.TwentyQuestionsEnv(),
        "History": compat.History(),
    }
    return method == "step_and_maybe_reset" or hasattr(made[name], method)


LINES = [line for row in ROWS for line in re.findall(r"^`([^`]+)`$", row[2])]


@pytest.mark.parametrize("line", LINES)
def test_each_line_to_write_runs(line: str) -> None:
    async def run() -> None:
        names = await namespace()
        if line.startswith("history = history.append_segment"):
            names["history"] = compat.TextHistory("q", [1])
        code = compile(line, "docs/compat.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = await asyncio.to_thread(eval, code, names)
        if inspect.isawaitable(result):
            await result

    asyncio.run(run())
