"""An episode of two calls as an environment, a recorded client and a configured agent play it.

The policy writes each family's own calls, as its template does. All three ways give the same
tokens, masks, owners and reward, and its last prompt is the one that transformers renders.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from dialoop import Dialoop
from dialoop.agents import AgentConnection, AgentHost, AgentTask
from dialoop.answers import AnswerForm
from dialoop.chat import History, Message
from dialoop.clients.inference import InferenceClient
from dialoop.environments import ChatEnv, NativeCalls, Rewards, ToolUse
from dialoop.environments.episode import Episode
from dialoop.environments.tasks.row_tasks import RowTasks
from dialoop.environments.tools.function_tools import FunctionTool
from dialoop.environments.tools.tool_use import EndWithoutCalls
from dialoop.local.client import LocalEnvironmentClient
from dialoop.messages import ToolCall, tool_for_template
from dialoop.sequences import ForkCause
from dialoop.templates.chat_template import ChatTemplate
from dialoop.tokens.builder import TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.trajectory import Reward, SamplingParams, Task, Trajectory
from dialoop_services.collector.__main__ import task_players
from dialoop_services.collector.settings import CollectorSettings
from transformers import PreTrainedTokenizerFast

from tests.support.agent_world import MODEL, AgentWorld, ScriptedEngine, agent_world, sampled_ids
from tests.support.families import Family, family
from tests.support.families.conversations import chats_for

QUESTION = "What is 3+4, times 5?"
TASK = Task(task_id="t", environment="calculator", split="train", key="0")
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=120)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


TOOLS = [tool_for_template(FunctionTool(function).definition) for function in (add, multiply)]


def is_right(episode: Episode) -> bool:
    return "35." in episode.answer_text


def calculator(known: Family, **options: Any) -> ChatEnv:
    template = ChatTemplate.of(Tokenizer.from_directory(known.directory))
    form = AnswerForm(reasoning=template.profile.reasoning, calls=known.grammar)
    syntax = NativeCalls(form)
    transforms = (ToolUse([add, multiply], syntax=syntax), EndWithoutCalls(syntax))
    tasks = RowTasks([{"query": QUESTION}])
    return ChatEnv(
        name="calculator", tasks=tasks, transforms=(*transforms, Rewards([is_right])), **options
    )


def episode(*, thinks: bool) -> History:
    """The conversation that the policy will have written."""

    def answer(thought: str, content: str = "", *calls: ToolCall) -> Message:
        thought = thought if thinks else ""
        return Message(role="assistant", reasoning=thought, content=content, tool_calls=calls)

    ids = ("call00001", "call00002")
    sums = ToolCall(id=ids[0], name="add", arguments_json='{"a": 3, "b": 4}')
    product = ToolCall(id=ids[1], name="multiply", arguments_json='{"a": 7, "b": 5}')
    return History(
        (
            Message(role="user", content=QUESTION),
            answer("First the sum.", "", sums),
            Message(role="tool", content="7", tool_call_id=ids[0], name="add"),
            answer("Now the product.", "", product),
            Message(role="tool", content="35", tool_call_id=ids[1], name="multiply"),
            answer("That is all.", "It is 35."),
        )
    )


def written(known: Family, history: History, tools: Iterable[Any] = TOOLS) -> list[Any]:
    """The ids of each answer, as the template writes it behind its prompt."""
    tokenizer = Tokenizer.from_directory(known.directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    options = {"tools": tuple(tools)} if tools else {}
    answers = []
    for index in (1, 3, 5):
        shown = history[: index + 1]
        taught = builder.demonstrations(shown, options=options, untaught=range(index))[-1]
        answers.append(tuple(taught.token_ids[taught.segments[-1].start :].tolist()))
    return answers


async def converse(client: openai.AsyncOpenAI, messages: list[Any]) -> str:
    """What an agent does that knows OpenAI's API alone: call, answer, until there are no calls."""
    while True:
        completion = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS
        )
        answer = completion.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            return answer.content or ""
        for call in answer.tool_calls:
            function = {"add": add, "multiply": multiply}[call.function.name]
            value = function(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(value)})


async def run(task: AgentTask, connection: AgentConnection) -> None:
    """The agent of the config; its environment rewards it."""
    async with openai.AsyncOpenAI(
        base_url=connection.base_url, api_key=connection.api_key, max_retries=0
    ) as client:
        await converse(client, task.prompt.to_chats())


async def by_environment(world: AgentWorld, environment: ChatEnv) -> Trajectory:
    policy = InferenceClient(world.channel)
    async with Dialoop(environment=environment, inference=policy) as dialoop:
        return await dialoop.play(await dialoop.task("calculator", sampling=SAMPLING))


async def by_recording(world: AgentWorld, environment: ChatEnv) -> Trajectory:
    client = await world.start_recording("r", sampling=SAMPLING)
    content = await converse(client, [{"role": "user", "content": QUESTION}])
    reward = Reward(name="is_right", value=float("35." in content))
    return await world.recordings.close("r", rewards=(reward,))


async def by_config(world: AgentWorld, environment: ChatEnv) -> Trajectory:
    sessions = LocalEnvironmentClient(environment)
    settings = CollectorSettings(
        environment={"name": "calculator", "agent": f"{__name__}:run"},
        inference_rest_addresses=[world.url.removeprefix("http://")],
    )
    host = AgentHost(recordings=world.recordings, sessions=sessions, scores=sessions)
    player = task_players(settings, host)["calculator"]
    return await player.play(TASK, policy=None, group_id="g", sampling=SAMPLING)


WAYS = (by_environment, by_recording, by_config)


async def played(known: Family, script: list[Any]) -> list[tuple[Trajectory, ScriptedEngine]]:
    results = []
    for way in WAYS:
        engine = ScriptedEngine(known.directory, list(script), max_model_len=4096)
        async with agent_world(known.directory, engine) as world:
            results.append((await way(world, calculator(known)), engine))
    return results


def record(trajectory: Trajectory) -> Any:
    """What is trained of it."""
    assert not trajectory.failures, trajectory.failures
    sequences = [
        (
            sequence.token_ids.tolist(),
            sequence.response_mask().tolist(),
            [(segment.source, segment.start, segment.length) for segment in sequence.segments],
        )
        for sequence in trajectory.sequences
    ]
    return sequences, trajectory.reward


def showing_tools(known: Family, path: Path) -> Family:
    """DeepSeek-V3.1 with the tools in its system prompt, as servers' templates for it have them."""
    shutil.copytree(known.directory, path)
    system = "{{- bos_token + ns.system }}"
    tools = "{%- for tool in tools or [] %}{{- '\n' + (tool | tojson) }}{%- endfor %}"
    assert system in known.template
    template = known.template.replace(system, system + tools)
    (path / "chat_template.jinja").write_text(template, "utf-8")
    return replace(known, directory=path, template=template)


@pytest.mark.parametrize(
    ("name", "thinks"),
    [
        *(("qwen2_5", False), ("qwen3", True), ("llama3_1", False), ("deepseek_v3_1", False)),
        *(("glm4_5", True), ("gpt_oss", True), ("gpt_oss", False)),
        *(("mistral", False), ("gemma4", True), ("kimi_k2", False)),
    ],
)
async def test_two_calls_are_the_same_episode_however_they_are_played(
    name: str, thinks: bool, tmp_path: Path
) -> None:
    known = family(name)
    if name == "deepseek_v3_1":
        known = showing_tools(known, tmp_path / "model")
    history = episode(thinks=thinks)
    script = written(known, history)
    results = await played(known, script)
    first, *others = (record(trajectory) for trajectory, _ in results)
    assert [first] * len(others) == others
    assert first[1] == 1.0
    trajectory, engine = results[0]
    assert sampled_ids(trajectory) == script
    assert [sequence.fork_cause for sequence in trajectory.sequences] == [ForkCause.NONE]
    theirs = PreTrainedTokenizerFast.from_pretrained(known.directory)
    last = theirs.apply_chat_template(
        chats_for(history[:-1], known.reads),
        tools=TOOLS,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert list(engine.log[-1].prompt_ids) == last


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_1"])
async def test_where_the_template_shows_no_tools_each_way_says_so(name: str) -> None:
    known = family(name)
    for way in WAYS:
        engine = ScriptedEngine(known.directory, [])
        async with agent_world(known.directory, engine) as world:
            if way is by_recording:
                with pytest.raises(openai.BadRequestError, match="the chat template shows none"):
                    await way(world, calculator(known))
                continue
            (failure,) = (await way(world, calculator(known))).failures
        assert engine.log == []
        expected = "TOOLS_UNSUPPORTED" if way is by_environment else "AGENT_FAILED"
        assert failure.reason == expected


async def test_tools_that_the_system_prompt_describes_are_called_without_the_templates_help() -> (
    None
):
    known = family("deepseek_v3_1")
    script = written(known, episode(thinks=False), tools=())
    environment = calculator(known, system_prompt=json.dumps(TOOLS), tools_in_prompt=False)
    engine = ScriptedEngine(known.directory, list(script))
    async with agent_world(known.directory, engine) as world:
        trajectory = await by_environment(world, environment)
    assert record(trajectory)[1] == 1.0
    assert sampled_ids(trajectory) == script
    assert [sequence.fork_cause for sequence in trajectory.sequences] == [ForkCause.NONE]
