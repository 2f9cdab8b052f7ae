"""Tools that a model calls in its own syntax stand in its prompt, in each turn."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dialoop import Dialoop
from dialoop.answers import AnswerForm
from dialoop.chat import History, Message, ToolDefinition, as_history
from dialoop.clients.inference import InferenceClient
from dialoop.clients.retry import RetryPolicy
from dialoop.environments import BlockCalls, ChatEnv, MaxTurns, McpServer, McpTools, NativeCalls
from dialoop.environments import ToolUse as Tools
from dialoop.environments.loading import load_environment
from dialoop.environments.tasks.row_tasks import RowTasks
from dialoop.environments.tools.function_tools import FunctionTool
from dialoop.episode import Sample
from dialoop.errors import InvalidConfig
from dialoop.messages import tool_for_template
from dialoop.rollout import play_group
from dialoop.sequences import ForkCause, PolicyVersion
from dialoop.templates.chat_template import ChatTemplate
from dialoop.testing import ScriptedPolicy, byte_builder, byte_tokenizer
from dialoop.trajectory import Trajectory
from dialoop_learning.model.tiny import CHAT_TEMPLATE, tiny_tokenizer
from dialoop_ops.stack import preflight
from dialoop_ops.stack.template_checks import check_template
from dialoop_services.collector.replicas import Replicas
from dialoop_services.config.job import JobConfig
from dialoop_services.config.tables import EnvironmentSection
from transformers import PreTrainedTokenizerFast

from tests.support.agent_world import TOOL_TEMPLATE, ScriptedEngine, agent_world, call_text
from tests.support.environment_doors import DOORS, at
from tests.support.families import family

ONCE = RetryPolicy(max_attempts=1)
WORDS = "There are tools to show the policy, and the chat template shows none."


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def adding(**options: Any) -> ChatEnv:
    """An environment with one tool; a job file can name it."""
    transforms = (Tools([add], **options), MaxTurns(2))
    return ChatEnv(name="adding", tasks=RowTasks([{"query": "3+4?"}]), transforms=transforms)


def model_dir(path: Path, template: str = TOOL_TEMPLATE) -> Path:
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": template,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


async def play(directory: Path, environment: ChatEnv) -> tuple[Trajectory, list[str]]:
    """Play two turns with a served engine; return the prompts that the engine got, too."""
    engine = ScriptedEngine(directory, [call_text("add", a=3, b=4), "7"])
    async with (
        agent_world(directory, engine) as world,
        Dialoop(environment=environment, inference=InferenceClient(world.channel)) as dialoop,
    ):
        trajectory = await dialoop.play(await dialoop.task(environment.name))
    return trajectory, [world.tokenizer.decode(sampling.prompt_ids) for sampling in engine.log]


async def test_each_turn_has_the_tools_as_transformers_renders_them_and_continues(
    tmp_path: Path,
) -> None:
    directory = model_dir(tmp_path)
    trajectory, (first, second) = await play(directory, adding())
    tools = [tool_for_template(FunctionTool(add).definition)]
    assert first == PreTrainedTokenizerFast.from_pretrained(directory).apply_chat_template(
        [{"role": "user", "content": "3+4?"}],
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert second.startswith(first)
    assert "<tool_response>\n7\n</tool_response>" in second
    (sequence,) = trajectory.sequences
    assert (sequence.fork_cause, trajectory.num_tool_calls) == (ForkCause.NONE, 1)


@pytest.mark.parametrize(
    ("environment", "shows"),
    [
        (adding(), True),
        (adding(syntax=NativeCalls(AnswerForm(calls="xml"))), True),
        (adding(syntax=BlockCalls()), False),
        (adding(syntax=BlockCalls(), tools_in_prompt=True), True),
        (adding(tools_in_prompt=False), False),
        (load_environment(f"{__name__}:adding", tools_in_prompt=False), False),
    ],
)
async def test_only_tools_of_a_models_own_syntax_stand_in_the_prompt_unless_one_says_otherwise(
    environment: ChatEnv, shows: bool
) -> None:
    policy = ScriptedPolicy(["hm", "7"])
    async with Dialoop(environment=environment, inference=policy) as dialoop:
        trajectory = await dialoop.play(await dialoop.task(environment.name))
    prompt = byte_tokenizer().decode(trajectory.sequences[0].token_ids.tolist())
    assert ("Add two numbers." in prompt) is shows


@pytest.mark.parametrize("door", DOORS)
async def test_a_reset_says_the_tools_through_each_door(door: str) -> None:
    async with at(door, adding()) as client:
        await client.create_session("s", "adding")
        (ref,) = (await client.list_tasks("adding", split="train", one_epoch=True)).tasks
        opening = await client.reset("s", episode=1, split="train", task_key=ref.key)
    assert opening.tools == (FunctionTool(add).definition,)


def test_tools_of_mcp_servers_need_a_template_before_anybody_knows_them() -> None:
    server = McpServer(command="nothing")
    native = McpTools({"lab": server}, syntax=NativeCalls()).traits
    assert (native.needs_tool_template, native.prompt_tools) == (True, ())
    assert not McpTools({"lab": server}).traits.needs_tool_template


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE,
        CHAT_TEMPLATE + "{# tools are not shown #}",
        "{% if tools %}{% endif %}" + CHAT_TEMPLATE,
    ],
)
async def test_a_template_that_shows_no_tools_is_refused_before_the_run_and_by_the_service(
    template: str, tmp_path: Path
) -> None:
    trajectory, prompts = await play(model_dir(tmp_path, template), adding())
    (failure,) = trajectory.failures
    assert (failure.reason, prompts) == ("TOOLS_UNSUPPORTED", [])
    assert WORDS in failure.message
    config = JobConfig(environment=EnvironmentSection(use=f"{__name__}:adding"))
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"directory": str(tmp_path)})}
    )
    with pytest.raises(InvalidConfig, match=WORDS) as caught:
        check_template(config, [adding()])
    assert caught.value.reason == "TOOLS_UNSUPPORTED"
    model_dir(tmp_path)
    longest = config.inference.model_copy(update={"max_model_len": 1024})
    check_template(config.model_copy(update={"inference": longest}), [adding()])


def test_config_check_refuses_the_tiny_models_template_unless_the_job_leaves_tools_out() -> None:
    section = {"use": f"{__name__}:adding", "heldout_split": "train"}
    fields: dict[str, Any] = {"engine": "transformers", "store": "memory"}
    (mistake,) = preflight.mistakes_in(JobConfig.model_validate(fields | {"environment": section}))
    assert (mistake.reason, mistake.message) == ("TOOLS_UNSUPPORTED", f"adding: {WORDS}")
    assert "tools_in_prompt = false" in mistake.remedy
    section["tools_in_prompt"] = False
    assert not preflight.mistakes_in(JobConfig.model_validate(fields | {"environment": section}))


async def test_a_policy_that_takes_no_tools_is_told_so_where_there_are_some() -> None:
    class Plain(ScriptedPolicy):
        async def generate(  # type: ignore[override]  # as policies were written before
            self,
            history: History,
            *,
            context: Any,
            num_context_messages: int,
            sampling: Any,
            turn: int,
        ) -> tuple[Sample, ...]:
            return await super().generate(history, sampling=sampling, turn=turn)

    shown = adding()
    for environment, reasons in (
        (shown, ["TOOLS_UNSUPPORTED"]),
        (replace(shown, tools_in_prompt=False), []),
    ):
        async with Dialoop(environment=environment, inference=Plain(["7", "7"])) as dialoop:
            trajectory = await dialoop.play(await dialoop.task("adding"))
        assert [failure.reason for failure in trajectory.failures] == reasons


class Asked:
    """A policy that keeps what it was asked."""

    def __init__(self) -> None:
        self.questions: list[tuple[int, tuple[ToolDefinition, ...]]] = []
        self._policy = ScriptedPolicy(lambda history: "7")

    async def generate(
        self, history: History, *, num_samples: int = 1, tools: Any = (), **question: Any
    ) -> tuple[Sample, ...]:
        self.questions.append((num_samples, tuple(tools)))
        return await self._policy.generate(
            history, num_samples=num_samples, tools=tools, **question
        )


async def test_a_groups_first_turn_is_one_request_with_the_tools() -> None:
    policy, environment = Asked(), adding()
    async with Dialoop(environment=environment, inference=policy) as dialoop:
        task = await dialoop.task("adding", num_trajectories=3)
        group = await play_group(
            task,
            sessions=dialoop.environment,
            policy=Replicas([policy], ONCE).of_group("g", 3),
            group_id="g",
        )
    assert not any(trajectory.failures for trajectory in group.trajectories)
    offered = (FunctionTool(add).definition,)
    assert policy.questions == [(3, offered), *[(1, offered)] * 3]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING):
        yield caplog


async def test_members_with_other_tools_ask_for_themselves_and_the_log_says_so(
    logged: pytest.LogCaptureFixture,
) -> None:
    policy, other = Asked(), ToolDefinition(name="other")
    shared = Replicas([policy], ONCE).of_group("g", 2)
    await asyncio.gather(
        *(shared.generate(as_history("q"), tools=tools) for tools in ((), (other,)))
    )
    assert sorted(policy.questions) == [(1, ()), (1, (other,))]
    assert "different tools" in logged.text


def test_a_conversation_whose_tools_change_forks() -> None:
    builder, question = byte_builder(), as_history("3+4?")
    tools = {"tools": [FunctionTool(add).definition]}
    prompt = builder.prompt(question, options=tools)
    ids = builder.tokenizer.encode("7").ids
    version = PolicyVersion(lineage="main", number=1)
    answer = builder.answer(prompt, ids, versions=[(1, version)])
    longer = question.append(answer.message).append(as_history("more?")[0])
    context = {"context": answer.appended, "num_context_messages": 2}
    assert builder.prompt(longer, options=tools, **context).fork_cause is ForkCause.NONE
    assert builder.prompt(longer, **context).fork_cause is ForkCause.HISTORY_REWRITTEN


def test_demonstrations_have_the_tools_too() -> None:
    builder = byte_builder()
    tools = [FunctionTool(add).definition]
    shown = as_history("3+4?").extend(History.from_chats([{"role": "assistant", "content": "7"}]))
    ids = builder.demonstration(shown, options={"tools": tools}).token_ids.tolist()
    template = ChatTemplate.of(builder.tokenizer)
    text = template.render(shown, tools=tools, add_generation_prompt=False).rstrip("\n")
    assert builder.tokenizer.decode(ids) == text


def test_an_environment_that_reads_calls_otherwise_than_the_model_writes_them_is_refused() -> None:
    config = JobConfig(environment=EnvironmentSection(use=f"{__name__}:adding"))
    directory = str(family("llama3_1").directory)
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"directory": directory}),
            "inference": config.inference.model_copy(update={"max_model_len": 1024}),
        }
    )
    with pytest.raises(InvalidConfig, match=r"form 'hermes'.*form 'json'"):
        check_template(config, [adding(syntax=NativeCalls(AnswerForm(calls="hermes")))])
    check_template(config, [adding(syntax=NativeCalls(AnswerForm(calls="json")))])
    check_template(config, [adding()])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_1", '{"name": "add", "parameters": {"a": 3, "b": 4}}'),
        ("qwen3", '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'),
        ("lfm2_v2", "<|tool_call_start|>[add(a=3, b=4)]<|tool_call_end|>"),
    ],
)
async def test_tools_without_a_form_read_calls_as_the_model_writes_them(
    name: str, text: str
) -> None:
    loaded = load_environment(f"{__name__}:adding", model_dir=family(name).directory)
    assert isinstance(loaded, ChatEnv)
    assert loaded.traits.call_grammar == family(name).grammar
    async with Dialoop(environment=loaded, inference=ScriptedPolicy([text, "7"])) as dialoop:
        trajectory = await dialoop.play(await dialoop.task(loaded.name))
    assert trajectory.num_tool_calls == 1
    assert [message.text for message in trajectory.history] == ["3+4?", text, "7", "7"]


def test_a_call_that_spells_the_end_of_a_thought_is_a_call() -> None:
    body = '{"name": "write", "arguments": {"text": "see </think> here"}}'
    answer = Message(role="assistant", content=f"<tool_call>\n{body}\n</tool_call>")
    (call,) = NativeCalls().calls(answer)
    assert call.arguments == {"text": "see </think> here"}
    begun = Message(
        role="assistant", content=f"hm <tool_call>\n{{}}\n</tool_call></think>{answer.text}"
    )
    assert NativeCalls().calls(begun) == [call]
