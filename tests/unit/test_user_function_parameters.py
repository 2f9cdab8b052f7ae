"""Every public function that takes a user's function is played with a sync and an async one.

The parameters and fields are found by their annotations, in the SDK and in the services.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.unit.test_user_functions import CASES

ROOT = Path(__file__).parents[2]

# Functions that take a function of Dialoop's own, or one that only tests replace: by the start of
# their names.
NOT_A_USERS = {
    "dialoop_extras.importers.foreign_keys": "how a foreign key becomes ours",
    "dialoop.answers.grammars:CallShape": "a grammar's own function reads its calls",
    "dialoop.clients.channel:Channel": "services make its credentials",
    "dialoop.clients.connection:Dialoop.client": "it makes one of our clients",
    "dialoop.clients.retry:": "its call is a client's",
    "dialoop.environments.rewards.rubrics:value_of": "the rubrics' own step",
    "dialoop.environments.rewards.functions:Rewards.try_out": "test_mistakes.py has its kinds",
    "dialoop.environments.tasks.files:require_columns": "it asks for the parameters of rewards",
    "dialoop.environments.sessions.engine:": "a clock, for tests",
    "dialoop.failures:Repeats": "a clock, for tests",
    "dialoop.environments.stamps:PolicyVersions": "a clock, for tests",
    "dialoop.environments.tools.function_schema:Arguments": "it reads a signature, calls nothing",
    "dialoop.sandbox.persistent:": "its pool is the sandbox's",
    "dialoop.sandbox.worker:Questions": "between the sandbox and its worker",
    "dialoop.templates.chat_template:ChatTemplate": "TemplateRegistry has made its parser",
    "dialoop.templates.confinement:": "its functions ask the confinement's own process",
    "dialoop.templates.parsing:": "between two modules of dialoop.templates",
    "dialoop_extras.text_environment.environment:rewards_of": "TextEnvironment's own step",
    "dialoop_extras.text_environment.tools:": "TextEnvironment makes it",
    "dialoop.environments.tasks.stored:": "functions of rows are loaded by path",
    "dialoop.tasks.stored_tasks:": "functions of rows are loaded by path",
    "dialoop_extras.importers.trl:": "loaded by path; test_rows_of_others.py has both kinds",
    "dialoop_extras.importers.verl:": "loaded by path; test_rows_of_others.py has both kinds",
    "dialoop.tokens.continuation:": "between two modules of dialoop.tokens",
    "dialoop.user_functions:": "what all of them use",
    "dialoop.wire.codec:": "pure functions of one field, from tables of dialoop.wire",
    "dialoop_services.collector.": "agents are loaded by path; the rest is the collector's own",
    "dialoop_ops.conformance.inference.": "the kit's own requests",
    "dialoop_ops.console.export:": "the console's own progress",
    "dialoop_services.environment.serving:": "the server's own report",
    "dialoop_services.inference.": "between the service and its engine; a clock, for tests",
    "dialoop_learning.model.": "pure numeric kernels",
    "dialoop_learning.parallel.": "between the ranks of one trainer",
    "dialoop_learning.training:forward_backward": "the trainer watches its own rows",
    "dialoop_services.replay.": "a clock, for tests",
    "dialoop_services.hosting.": "between a server and its servicers",
    "dialoop_services.rest.": "between the door and what it serves",
    "dialoop_services.runtime.": "between a server and its servicers",
    "dialoop_services.scorer.reference_batches:": "it loads the scorer's own model",
    "dialoop_ops.launch.": "the launchers' own ports and processes",
    "dialoop.environments.tasks.source:first_refs": "a client or a source lists its own pages",
    "dialoop_extras.task_players:": "its agents are loaded by path",
    "dialoop_ops.policies.rescore:": "it tells of its own progress",
    "dialoop_ops.stack.layout:Layout": "a launcher makes room by it",
    "dialoop_ops.stack.processes.": "probes of the stack's own processes",
    "dialoop_services.trainer.": "between the job and its learner; trackers are loaded by path",
}

# Classes and protocols of what users write, beside what is annotated as Callable.
PROTOCOLS = {
    *("Agent", "Game", "Gamemaster", "LogProbFunction", "Policy", "TextPolicy", "ArgumentTool"),
    *("Parser", "Sessions", "Recordings"),
}


def _trees() -> dict[str, ast.Module]:
    """Return the syntax of each public module that can name a function's type."""
    texts = {}
    for package in (*ROOT.glob("client/dialoop*"), *ROOT.glob("services/dialoop*")):
        for file in package.rglob("*.py"):
            parts = file.relative_to(package.parent).with_suffix("").parts
            module = ".".join(part for part in parts if part != "__init__")
            if not re.search(r"\.(v1|cli|blocking)\b|\._", module):
                texts[module] = file.read_text("utf-8")
    # To parse every file would take seconds.
    aliases = re.findall(r"^(\w+) = .*Callable\[", "\n".join(texts.values()), re.M)
    word = re.compile(rf"\b({'|'.join({'Callable', *PROTOCOLS, *aliases})})\b")
    return {module: ast.parse(text) for module, text in texts.items() if word.search(text)}


def _names_of_functions(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return by module the names of types that are functions: its own and what it imports."""
    own: dict[str, set[str]] = {
        module: {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign) and "Callable" in _words(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for module, tree in trees.items()
    }
    names = {module: {"Callable"} | PROTOCOLS | own[module] for module in trees}
    for module, tree in trees.items():
        under_if = [
            node for branch in tree.body if isinstance(branch, ast.If) for node in branch.body
        ]
        for node in (*tree.body, *under_if):
            if isinstance(node, ast.ImportFrom):
                names[module] |= {a.name for a in node.names} & own.get(node.module or "", set())
    return names


def _words(annotation: ast.expr) -> set[str]:
    nodes = list(ast.walk(annotation))
    words = {node.id for node in nodes if isinstance(node, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words |= set(re.findall(r"\w+", node.value))
    return words


def _taking_one(node: ast.Module | ast.ClassDef, place: str, names: set[str]) -> Iterator[str]:
    for member in node.body:
        annotations: list[ast.expr | None] = []
        if isinstance(member, ast.ClassDef) and member.name[0] != "_":
            yield from _taking_one(member, f"{place}{member.name}.", names)
            fields = [field for field in member.body if isinstance(field, ast.AnnAssign)]
            annotations = [f.annotation for f in fields if ast.unparse(f.target)[0] != "_"]
        elif isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            if member.name[0] == "_" and member.name not in ("__init__", "__call__"):
                continue
            parameters = [node for node in ast.walk(member.args) if isinstance(node, ast.arg)]
            annotations = [parameter.annotation for parameter in parameters]
        if any(names & _words(annotation) for annotation in annotations if annotation is not None):
            yield re.sub(r"\.__(init|call)__$", "", f"{place}{getattr(member, 'name', '')}")


def test_every_public_function_that_takes_a_function_is_among_them() -> None:
    trees = _trees()
    taking = {
        name
        for module, names in _names_of_functions(trees).items()
        for name in _taking_one(trees[module], f"{module}:", names)
    }
    covered = {f"{f.__module__}:{f.__qualname__}" for case in CASES.values() for f in case}
    left = taking - covered
    assert {name for name in left if not name.startswith(tuple(NOT_A_USERS))} == set()
    assert [start for start in NOT_A_USERS if not any(n.startswith(start) for n in left)] == []
