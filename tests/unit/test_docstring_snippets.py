"""Every snippet in a public docstring of the SDK runs, or is marked with the reason why it cannot.

A snippet is a paragraph of a docstring that is Python with a call, an assignment or a definition.
Where a line ends in a comment that is a Python literal, the line has that value.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import dialoop
import pytest
from dialoop import debug, environments, testing
from dialoop.chat import ChatHistory, History, Message
from dialoop.templates.chat_template import ChatTemplate
from dialoop.trials import ScriptedAgent, TwentyQuestions, run_trial

_SERVICE = "needs a service that runs"
_OWN_MODULE = "names a module of the reader's"
_OWN_FILE = "reads a file of the reader's"
NOT_RUN = {
    "dialoop.agents": _SERVICE,
    "dialoop.clients.blocking.connection": _SERVICE,
    "dialoop.clients.blocking.loop": _SERVICE,
    "dialoop.clients.channel": _SERVICE,
    "dialoop.clients.connection": _SERVICE,
    "dialoop.clients.interact": _SERVICE,
    "dialoop.clients.recordings": _SERVICE,
    "dialoop.clients.retry": _SERVICE,
    "dialoop.jobs": "starts a whole job; tests/e2e plays it",
    "dialoop.environments": _OWN_FILE,
    "dialoop.tasks.files": _OWN_FILE,
    "dialoop.environments.rewards.kl_reward": _SERVICE,
    "dialoop.environments.foreign.driver": "needs a driver of the reader's",
    "dialoop.environments.foreign.torchrl": "needs torchrl",
    "dialoop.views.torchrl": "needs torchrl",
    "dialoop.environments.tools.mcp_tools": "starts MCP servers",
    "dialoop.import_paths": _OWN_MODULE,
    "dialoop.sandbox": "starts processes; tests/unit/sandbox runs them",
    "dialoop.sandbox.killable": _OWN_MODULE,
    "dialoop.sandbox.sandbox": "starts processes; tests/unit/sandbox runs them",
    "dialoop.sandbox.self_test": "starts processes; tests/unit/sandbox runs them",
    "dialoop.environments.tasks.data_loading": "shows an ellipsis for the reader's transforms",
    "dialoop.views.padding": "shows an ellipsis for the reader's rows",
    "dialoop.text_environment.environment": "needs a policy, tools and a prompt of the reader's",
    "dialoop.tokens.builder": "shows an ellipsis for what an engine sampled",
    "dialoop.trajectory": "shows an ellipsis for trajectories",
    "dialoop.wire.codec": "shows part of another module",
}


def _snippets(docstring: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        code = textwrap.dedent(paragraph)
        try:
            nodes = list(ast.walk(ast.parse(code)))
        except SyntaxError:
            continue
        kinds = (ast.Call, ast.Assign, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        if any(isinstance(node, kinds) for node in nodes):
            yield code


def _docstrings() -> Iterator[tuple[str, str]]:
    for module in pkgutil.walk_packages(dialoop.__path__, "dialoop."):
        if re.search(r"\.(v1|compat|cli)\b|\._", module.name):
            continue
        loaded = importlib.import_module(module.name)
        yield module.name, loaded.__doc__ or ""
        for name, value in vars(loaded).items():
            is_own = getattr(value, "__module__", None) == module.name and name[0] != "_"
            if not is_own or not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            yield f"{module.name}.{name}", value.__doc__ or ""
            for key, member in vars(value).items() if inspect.isclass(value) else ():
                if inspect.isfunction(member) and key[0] != "_":
                    yield f"{module.name}.{name}.{key}", member.__doc__ or ""


SNIPPETS = {
    place: "\n".join(codes)
    for place, docstring in _docstrings()
    if (codes := list(_snippets(docstring)))
}


def _search(query: str) -> str:
    """Search."""
    return query


def _lookup(key: str) -> str:
    """Look up."""
    return key


async def _names(place: str) -> dict[str, Any]:
    """Return what a reader has at hand: the public names, the module's own, and examples."""
    names: dict[str, Any] = {"dialoop": dialoop, "debug": debug, "History": History}
    for module in (dialoop, environments, testing):
        public = getattr(module, "__all__", [name for name in vars(module) if name[0] != "_"])
        names |= {name: getattr(module, name) for name in public}
    tokenizer = testing.byte_tokenizer()
    chat_history = ChatHistory(prompt=[{"role": "user", "content": "3+4"}])
    answered = chat_history.respond(Message(role="assistant", content="7"))
    environment = environments.arithmetic()
    task = environment.tasks.get("train", "35+40")
    game = TwentyQuestions()
    names |= {
        "tokenizer": tokenizer,
        "template": ChatTemplate.of(tokenizer),
        "policy": testing.ScriptedPolicy(["Result=75<submit>"] * 3),
        "chat_history": answered,
        "history": answered if place.endswith("parts") else answered.full,
        "environment": environment,
        "trajectory": testing.trajectory(),
        "episode": environment.reset(task, 0).episode,
        "answer": Message(role="assistant", content="Result=75<submit>"),
        "task": dialoop.Task(task_id="t", environment="arithmetic", split="train", key="35+40"),
        "tasks": environments.RowTasks([{"key": "1", "query": "1+2", "answer": "3"}]),
        "brevity": lambda episode: 1 / (1 + len(episode.answer_text)),
        "has_answer": lambda episode: 1.0,
        "is_right": lambda episode: True,
        "unsure": lambda episode: False,
        "rewards": [dialoop.Reward(name="r", value=1.0)],
        "message": Message(role="assistant", content="hi"),
        "search": _search,
        "lookup": _lookup,
        "source": "{% generation %}{{ messages[0].content }}{% endgeneration %}",
        "reward": lambda episode: 1.0,
        "equal": lambda answer, truth: answer == truth,
        "truth": "75",
        "collate": dict,
        "row": {"query": "1+2"},
        "error": KeyError("answer"),
        "game": game,
        "agent": ScriptedAgent(["[apple]"]),
        "result": await run_trial(game, [{"solution": "apple"}], ScriptedAgent(["[apple]"])),
        "TwentyQuestions": TwentyQuestions,
    }
    own = importlib.import_module(place if place in _modules() else _module_of(place))
    return names | {key: value for key, value in vars(own).items() if key[:2] != "__"}


def _modules() -> set[str]:
    return {module.name for module in pkgutil.walk_packages(dialoop.__path__, "dialoop.")}


def _module_of(place: str) -> str:
    while place not in _modules():
        place = place.rpartition(".")[0]
    return place


async def _run(place: str) -> None:
    names = await _names(place)
    code = SNIPPETS[place]
    lines = code.splitlines()
    for statement in ast.parse(code).body:
        is_value = isinstance(statement, ast.Expr)
        tree: Any = (
            ast.Expression(statement.value)
            if isinstance(statement, ast.Expr)
            else ast.Module([statement], [])
        )
        compiled = compile(
            tree, place, "eval" if is_value else "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        value = eval(compiled, names)
        if inspect.iscoroutine(value):
            value = await value
        comment = lines[(statement.end_lineno or 1) - 1].rpartition("# ")[2]
        try:
            expected = ast.literal_eval(comment)
        except (ValueError, SyntaxError):
            continue
        if is_value and "# " in lines[(statement.end_lineno or 1) - 1]:
            assert value == expected, f"{place}: {lines[(statement.end_lineno or 1) - 1]}"


@pytest.mark.parametrize("place", [place for place in SNIPPETS if place not in NOT_RUN])
async def test_a_snippet_runs(place: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with asyncio.timeout(30):
        await _run(place)


def test_what_is_marked_is_there() -> None:
    assert set(NOT_RUN) <= set(SNIPPETS)
