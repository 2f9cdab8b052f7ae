"""`dialoop env`: what it writes, and that its checks find each thing an author may get wrong."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from dialoop.chat import Message, ToolCall
from dialoop.environments import (
    ChatEnv,
    EndWithoutCalls,
    Episode,
    FunctionTool,
    MaxTurns,
    Opening,
    Outcome,
    Rewards,
    RowTasks,
    Score,
    TaskData,
    ToolCalls,
    ToolUse,
    Traits,
    Transform,
    arithmetic,
    tool_environment,
)
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.environments.tools.function_tools import check_arguments, sample_of
from dialoop.environments.tools.text_tools import CallSyntax
from dialoop.environments.tools.tool_syntaxes import BlockCalls, JsonCalls, NativeCalls, XmlCalls
from dialoop.testing import byte_tokenizer
from dialoop.trajectory import Reward
from dialoop_extras.games import twenty_questions
from dialoop_ops.cli.main import main
from dialoop_ops.conformance.environment.checks import CHECKS, check_environment
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings

ROWS = {"train": [{"query": f"{n}?", "answer": str(n)} for n in range(4)]}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if (module := sys.modules[name]) and str(tmp_path) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


def chat(*transforms: Transform, **options: Any) -> ChatEnv:
    options = {"tasks": RowTasks(ROWS), **options}
    return ChatEnv(name="mine", transforms=(*transforms, MaxTurns(3)), **options)


async def problems(environment: Any, *answers: str) -> dict[str, str]:
    findings = await check_environment(environment, answers=answers, num_tasks=2)
    assert [finding.check for finding in findings] == list(CHECKS)
    return {finding.check: finding.problem for finding in findings if not finding.is_ok}


def test_what_new_writes_passes_every_check_and_is_played(monkeypatch, capsys):
    assert main(["env", "new", "word_count"]) == 0
    assert main(["env", "check", "word_count:environment", "--option", "num_train=20"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("ok    ") == len(CHECKS)
    assert "word_count: all is well" in printed
    answers = iter(["<request><count_words>a b<call>", "Result=0<submit>"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    assert main(["env", "play", "word_count:environment"]) == 0
    assert "tool: 2<response>" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["../up", "Word", "1st", "a b", ""])
def test_new_writes_under_a_name_that_can_be_imported_only(name, capsys):
    assert main(["env", "new", name]) == 2
    assert "cannot be the name of a Python file" in capsys.readouterr().err
    assert not list(Path().iterdir())


@pytest.mark.parametrize("name", ["mine.py", "mine.toml"])
def test_new_overwrites_nothing(name, capsys):
    Path(name).write_text("precious")
    assert main(["env", "new", "mine"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in Path().iterdir()} == {name: "precious"}


def test_new_writes_a_job_that_config_check_accepts(capsys):
    assert main(["env", "new", "mine"]) == 0
    assert "dialoop train mine.toml" in capsys.readouterr().out
    words = [sys.executable, "-m", "dialoop_ops.stack", "config", "check", "mine.toml"]
    checked = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (checked.returncode, "no mistake found" in checked.stdout) == (0, True), checked.stderr


def test_check_prints_what_fails_and_what_to_do(capsys):
    Path("endless.py").write_text(
        "from dialoop.environments import ChatEnv\n\nmade = ChatEnv(name='endless')\n"
    )
    assert main(["env", "check", "endless:made"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL  end" in printed
    assert "Add OneTurn, MaxTurns or StepCounter" in printed
    assert "endless: 1 of 9 failed" in printed


def test_list_names_what_is_built_in_and_what_a_service_has(capsys):
    assert main(["env", "list"]) == 0
    printed = capsys.readouterr().out
    for name in ("arithmetic", "twenty_questions", "dialoop.tasks.gsm8k:gsm8k"):
        assert name in printed


def test_environments_and_findings_are_printed_as_json(capsys):
    assert main(["env", "list", "--json"]) == 0
    listed = {row["name"]: row["description"] for row in json.loads(capsys.readouterr().out)}
    assert listed["arithmetic"]
    assert main(["env", "check", "arithmetic", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert all(finding.keys() == {"check", "problem", "remedy", "note"} for finding in findings)
    assert {finding["problem"] for finding in findings} == {""}


async def test_what_is_built_in_passes(monkeypatch):
    assert await problems(arithmetic()) == {}
    assert await problems(twenty_questions(max_turns=4), "Is it alive?", "[key]") == {}


@pytest.mark.parametrize("mode", ["text", "tokens"])
async def test_text_and_tokens_mode_are_checked_too(mode):
    assert await problems(chat(input_mode=mode, tokenizer=byte_tokenizer())) == {}


class Unseeded(Transform):
    def reset(self, opening: Opening) -> Opening:
        return opening.append(Message(role="user", content=str(random.random())))


async def test_a_reset_by_unseeded_chance_is_found():
    by_check = await problems(chat(Unseeded()))
    assert "open differently" in by_check["reset"]


@dataclass
class Counting(Transform):
    """Counts the steps of all episodes in one place."""

    number: list[int] = field(default_factory=list)

    async def step(self, outcome: Outcome) -> Outcome:
        self.number.append(1)
        message = Message(role="user", content=f"Turn {len(self.number)}")
        return outcome if outcome.episode.done else outcome.append(message)


async def test_a_memory_shared_by_episodes_is_found():
    by_check = await problems(chat(Counting()))
    assert "another answer the second time" in by_check["state"]
    assert "beside other sessions" in by_check["sessions"]


class InPlace(Transform):
    """Remembers by changing a list that is there."""

    def reset(self, opening: Opening) -> Opening:
        return opening.remember(said=[])

    async def step(self, outcome: Outcome) -> Outcome:
        outcome.episode.state["said"].append(outcome.episode.answer_text)
        return outcome


async def test_a_state_that_is_changed_in_place_is_found():
    by_check = await problems(chat(InPlace()))
    assert "state['said']" in by_check["state"]


async def test_an_episode_that_never_ends_is_found():
    by_check = await problems(ChatEnv(name="mine", tasks=RowTasks(ROWS)))
    assert set(by_check) == {"end"}
    assert "64 turns" in by_check["end"]


def not_a_number(episode: Episode) -> float:
    return float("nan")


def failing(episode: Episode) -> float:
    raise KeyError("answer")


@pytest.mark.parametrize("function", [not_a_number, failing])
async def test_a_reward_that_fails_or_is_no_number_is_found(function):
    by_check = await problems(chat(MaxTurns(3), Rewards([function])))
    assert set(by_check) == {"rewards"}


@dataclass
class Basket:
    """A tool's state, kept in four ways; `total` reads what `add` was given."""

    way: str
    items: list[float] = field(default_factory=list)

    def add(self, number: float, episode: Episode) -> str:
        """Add a number."""
        kept = episode.state.get("items", [])
        if self.way == "assigned":
            episode.state = {"items": [*kept, number]}  # type: ignore[misc]
        elif self.way == "in place":
            episode.state["items"] = [*kept, number]  # type: ignore[index]
        elif self.way == "own":
            self.items.append(number)
        else:
            episode.remember(items=[*kept, number])
        return "added"

    def total(self, episode: Episode) -> str:
        """Add up."""
        return str(sum(self.items or episode.state.get("items", [])))

    def environment(self, **options: Any) -> ChatEnv:
        return chat(ToolUse([self.add, self.total], **options))


@pytest.mark.parametrize("syntax", [NativeCalls(), BlockCalls(), XmlCalls(), JsonCalls()])
async def test_the_state_of_a_tool_has_one_way_and_the_others_are_found(syntax):
    problem = await problems(Basket("assigned").environment(syntax=syntax))
    assert "Tool add failed: FrozenInstanceError at test_env.py" in problem["traits"]
    problem = await problems(Basket("in place").environment(syntax=syntax))
    assert "changes state['items'] of an episode in place" in problem["state"]
    problem = await problems(Basket("own").environment(syntax=syntax))
    assert "beside other sessions, or a second time" in problem["sessions"]
    problem = await problems(Basket("remembered").environment(syntax=syntax))
    assert "remembers=True" in problem["traits"]
    right = Basket("remembered").environment(syntax=syntax, remembers=True)
    assert await problems(right) == {}
    assert right.traits.needs_session


class Hidden(Transform):
    """Remembers, and says that the messages hold all."""

    async def step(self, outcome: Outcome) -> Outcome:
        number = outcome.episode.state.get("number", 0)
        message = Message(role="user", content=f"Turn {number}")
        outcome = outcome.remember(number=number + 1)
        return outcome if outcome.episode.done else outcome.append(message)


async def test_a_stateless_claim_is_tested_with_a_state_that_changed():
    by_check = await problems(chat(Hidden()))
    assert "from the messages alone gives another answer" in by_check["state"]


def always_broken(number: int, choice: Literal["a", "b"], more: list[str] | None = None) -> str:
    """Fail."""
    raise RuntimeError("no network")


@pytest.mark.parametrize("syntax", [NativeCalls(), BlockCalls(), XmlCalls(), JsonCalls()])
async def test_each_tool_is_called_in_the_syntax_of_its_environment(syntax):
    by_check = await problems(chat(ToolUse([always_broken], syntax=syntax)))
    assert set(by_check) == {"traits"}
    assert "Tool always_broken failed: RuntimeError at test_env.py" in by_check["traits"]
    by_check = await problems(chat(ToolUse([always_broken], syntax=syntax, tool_failures="tell")))
    assert set(by_check) == {"traits"}
    assert "Tool always_broken failed each time, and the policy is told so" in by_check["traits"]
    other = ToolCalls([broken], syntax=CallSyntax(request="[[", call="]]"))
    assert "Tool broken failed" in (await problems(chat(other)))["traits"]


@dataclass
class Place:
    name: str
    floor: int


def test_a_sample_fits_its_schema():
    def look(place: Place, kind: Literal["x", "y"], far: bool, size: float | None, tags: list[str]):
        """Look."""

    definition = FunctionTool(look).definition
    schema = json.loads(definition.parameters_json)
    sample = sample_of(schema)
    check_arguments(sample, schema)
    assert sample["place"] == {"name": "1", "floor": 1}
    assert sample["kind"] == "x"


def answered(task: TaskData, rng: random.Random) -> tuple[Message, ...]:
    return (
        Message(role="assistant", tool_calls=(ToolCall(name="echo", arguments_json="{}"),)),
        Message(role="tool", content="wrong"),
        Message(role="assistant", content="done"),
    )


async def test_a_demonstration_of_native_calls_is_played_whole():
    def echo() -> str:
        """Echo."""
        return "right"

    environment = chat(ToolUse([echo]), EndWithoutCalls(), demonstrate=answered)
    by_check = await problems(environment)
    assert set(by_check) == {"demonstrations"}
    assert "'wrong', and the environment says tool 'right'" in by_check["demonstrations"]


class Secret(Transform):
    """Gives a reward, and speaks, without a word in its traits."""

    async def step(self, outcome: Outcome) -> Outcome:
        return outcome.append(Message(role="judge", content="Hm."))

    async def score(self, episode: Episode) -> Score:
        return Score(rewards=(Reward(name="hidden", value=1.0),))


async def test_undeclared_rewards_and_roles_are_found():
    by_check = await problems(chat(Secret()))
    assert "hidden" in by_check["rewards"]
    assert "judge speaks" in by_check["traits"]


def broken(query: str) -> str:
    raise RuntimeError("no network")


def never(episode: Episode) -> float | None:
    return None


async def test_a_reward_that_is_always_none_is_found():
    by_check = await problems(chat(MaxTurns(3), Rewards([never])))
    assert set(by_check) == {"rewards"}
    assert "the reward never: its function returned None each time" in by_check["rewards"]


async def test_a_reward_that_some_answer_earns_is_no_problem():
    def right(episode: Episode) -> float | None:
        return 1.0 if episode.answer_text == "yes" else None

    assert await problems(chat(MaxTurns(3), Rewards([right])), "yes") == {}


@pytest.mark.parametrize("transform", [ToolCalls([lambda query: "x"]), ToolUse([lambda a: a])])
async def test_a_tool_that_cannot_be_called_by_its_name_is_found(transform):
    by_check = await problems(chat(transform))
    assert "by the name '<lambda>'" in by_check["traits"]


async def test_a_hanging_tool_takes_its_time_out_once():
    async def hang(query: str) -> str:
        await asyncio.Event().wait()
        return ""

    environment = tool_environment(
        name="mine", tasks=RowTasks(ROWS), tools=[hang], rewards=[], tool_timeout_s=1.0
    )
    started = time.monotonic()
    by_check = await problems(environment)
    assert set(by_check) == {"traits"}
    assert "Tool hang failed: it took more than" in by_check["traits"]
    assert time.monotonic() - started < 3.0


@pytest.mark.parametrize("function", [failing, not_a_number])
async def test_the_log_shows_each_error_once(function, caplog):
    await problems(chat(MaxTurns(3), Rewards([function])))
    assert len([record for record in caplog.records if record.exc_info]) <= 1


async def test_a_tool_that_fails_is_found():
    environment = tool_environment(name="mine", tasks=RowTasks(ROWS), tools=[broken], rewards=[])
    by_check = await problems(environment)
    assert "tool" in by_check["traits"].lower()


def lying(task: TaskData, rng: random.Random) -> tuple[Message, ...]:
    return (
        Message(role="assistant", content="<request><Calculator>1+1<call>"),
        Message(role="tool", content="3<response>"),
        Message(role="assistant", content="Result=3<submit>"),
    )


def stopping(task: TaskData, rng: random.Random) -> tuple[Message, ...]:
    return (Message(role="assistant", content="<request><Calculator>1+1<call>"),)


@pytest.mark.parametrize(
    ("demonstrate", "text"), [(lying, "the environment says tool '2"), (stopping, "does not end")]
)
async def test_a_demonstration_that_does_not_happen_is_found(demonstrate, text):
    made = arithmetic()
    environment = ChatEnv(
        name="mine", tasks=made.tasks, transforms=made.transforms, demonstrate=demonstrate
    )
    by_check = await problems(environment)
    assert set(by_check) == {"demonstrations"}
    assert text in by_check["demonstrations"]


class Restless(RowTasks):
    """Keys in another order each time."""

    num_asked = 0

    def keys(self, split: str) -> Any:
        self.num_asked += 1
        return list(super().keys(split))[:: (-1) ** self.num_asked]


class Obliging(RowTasks):
    def get(self, split: str, key: str) -> TaskData:
        return TaskData(key=key, question=key or "?")


@pytest.mark.parametrize(
    ("tasks", "text"),
    [
        (RowTasks({"train": []}), "has no task"),
        (Obliging(ROWS), "a task for any key"),
        (Restless(ROWS), "differ each time"),
    ],
)
async def test_tasks_that_cannot_be_relied_on_are_found(tasks, text):
    assert text in (await problems(chat(tasks=tasks)))["tasks"]


class Raising(Transform):
    @property
    def traits(self) -> Traits:
        return Traits(needs_session=True)

    def reset(self, opening: Opening) -> Opening:
        raise ZeroDivisionError("the author's own")


async def test_what_an_environment_raises_is_shown_to_its_author():
    by_check = await problems(chat(Raising()))
    assert "ZeroDivisionError: the author's own" in by_check["reset"]


async def test_a_services_environments_are_listed(capsys):
    settings = EnvironmentSettings(drain_s=1)
    async with serving(settings, Catalogue([arithmetic(), chat()])) as server:
        arguments = ["env", "list", "--address", server.address]
        assert await asyncio.to_thread(main, arguments) == 0
    printed = capsys.readouterr().out
    assert "arithmetic" in printed
    assert "(train 4)" in printed
