"""Rows 54 and 61 to 66 of the features table (transforms), each through every door.

Row 58 is in the interpreter's tests, 59 in test_environment_mcp.
"""

from __future__ import annotations

import pytest
from dialoop.chat import ToolCall
from dialoop.environments import (
    AddThinkingPrompt,
    AnswerTagReward,
    ArithmeticTasks,
    ChatEnv,
    DataLoadingPrimer,
    EndOnTag,
    Given,
    KLReward,
    NativeCalls,
    PolicyVersions,
    PolicyVersionStamp,
    RowTasks,
    StepCounter,
    TaskChoice,
    TemplateTransform,
    Text,
    TokenizeTransform,
    Tokens,
    ToolUse,
    Transform,
    dataset_chat_env,
)
from dialoop.templates.chat_template import ChatTemplate
from dialoop.testing import byte_tokenizer

from tests.support.environment_doors import DOORS, at, open_session, play, say, texts

TASKS = ArithmeticTasks()
KEY = TASKS.keys("train")[0]
TASK = {"split": "train", "task_key": KEY}
ROWS = [{"text": f"What is {n}+1?", "answer": str(n + 1), "source": "rows"} for n in range(3)]
BYTES = byte_tokenizer()

doors = pytest.mark.parametrize("door", DOORS)


def blank(*transforms: Transform, **options) -> ChatEnv:
    return ChatEnv(name="blank", transforms=transforms, **options)


def add(left: int, right: int) -> int:
    """Add two numbers."""
    return left + right


@doors
async def test_61_data_loading_primer_gives_groups_an_id_that_no_text_decides(door):
    same = [{"query": "same"}, {"query": "same"}]
    primer = DataLoadingPrimer(RowTasks(same), repeats=2)
    async with at(door, blank(primer)) as client:
        await client.create_session("s", "blank")
        openings = [await client.reset("s", episode=n) for n in range(1, 6)]
        groups = [opening.info["group_id"] for opening in openings]
        assert groups[0] == groups[1]
        assert groups[2] == groups[3]
        assert len(set(groups)) == 3


@doors
async def test_61_a_group_of_sessions_starts_at_one_task(door):
    environment = dataset_chat_env(ROWS, shuffle=False, max_steps=1)
    async with at(door, environment) as client:
        group = await client.create_group("g", "dataset", num_sessions=3, choice=TaskChoice())
        assert group.session_ids == ("g.0", "g.1", "g.2")
        assert {texts(opening)[0] for opening in group.openings} == {"What is 0+1?"}
        again = await client.create_group("g", "dataset", num_sessions=3, choice=TaskChoice())
        assert again == group
        (outcome,) = await play(client, "x", session="g.2")
        assert outcome.done


@doors
async def test_62_add_thinking_prompt(door):
    unsure = AddThinkingPrompt(lambda episode: episode.step_index == 1, prompt="Wait.")
    environment = blank(EndOnTag(), unsure, AnswerTagReward(), tasks=RowTasks(ROWS))
    async with at(door, environment) as client:
        await open_session(client, "blank", split="train", task_key="0")
        first, last = await play(
            client, "<answer>9</answer> no <answer>2</answer><|im_end|>", "<answer>1</answer>"
        )
        assert texts(first)[-1] == "<answer>9</answer> no\nWait."
        assert not first.done
        assert first.rewards == ()
        assert last.done
        assert last.rewards[0].value == 1.0


@doors
async def test_63_policy_version(door):
    versions = PolicyVersions(clock=lambda: 5.0)
    async with at(door, blank(PolicyVersionStamp(versions), tasks=TASKS)) as client:
        opening = await open_session(client, "blank", **TASK)
        assert opening.info["policy_version"] == "0"
        versions.advance()
        (outcome,) = await play(client, "x")
        assert outcome.info["policy_version"] == "1"
        assert [change.version for change in versions.history] == ["0", "1"]


@doors
async def test_64_step_counter_counts_per_session(door):
    async with at(door, blank(StepCounter(2), tasks=TASKS)) as client:
        await open_session(client, "blank", "a", **TASK)
        await open_session(client, "blank", "b", **TASK)
        first, second = await play(client, "x", "y", session="a")
        assert [o.info["step_count"] for o in (first, second)] == ["1", "2"]
        assert (first.truncated, second.truncated) == (False, True)
        (other,) = await play(client, "x", session="b")
        assert other.info["step_count"] == "1"


@doors
async def test_65_and_66_template_and_tokenizer_show_the_prompt_beside_the_messages(door):
    shown = (TemplateTransform(ChatTemplate.of(BYTES)), TokenizeTransform(BYTES))
    async with at(door, blank(*shown, tasks=TASKS)) as client:
        opening = await open_session(client, "blank", **TASK)
        text = f"<|im_start|>user\n{KEY}<|im_end|>\n<|im_start|>assistant\n"
        assert opening.text == Text(prompt=text)
        assert BYTES.decode(opening.tokens.prompt) == text
        assert texts(opening) == [KEY]
        (outcome,) = await play(client, "x")
        assert outcome.text.prompt.startswith(text + "x")


@doors
async def test_native_tool_calls_are_answered_by_id(door):
    use = ToolUse([add], syntax=NativeCalls())
    async with at(door, blank(use, tasks=TASKS)) as client:
        await open_session(client, "blank", **TASK)
        calls = (
            ToolCall(id="1", name="add", arguments_json='{"left": 3, "right": 4}'),
            ToolCall(id="2", name="add", arguments_json='{"left": 3}'),
            ToolCall(id="3", name="nope", arguments_json="{}"),
        )
        (outcome,) = await play(client, say("", tool_calls=calls))
        replies = [(m.tool_call_id, m.text) for m in outcome.history.prompt[-3:]]
        assert replies == [
            ("1", "7"),
            ("2", "Tool error: missing argument right."),
            ("3", "Tool error: unknown tool nope."),
        ]
        assert not outcome.failures
        assert outcome.num_tool_calls == 2


@doors
async def test_a_kl_reward_has_one_number_per_token(door):
    async def policy(rows):
        return [[-0.5] * (len(row) - 1) for row in rows]

    async def reference(rows):
        return [[-0.75] * (len(row) - 1) for row in rows]

    kl = KLReward(policy=policy, reference=reference, coefficient=2.0)
    async with at(door, blank(kl, input_mode="tokens", tokenizer=BYTES)) as client:
        await open_session(client, "blank", question=Given(query="hi"))
        first, second = await play(client, Tokens(response=(65, 66)), Tokens(response=(67, 68, 69)))
        assert first.rewards[0].per_token == (-0.5, -0.5)
        assert second.rewards[0].per_token == (-0.5,) * 3
        assert second.rewards[0].value == -1.5


@doors
async def test_a_seed_reproduces_an_episode(door):
    thinking = AddThinkingPrompt(lambda episode: True, random_prompt=True, max_times=9)
    async with at(door, blank(thinking, tasks=TASKS)) as client:
        runs = []
        for session, seed in (("a", 1), ("b", 1), ("c", 2), ("d", 3), ("e", 4)):
            await open_session(client, "blank", session, **TASK, seed=seed)
            runs.append(texts((await play(client, *"xyz", session=session))[-1]))
        assert runs[0] == runs[1]
        assert any(run != runs[0] for run in runs[2:])
