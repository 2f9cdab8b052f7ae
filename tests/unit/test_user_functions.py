"""Every public function that takes a user's function takes a sync and an async one."""

from __future__ import annotations

import asyncio
import importlib
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import dialoop
import pytest
from dialoop.agents import AgentConnection, AgentHost, load_agent, play_agent
from dialoop.chat import History, Message
from dialoop.environments import (
    AddThinkingPrompt,
    AnswerTagReward,
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
from dialoop.environments.rewards.rubrics import (
    Gate,
    GroupRelative,
    InOrder,
    Judge,
    WeightedSum,
    each_trajectory,
)
from dialoop.environments.tasks.files import file_tasks
from dialoop.environments.tools.tool_syntaxes import BlockCalls
from dialoop.episode import ContinuedText, Sample
from dialoop.rollout import EpisodePlayer, play, play_group
from dialoop.tasks.ifeval import IfEvalReward, ifeval
from dialoop.templates.registry import DEFAULT_REGISTRY, TemplateRegistry, add_chat_template
from dialoop.testing import InMemoryEnvironment, ScriptedPolicy, byte_tokenizer, group, trajectory
from dialoop.trajectory import SamplingParams, StopReason, Task
from dialoop_extras.browser import BrowserTools
from dialoop_extras.compat import environments as compat_environments
from dialoop_extras.compat import transforms as compat_transforms
from dialoop_extras.compat.collectors import TrajectoryCollector
from dialoop_extras.compat.names import add_chat_template as add_compat_template
from dialoop_extras.compat.names import add_default_template
from dialoop_extras.compat.trials import TrialEnvironment
from dialoop_extras.foreign import torchrl as foreign_torchrl
from dialoop_extras.foreign.openenv import OpenEnvDriver
from dialoop_extras.foreign.torchrl import TorchrlDriver, torchrl_environment
from dialoop_extras.games import Play, game_environment
from dialoop_extras.mlgym import MlgymCommands, MlgymEnv, mlgym
from dialoop_extras.text_environment.environment import TextEnvironment, each
from dialoop_extras.text_environment.playing import play_text
from dialoop_extras.text_environment.setups import TextSetup
from dialoop_extras.trials.agents import DirectOutputAgent, ScriptedAgent
from dialoop_extras.trials.game import Move
from dialoop_extras.trials.playing import play_trial
from dialoop_extras.trials.trial import Action, run_trial
from dialoop_extras.trials.twenty_questions import TwentyQuestions
from dialoop_learning.rl.selection import TopKWindow
from dialoop_ops import jobs
from dialoop_ops.evaluation import EvaluationRecords, EvaluationSpec, evaluate
from dialoop_services.scorer.estimator import Estimator
from dialoop_services.scorer.rewards import GroupReward, call_apart, with_reward

from tests.support.samples.scorer_samples import make_group
from tests.support.samples.scripted_tokens import ScriptedTokens

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
    judge = Judge(base_url="", model="m", ask=form(lambda episode: f"Rate {episode.answer_text}"))
    asked: list[Any] = []
    reply = SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="8"))])
    client = MagicMock()
    client.chat.completions.create = _async(lambda **request: asked.append(request) or reply)
    with patch.object(Judge, "_client") as connected:
        connected.return_value.__aenter__.return_value = client
        assert await judge(DONE) == 0.8
    assert asked[0]["messages"] == [{"role": "user", "content": f"Rate {DONE.answer_text}"}]
    values = GroupRelative(form(lambda group: [0.0, 1.0]))
    assert await values(group(0.0, 1.0)) == [0.0, 1.0]
    assert await each_trajectory(part)(group(0.0)) == [1.0]


async def instructions(form: Form) -> None:
    """`ifeval` and `ifeval_scorer` pass the function on to this reward."""
    check = _async(lambda arguments, *, timeout_s: {"strict": [True], "loose": [True]})
    row = {"instruction_id_list": '["x"]', "kwargs": "[{}]"}
    own: Any = IfEvalReward(aggregator=form(lambda followed: 0.25), check=check)
    score = await own.score(replace(DONE, task=replace(DONE.task, metadata=row)))
    assert score.rewards[0].value == 0.25
    (*_, passed) = compat_environments.ifeval_scorer(aggregate_reward=own.aggregator)
    assert passed.aggregator is own.aggregator


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


async def double_later(number: int) -> int:
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
    function = double if form is _sync else double_later
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
        create=form(lambda recording_id, **options: AgentConnection(base_url="http://here")),
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


async def token_episodes(form: Form) -> None:
    tokens = ScriptedTokens(lambda prompt: "1")
    policy: Any = tokens
    if form is _sync:
        policy = SimpleNamespace(generate=lambda **o: asyncio.run(tokens.generate(**o)))
    parts = {"policy": policy, "tokenizer": BYTES, "sampling": SamplingParams(max_new_tokens=4)}
    trial = await play_trial(TASK, game=Count(form), inputs={}, make_agent=form(agent_of), **parts)
    assert (trial.failures, trial.reward) == ((), 3.0)
    setup = TextSetup(
        name="s", tools={"t": form(str)}, reward=form(lambda texts, **_: [2.0]), tasks=TASKS
    )
    text = await play_text(TASK, setup=setup, data=TASKS.get("train", "0"), **parts)
    assert (text.failures, text.reward) == ((), 2.0)
    environment = game_environment(Count(form), name="e", tasks=TASKS)
    assert (await step(environment, "1", "2")).episode.history[-1].text == "2?"


def agent_of(policy: Any, tokenizer: Any, sampling: Any) -> DirectOutputAgent:
    return DirectOutputAgent(policy, tokenizer, sampling=sampling)


async def policies(form: Form) -> None:
    inner, policy = InMemoryEnvironment(chat(MaxTurns(1), Rewards([one]))), policy_in(form)
    scripted = ScriptedPolicy(form(lambda history: "x"))
    if form is _sync:
        names = ("create_session", "reset", "step", "close_session")
        loop = asyncio.get_running_loop()

        def blocking(name: str) -> Function:
            method = getattr(inner, name)
            return lambda *a, **o: asyncio.run_coroutine_threadsafe(method(*a, **o), loop).result()

        sessions: Any = SimpleNamespace(**{name: blocking(name) for name in names})
    else:
        sessions = inner
    for player in (policy, scripted):
        assert (await play(TASK, sessions=sessions, policy=player)).reward == 1.0
    played = await play_group(TASK, sessions=sessions, policy=policy, group_id="g")
    assert [t.reward for t in played.trajectories] == [1.0, 1.0]


async def evaluations(form: Form) -> None:
    reports: list[tuple[int, int]] = []
    spec = EvaluationSpec(environment="e", policy="p", split="train", num_tasks=1)
    environment = InMemoryEnvironment(chat(MaxTurns(1), Rewards([one])))
    with (
        tempfile.TemporaryDirectory() as folder,
        EvaluationRecords.open(Path(folder), spec) as records,
    ):
        await evaluate(
            spec,
            sessions=environment,
            policy=policy_in(form),
            records=records,
            on_progress=form(lambda ended, total: reports.append((ended, total))),
        )
    assert reports == [(0, 1), (1, 1)]


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


async def names_of_other_libraries(form: Form) -> None:
    """`dialoop_extras.compat`: its callables over the same functions, with their arguments."""
    read = form(lambda text: [Message(role="user", content=text)])
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    registry = TemplateRegistry()
    add_compat_template(registry, "own", source, read)
    assert registry.get("own").parse("hi")[0].text == "hi"
    with patch.object(DEFAULT_REGISTRY, "_entries", {}):
        add_default_template("own", source, read)
        assert DEFAULT_REGISTRY.get("own").parse("hi")[0].text == "hi"
    unsure = compat_transforms.add_thinking_prompt(form(lambda episode: True))
    assert not (await step(chat(MaxTurns(1), unsure), "x")).episode.done
    primer = compat_transforms.data_loading_primer(dataloader_factory=form(lambda: TASKS))
    assert primer.next().task.question == "1+2"
    function = double if form is _sync else double_later
    in_order = partial(compat_transforms.execute_tools_in_order, parser=BlockCalls())
    for tools in (compat_transforms.simple_tool_transform, in_order):
        outcome = await step(
            chat(tools({"double": function})), '<tool>double\n{"number": 2}</tool>'
        )
        assert outcome.episode.history[-1].text.endswith("4")
    agent = SimpleNamespace(get_action=form(lambda messages, state: Action(text="1")))
    trials = TrialEnvironment(Count(form))
    played = await asyncio.to_thread(trials.run_trial, [{}], agent=agent)
    assert played["session_ids"]
    assert trials.result.rewards == [3.0]


def policy_in(form: Form) -> Any:
    """A policy that says "x", whose method is sync or async."""
    answers = ScriptedPolicy(["x"])
    if form is _async:
        return answers
    return SimpleNamespace(generate=lambda *a, **o: asyncio.run(answers.generate(*a, **o)))


async def connections(form: Form) -> None:
    environment = chat(MaxTurns(1), Rewards([one]))
    async with dialoop.Dialoop(environment=environment, inference=policy_in(form)) as connection:
        assert (await connection.play(TASK)).reward == 1.0


async def collectors(form: Form) -> None:
    environment, policy = chat(MaxTurns(1), Rewards([one])), policy_in(form)
    options = {"turns_per_batch": 1, "total_turns": 2}
    batches = [batch async for batch in dialoop.collect(environment, policy, **options)]
    assert [t.reward for batch in batches for t in batch.trajectories] == [1.0, 1.0]
    collector = TrajectoryCollector(
        environment, policy=policy, total_dialog_turns=2, postproc=form(len)
    )
    assert [size async for size in collector] == [1, 1]


@asynccontextmanager
async def two_rows(*_: Any, **__: Any) -> AsyncIterator[Any]:
    async def rows() -> AsyncIterator[dict[str, int]]:
        for train_step in (1, 2):
            yield {"train_step": train_step}

    yield SimpleNamespace(metrics=rows, result=_async(lambda: "ended"))


async def metrics(form: Form) -> None:
    rows: list[Any] = []
    with patch.object(jobs, "Job", two_rows):
        assert await jobs.train_async({}, on_metrics=form(rows.append)) == "ended"
        assert await asyncio.to_thread(jobs.train, {}, on_metrics=form(rows.append)) == "ended"
    assert [row["train_step"] for row in rows] == [1, 2, 1, 2]


async def group_rewards(form: Form) -> None:
    pair = make_group(0.0, 1.0)
    graded = await with_reward(pair, GroupReward(name="g", function=form(lambda group: [1.0, 2.0])))
    assert [t.turns[-1].rewards[-1].value for t in graded.trajectories] == [1.0, 2.0]
    assert await call_apart(form(len), [1, 2], timeout_s=5) == 2
    estimator = Estimator(path="mine:halves", function=form(lambda rewards: [-0.5, 0.5]))
    assert await estimator.estimate(pair, [0.0, 1.0]) == (-0.5, 0.5)


async def windows(form: Form) -> None:
    window = TopKWindow(num_turns=2, k=1, key=form(lambda trajectory: "all"))
    worse, better = make_group(0.0, 1.0).trajectories
    assert (window.add(worse), window.add(better)) == ((), (better,))


CASES: dict[str, tuple[Function, ...]] = {
    "rewards": (Rewards, NamedReward),
    "rubrics": (WeightedSum, Gate, InOrder, GroupRelative, each_trajectory, Judge),
    "instructions": (IfEvalReward, ifeval, compat_environments.ifeval_scorer),
    "kl_reward": (KLReward,),
    "thinking": (AddThinkingPrompt,),
    "answer_tags": (AnswerTagReward,),
    "tools": (ToolCalls, tool_transforms, tool_environment),
    "argument_tools": (ToolUse, FunctionTool),
    "demonstrations": (ChatEnv,),
    "rows": (RowTasks, dataset_chat_env, DataLoadingPrimer),
    "files": (file_tasks,),
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
    "token_episodes": (play_trial, play_text, game_environment),
    "evaluations": (evaluate,),
    "policies": (play, play_group, EpisodePlayer, ScriptedPolicy),
    "parsers": (TemplateRegistry.add_chat_template, add_chat_template),
    "transforms": (Transform,),
    "names_of_other_libraries": (
        add_compat_template,
        add_default_template,
        compat_transforms.add_thinking_prompt,
        compat_transforms.data_loading_primer,
        compat_transforms.simple_tool_transform,
        compat_transforms.execute_tools_in_order,
        TrialEnvironment,
    ),
    "connections": (dialoop.Dialoop,),
    "collectors": (dialoop.collect, TrajectoryCollector),
    "metrics": (jobs.train, jobs.train_async),
    "group_rewards": (GroupReward, Estimator, call_apart),
    "windows": (TopKWindow,),
}


@pytest.mark.parametrize("form", [_sync, _async])
@pytest.mark.parametrize("case", CASES)
async def test_it_takes_a_sync_and_an_async_function(case: str, form: Form) -> None:
    await globals()[case](form)
