"""Every public function that takes a user's function takes a sync and an async one."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
import random
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import dialoop
import pytest
from dialoop.agents import AgentHost, load_agent, play_agent
from dialoop.chat import History, Message
from dialoop.environments import (
    AddThinkingPrompt,
    AnswerTagReward,
    BrowserTools,
    ChatEnv,
    DataLoadingPrimer,
    Episode,
    FunctionTool,
    KLReward,
    MaxTurns,
    NamedReward,
    Outcome,
    Rewards,
    RowTasks,
    Score,
    TaskData,
    Tokens,
    ToolCalls,
    ToolUse,
    Transform,
    dataset_chat_env,
    load_environment,
    tool_environment,
    tool_transforms,
)
from dialoop.environments.foreign import torchrl as foreign_torchrl
from dialoop.environments.foreign.openenv import OpenEnvDriver
from dialoop.environments.foreign.torchrl import TorchrlDriver, torchrl_environment
from dialoop.environments.games import Play
from dialoop.environments.rewards.rubrics import (
    Gate,
    GroupRelative,
    InOrder,
    WeightedSum,
    each_trajectory,
)
from dialoop.episode import ContinuedText, Sample
from dialoop.rollout import play, play_group
from dialoop.tasks.mlgym import MlgymCommands, MlgymEnv, mlgym
from dialoop.templates.registry import DEFAULT_REGISTRY, TemplateRegistry, add_chat_template
from dialoop.testing import InMemoryEnvironment, ScriptedPolicy, byte_tokenizer, group, trajectory
from dialoop.text_environment.environment import TextEnvironment, each
from dialoop.text_environment.setups import TextSetup
from dialoop.trajectory import Owner, SamplingParams, StopReason, Task
from dialoop.trials.agents import DirectOutputAgent, ScriptedAgent
from dialoop.trials.game import Move
from dialoop.trials.trial import Action, run_trial
from dialoop.trials.twenty_questions import TwentyQuestions
from dialoop.user_functions import call, call_now, raised_at

BYTES = byte_tokenizer()
TASKS = RowTasks([{"query": "1+2", "answer": "3"}])
TASK = Task(task_id="t", environment="e", split="train", key="0", num_trajectories=2)
DONE = Episode(
    task=TaskData(key="0", question="1+2", answer="3"),
    seed=0,
    history=History((Message(role="user", content="1+2"),)),
    answer=Message(role="assistant", content="<answer>3</answer>"),
    terminated=True,
)

Function = Callable[..., Any]
Form = Callable[[Function], Function]


def _sync(function: Function) -> Function:
    return function


def _async(function: Function) -> Function:
    async def later(*arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(0)
        return function(*arguments, **options)

    return later


def one(episode: Episode) -> float:
    return 1.0


def chat(*transforms: Transform, **options: Any) -> ChatEnv:
    return ChatEnv(name="e", tasks=options.pop("tasks", TASKS), transforms=transforms, **options)


async def step(environment: ChatEnv, *texts: str) -> Outcome:
    opening = environment.reset(TASKS.get("train", "0"), 0)
    episode, history = opening.episode, opening.history
    for text in texts:
        outcome = await environment.step(
            episode, history.respond(Message(role="assistant", content=text))
        )
        episode, history = outcome.episode, outcome.history
    return outcome


def continue_ids(*, token_ids: Any, sampling: SamplingParams, turn: int) -> tuple[Sample, ...]:
    """Continue a text with "ok<submit>"."""
    from dialoop.sequences import PolicyVersion, Source, sequence_of

    prompt, ids = list(token_ids), list(BYTES.encode("ok<submit>", trusted=True).ids)
    model = {"source": Source.MODEL, "policy_version": PolicyVersion(lineage="m", number=0)}
    sequence = sequence_of(
        [(prompt, {"source": Source.PROMPT}), (ids, model)], logprobs=[-0.5] * len(ids)
    )
    text = ContinuedText(prompt="", response="ok<submit>")
    history = dialoop.ChatHistory()
    return (Sample(history=history, sequence=sequence, stop_reason=StopReason.STOP, text=text),)


async def rewards(form: Form) -> None:
    plain = await Rewards([form(one)]).score(DONE)
    named = await Rewards([NamedReward(form(one), name="n")]).score(DONE)
    assert [r.value for r in (*plain.rewards, *named.rewards)] == [1.0, 1.0]


async def rubrics(form: Form) -> None:
    part = form(one)
    for rubric in (WeightedSum({"one": (part, 1.0)}), Gate(part, part), InOrder([part])):
        assert await rubric(DONE) == 1.0
    values = GroupRelative(form(lambda group: [0.0, 1.0]))
    assert await values(group(0.0, 1.0)) == [0.0, 1.0]
    assert await each_trajectory(part)(group(0.0)) == [1.0]


async def kl_reward(form: Form) -> None:
    logprobs = form(lambda rows: [[-1.0] * (len(row) - 1) for row in rows])
    kl = KLReward(policy=logprobs, reference=logprobs)
    environment = chat(kl, input_mode="tokens", tokenizer=BYTES)
    opening = environment.reset(TASKS.get("train", "0"), 0)
    outcome = await environment.step(opening.episode, Tokens(response=(65, 66)))
    assert outcome.rewards[0].per_token == (0.0, 0.0)


async def thinking(form: Form) -> None:
    outcome = await step(chat(MaxTurns(1), AddThinkingPrompt(form(lambda episode: False))), "x")
    assert outcome.episode.done
    outcome = await step(chat(MaxTurns(1), AddThinkingPrompt(form(lambda episode: True))), "x")
    assert not outcome.episode.done


async def answer_tags(form: Form) -> None:
    score = await AnswerTagReward(equal=form(lambda answer, truth: answer == truth)).score(DONE)
    assert score.rewards[0].success
    score = await AnswerTagReward(equal=form(lambda answer, truth: False)).score(DONE)
    assert not score.rewards[0].success


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


async def tools(form: Form) -> None:
    def shout(query: str) -> str:
        return query.upper()

    called = "<request><shout>hi<call>"
    named = form(shout)
    environments = (
        chat(ToolCalls({"shout": named})),
        chat(*tool_transforms(tools={"shout": named}, rewards=[form(one)])),
        tool_environment(name="e", tasks=TASKS, tools={"shout": named}, rewards=[form(one)]),
    )
    for environment in environments:
        outcome = await step(environment, called)
        assert outcome.episode.history[-1].text.startswith("HI")
        assert not outcome.failures


async def argument_tools(form: Form) -> None:
    function = form(double)
    if function is not double:

        async def function(number: int) -> int:
            """Double a number."""
            return 2 * number

    own = SimpleNamespace(
        definition=FunctionTool(double, name="own").definition,
        run=form(lambda arguments, *, timeout_s: str(2 * arguments["number"])),
    )
    environment = chat(ToolUse([FunctionTool(function, name="double"), own]))
    for name in ("double", "own"):
        opening = environment.reset(TASKS.get("train", "0"), 0)
        asks = Message(
            role="assistant",
            tool_calls=(dialoop.ToolCall(name=name, arguments_json='{"number": 2}'),),
        )
        outcome = await environment.step(opening.episode, opening.history.respond(asks))
        assert outcome.episode.history[-1].text == "4"


async def demonstrations(form: Form) -> None:
    shown = form(lambda task, rng: (Message(role="assistant", content=task.answer),))
    environment = tool_environment(name="e", tasks=TASKS, tools=[], rewards=[], demonstrate=shown)
    for made in (environment, chat(demonstrate=shown)):
        history = made.demonstration(TASKS.get("train", "0"), random.Random(0))
        assert history[-1].text == "3"


async def rows(form: Form) -> None:
    collate = form(lambda row: {"query": row["q"]})
    assert RowTasks([{"q": "1"}], collate=collate).get("train", "0").question == "1"
    environment = dataset_chat_env([{"q": "1"}], collate=collate)
    assert environment.tasks.get("train", "0").question == "1"
    assert DataLoadingPrimer(factory=form(lambda: TASKS)).next().task.question == "1+2"


async def files(form: Form) -> None:
    import tempfile
    from pathlib import Path

    from dialoop.tasks.files import file_tasks

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text('{"q": "1"}\n')
        tasks = file_tasks(path, collate=form(lambda row: {"query": row["q"]}))
    assert tasks.get("train", "0").question == "1"


async def browser(form: Form) -> None:
    launched: list[Any] = []
    tools = BrowserTools(allowed_domains=["a.b"], launch=form(launched.append))
    await tools.acquire()
    assert len(launched) == 1


async def openenv(form: Form) -> None:
    sent: list[Any] = []

    class Place:
        async def ask(self, what: str, action: Any) -> Any:
            sent.append(action)
            return SimpleNamespace(reward=1.0, done=True)

    driver = object.__new__(OpenEnvDriver)  # without OpenEnv, which __post_init__ imports
    object.__setattr__(driver, "to_action", form(lambda text: {"said": text}))
    move = await driver.move(Place(), History((Message(role="assistant", content="x"),)))
    assert (sent, move.reward) == ([{"said": "x"}], 1.0)


async def torchrl(form: Form) -> None:
    made = SimpleNamespace(input_mode="text")
    without_torchrl = patch.object(foreign_torchrl, "_libraries", lambda: (None, None))
    with without_torchrl, pytest.raises(dialoop.DialoopError, match="history mode"):
        await TorchrlDriver(make=form(lambda: made)).begin(TaskData(key="0"), 0)


async def mlgym_bench(form: Form) -> None:
    bench = SimpleNamespace(
        reset=lambda seed: None,
        task=SimpleNamespace(args=SimpleNamespace(baseline_scores=[{"s": 0.5}])),
        task_args=SimpleNamespace(description="Improve."),
        close=lambda: None,
    )
    environment = mlgym(tasks=["t"], make=form(lambda task: bench))
    opening = await environment.open(environment.tasks.get("train", "t"), 0)
    assert opening.episode.history[-1].text == "Improve."


async def agents(form: Form) -> None:
    closed = trajectory(turns=(trajectory().turns[0],))
    recordings = SimpleNamespace(
        create=form(lambda recording_id, **options: "http://here"),
        close=form(lambda recording_id, rewards=(), **options: replace(
            closed, turns=(replace(closed.turns[0], rewards=rewards),)
        )),
    )  # fmt: skip
    host = AgentHost(recordings=recordings)
    played = await play_agent(TASK, agent=form(lambda task, connection: 0.5), host=host)
    assert played.reward == 0.5


def sync_agent(task: Any, connection: Any) -> float:
    return 1.0


async def async_agent(task: Any, connection: Any) -> float:
    return 1.0


async def loaded_agents(form: Form) -> None:
    name = "sync_agent" if form is _sync else "async_agent"
    assert load_agent(f"{__name__}:{name}").__name__ == name


def made_environment() -> ChatEnv:
    return chat()


async def made_environment_later() -> ChatEnv:
    return chat()


async def loaded_environments(form: Form) -> None:
    name = "made_environment" if form is _sync else "made_environment_later"
    assert load_environment(f"{__name__}:{name}").name == "e"


class Count:
    """Say the next number, three times; reward 1 each."""

    max_steps = 3

    def __init__(self, form: Form) -> None:
        self.begin = form(lambda task, *, seed: 0)
        self.prompt = form(lambda state, step: f"{state}?")
        self.play = form(lambda state, action: Move(state=state + 1, reward=1.0))


async def games(form: Form) -> None:
    outcome = await step(chat(Play(Count(form))), "1", "2")
    assert outcome.rewards[0].value == 1.0
    assert outcome.episode.history[-1].text == "2?"


async def trials(form: Form) -> None:
    agent = SimpleNamespace(get_action=form(lambda messages, state: Action(text="1")))
    assert (await run_trial(Count(form), [{}], agent)).rewards == [3.0]
    scripted = ScriptedAgent(form(lambda messages: "[key]"))
    assert (await run_trial(TwentyQuestions(), [{"solution": "key"}], scripted)).rewards == [1.0]


async def gamemasters(form: Form) -> None:
    game = TwentyQuestions(gamemaster=SimpleNamespace(answer=form(lambda word, question: "Yes")))
    move = await game.play(game.begin({"solution": "key"}, seed=0), "Is it?")
    assert move.state.reply == "Yes"


async def token_policies(form: Form) -> None:
    policy = SimpleNamespace(generate=form(continue_ids))
    action = await DirectOutputAgent(policy, BYTES).get_action(History((DONE.history[0],)), None)
    assert action.text == "ok<submit>"
    reward = each(form(lambda text: float("ok" in text)))
    setup = TextSetup(name="s", tools={"t": form(str)}, reward=reward)
    for environment in (
        TextEnvironment(policy, BYTES, tools={"t": form(str)}, reward=form(lambda texts: [1.0])),
        setup.on(policy, BYTES, sampling=SamplingParams()),
    ):
        assert (await environment.run(["q"])).rewards == [1.0]


async def policies(form: Form) -> None:
    inner, answers = InMemoryEnvironment(chat(MaxTurns(1), Rewards([one]))), ScriptedPolicy(["x"])
    scripted = ScriptedPolicy(form(lambda history: "x"))
    if form is _sync:
        policy = SimpleNamespace(generate=lambda *a, **o: asyncio.run(answers.generate(*a, **o)))
        names = ("create_session", "reset", "step", "close_session")
        loop = asyncio.get_running_loop()

        def blocking(name: str) -> Function:
            method = getattr(inner, name)
            return lambda *a, **o: asyncio.run_coroutine_threadsafe(method(*a, **o), loop).result()

        sessions: Any = SimpleNamespace(**{name: blocking(name) for name in names})
    else:
        policy, sessions = answers, inner
    for player in (policy, scripted):
        assert (await play(TASK, sessions=sessions, policy=player)).reward == 1.0
    played = await play_group(TASK, sessions=sessions, policy=policy, group_id="g")
    assert [t.reward for t in played.trajectories] == [1.0, 1.0]


async def parsers(form: Form) -> None:
    registry = TemplateRegistry()
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    registry.add_chat_template(
        "own", template, form(lambda text: [Message(role="user", content=text)])
    )
    assert registry.get("own").parse("hi")[0].text == "hi"
    with patch.object(DEFAULT_REGISTRY, "_entries", {}):
        read = form(lambda text: [Message(role="user", content=text)])
        add_chat_template("own", template, read)
        assert DEFAULT_REGISTRY.get("own").parse("hi")[0].text == "hi"


async def transforms(form: Form) -> None:
    class Own(Transform):
        pass

    reward = dialoop.Reward(name="own", value=1.0)
    Own.step = lambda self, outcome: form(lambda: outcome.truncate(3))()
    Own.score = lambda self, episode: form(lambda: Score(rewards=(reward,)))()
    Own.acquire = Own.release = lambda self: form(lambda: None)()
    Own.close = lambda self, episode: form(lambda: None)()
    environment = chat(Own())
    await environment.acquire()
    outcome = await step(environment, "x")
    await environment.close(outcome.episode)
    await environment.release()
    assert outcome.rewards == (reward,)


CASES: dict[str, tuple[Function, ...]] = {
    "rewards": (Rewards, NamedReward),
    "rubrics": (WeightedSum, Gate, InOrder, GroupRelative, each_trajectory),
    "kl_reward": (KLReward,),
    "thinking": (AddThinkingPrompt,),
    "answer_tags": (AnswerTagReward,),
    "tools": (ToolCalls, tool_transforms, tool_environment),
    "argument_tools": (ToolUse, FunctionTool),
    "demonstrations": (ChatEnv,),
    "rows": (RowTasks, dataset_chat_env, DataLoadingPrimer),
    "files": (importlib.import_module("dialoop.tasks.files").file_tasks,),
    "browser": (BrowserTools,),
    "openenv": (OpenEnvDriver, importlib.import_module(OpenEnvDriver.__module__).openenv),
    "torchrl": (TorchrlDriver, torchrl_environment),
    "mlgym_bench": (mlgym, MlgymEnv, MlgymCommands),
    "agents": (play_agent, AgentHost),
    "loaded_agents": (load_agent,),
    "loaded_environments": (load_environment,),
    "games": (Play,),
    "trials": (run_trial, ScriptedAgent),
    "gamemasters": (TwentyQuestions,),
    "token_policies": (DirectOutputAgent, TextEnvironment, each, TextSetup, TextSetup.on),
    "policies": (play, play_group, ScriptedPolicy),
    "parsers": (TemplateRegistry.add_chat_template, add_chat_template),
    "transforms": (Transform,),
}

# Functions that take a function of Dialoop's own, or one that only tests replace.
NOT_A_USERS = {
    "ChatTemplate": "its parser is one that TemplateRegistry has made",
    "FunctionParser": "TemplateRegistry makes it",
    "parse_tokens": "its parser is a template's",
    "parser_for": "its render is a template's",
    "continuation": "between two modules of dialoop.tokens",
    "open_sessions": "a clock, for tests",
    "SessionEngine": "a clock, for tests",
    "PolicyVersions": "a clock, for tests",
    "text_of_parts": "its parts are messages",
    "tokens_of_parts": "its parts are messages",
    "Arguments": "it reads a signature and calls nothing",
    "TextTools": "TextEnvironment makes it",
    "value_of": "the rubrics' own step",
    "call": "what all of them use",
    "call_now": "what all of them use",
    "is_async": "what all of them use",
}

_TAKES_A_FUNCTION = re.compile(
    r"\b(Callable|Agent|Game|Gamemaster|LogProbFunction|(Text)?Policy|Reward(Callable|Function)|Part"
    r"|GroupFunction|Script|ToolFunction|ArgumentTool|Demonstrate|Collate|Make|ToAction|Launch"
    r"|Parser(Function)?|Sessions|Recordings|Scores)\b"
)


@pytest.mark.parametrize("form", [_sync, _async])
@pytest.mark.parametrize("case", CASES)
async def test_it_takes_a_sync_and_an_async_function(case: str, form: Form) -> None:
    await globals()[case](form)


def _public_functions() -> dict[str, Function]:
    functions: dict[str, Function] = {}
    for module in pkgutil.walk_packages(dialoop.__path__, "dialoop."):
        if re.search(r"\.(v1|compat|cli|clients|wire|sandbox|conformance)\b|\._", module.name):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            is_own = getattr(value, "__module__", None) == module.name and name[0] != "_"
            if is_own and (inspect.isclass(value) or inspect.isfunction(value)):
                functions[f"{module.name}.{name}"] = value
                members = vars(value).items() if inspect.isclass(value) else ()
                functions |= {
                    f"{module.name}.{name}.{key}": member
                    for key, member in members
                    if inspect.isfunction(member) and key[0] != "_"
                }
    return functions


def test_every_public_function_that_takes_a_function_is_among_them() -> None:
    covered = {function.__qualname__ for case in CASES.values() for function in case}
    taking = set()
    for function in _public_functions().values():
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            continue
        if any(_TAKES_A_FUNCTION.search(str(parameter.annotation)) for parameter in parameters):
            taking.add(function.__qualname__)
    assert taking - covered - set(NOT_A_USERS) == set()
    assert set(NOT_A_USERS) <= taking


def fails(*_: Any) -> Any:
    raise KeyError("secret")


def stops(*_: Any) -> Any:
    raise StopIteration


@pytest.mark.parametrize("form", [_sync, _async])
async def test_an_error_is_named_with_its_type_and_line(form: Form) -> None:
    score = await Rewards([NamedReward(form(fails), name="mine")]).score(DONE)
    line = inspect.getsourcelines(fails)[1] + 1
    (failure,) = score.failures
    assert failure.owner is Owner.REWARD
    assert f"Reward mine failed: KeyError at test_user_functions.py, line {line}" in failure.message
    assert "secret" not in failure.message


async def test_an_agents_error_is_the_agents_and_a_games_the_environments() -> None:
    agent = SimpleNamespace(get_action=fails)
    result = await run_trial(Count(_sync), [{}], agent)
    (failure,) = result.trials[0].final.failures
    assert failure.owner is Owner.AGENT
    assert "The agent failed: KeyError at test_user_functions.py" in failure.message
    game = Count(_sync)
    game.play = fails
    (failure,) = (await step(chat(Play(game)), "1")).failures
    assert failure.owner is Owner.ENVIRONMENT
    assert "KeyError at test_user_functions.py" in failure.message


async def test_an_error_that_a_future_cannot_hold_keeps_its_line() -> None:
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        await call(stops)
    assert "at test_user_functions.py, line" in raised_at(caught.value)


async def test_a_function_that_hangs_is_left_behind_after_its_time() -> None:
    released = asyncio.Event()
    with pytest.raises(TimeoutError):
        await call(released.wait, timeout_s=0.01)


def test_an_error_without_a_line_of_the_users_is_its_type() -> None:
    assert raised_at(ValueError("secret")) == "ValueError"


def test_an_async_function_is_called_where_nobody_can_await() -> None:
    assert call_now(_async(double), 2) == 4
