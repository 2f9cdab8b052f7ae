"""The rows of the features table that are the environment's, each through every door.

Rows 38 to 48 (ChatEnv); transforms are in test_environment_transform_rows.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from dialoop.chat import ChatHistory, History, Message
from dialoop.clients.environment import StepItem
from dialoop.environments import (
    AddThinkingPrompt,
    AnswerTagReward,
    ArithmeticTasks,
    ChatEnv,
    EndOnTag,
    EndOnText,
    EndWhenIncomplete,
    ExactResult,
    Given,
    InputMode,
    MaxLength,
    MaxTurns,
    NamedReward,
    OneTurn,
    Rewards,
    RewardShape,
    RowTasks,
    StepCounter,
    TaskChoice,
    Text,
    Tokens,
    ToolUse,
    Traits,
    Transform,
    arithmetic,
    dataset_chat_env,
    shape_rewards,
)
from dialoop.testing import byte_tokenizer
from dialoop.trajectory import DoneReason, Owner

from tests.support.environment_doors import (
    DOORS,
    at,
    open_session,
    play,
    reason_of,
    roles,
    say,
    texts,
)

TASKS = ArithmeticTasks()
KEY = TASKS.keys("train")[0]
TRUTH = TASKS.get("train", KEY).answer
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
async def test_38_chat_env_is_a_blank_canvas_in_history_mode(door):
    environment = blank(system_prompt="Be brief.", tasks=TASKS, template_kwargs={"x": 1})
    async with at(door, environment) as client:
        opening = await open_session(client, "blank", **TASK)
        assert roles(opening) == ["system", "user"]
        outcomes = await play(client, "one", "two")
        assert roles(outcomes[-1]) == ["system", "user", "assistant", "assistant"]
        assert not any(o.done or o.rewards or o.failures for o in outcomes)


@doors
async def test_38_chat_env_in_text_mode(door):
    environment = blank(input_mode="text", tokenizer=BYTES)
    async with at(door, environment) as client:
        opening = await open_session(client, "blank", question=Given(query="hi"))
        prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert opening.text == Text(prompt=prompt)
        assert opening.history == ChatHistory()
        (first,) = await play(client, Text(response="hello<|im_end|>"))
        assert first.text == Text(prompt=prompt + "hello<|im_end|>")
        full = Text(full=first.text.prompt + "again")
        second = await client.step("s", episode=1, step_index=1, history=full)
        assert second.text.prompt == prompt + "hello<|im_end|>again"
        wrong = Text(full="other")
        refused = client.step("s", episode=1, step_index=2, history=wrong)
        assert await reason_of(refused) == "HISTORY_REWRITTEN"
        refused = client.step("s", episode=1, step_index=2, history=say("x"))
        assert await reason_of(refused) == "WRONG_MODE"


@doors
async def test_38_chat_env_in_tokens_mode(door):
    environment = blank(EndOnTag(), input_mode="tokens", tokenizer=BYTES)
    async with at(door, environment) as client:
        opening = await open_session(client, "blank", question=Given(query="hi"))
        prompt = opening.tokens.prompt
        assert BYTES.decode(prompt) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        ids = (*BYTES.encode("é, <answer>3</answer>").ids, *BYTES.end_of_turn_ids[:1])
        # Two bytes of one letter in two steps: no text could carry them.
        (first, last) = await play(client, Tokens(response=ids[:1]), Tokens(response=ids[1:]))
        assert first.tokens.prompt == prompt + ids[:1]
        assert last.tokens.prompt == prompt + ids
        assert last.done_reason is DoneReason.CONTENT
        other = await open_session(client, "blank", "t", question=Given(query="hi"))
        refused = client.step("t", episode=1, step_index=0, history=Tokens(response=(9999,)))
        assert await reason_of(refused) == "TOKEN_OUT_OF_RANGE"
        assert other.tokens == opening.tokens


class Hint(Transform):
    """Speaks after each answer."""

    async def step(self, outcome):
        return outcome.append(Message(role="user", content="more"))


@doors
@pytest.mark.parametrize("mode", ["text", "tokens"])
async def test_38_what_the_environment_says_is_added_to_text_and_tokens(door, mode):
    async with at(door, blank(Hint(), input_mode=mode, tokenizer=BYTES)) as client:
        await open_session(client, "blank", question=Given(query="hi"))
        text = "yes<|im_end|>"
        answer = Text(response=text)
        if mode == "tokens":
            answer = Tokens(response=(*BYTES.encode("yes").ids, *BYTES.end_of_turn_ids[:1]))
        (outcome,) = await play(client, answer)
        shown = outcome.text.prompt if mode == "text" else BYTES.decode(outcome.tokens.prompt)
        assert shown == (
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
            "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
        )


@doors
async def test_39_reset_semantics(door):
    environment = blank(system_prompt="S", data_key="question")
    async with at(door, environment) as client:
        row = Given(data={"question": "q", "answer": "7", "id": "r-1"})
        opening = await open_session(client, "blank", question=row)
        assert texts(opening) == ["S", "q"]
        assert opening.info == {"question": "q", "answer": "7", "id": "r-1"}
        assert opening.history.response is None
        assert opening.history.full is None
        ready = History.from_chats(
            [{"role": "system", "content": "mine"}, {"role": "user", "content": "u"}]
        )
        second = await client.reset("s", episode=2, question=Given(messages=ready))
        assert texts(second) == ["mine", "u"]
        refused = client.reset("s", episode=3)
        assert await reason_of(refused) == "DATA_MISSING"
        refused = client.reset("s", episode=3, question=Given(data={"q": "x"}))
        assert await reason_of(refused) == "DATA_KEY_MISSING"
        refused = client.reset("s", episode=3, task_key="k", question=Given(query="x"))
        assert await reason_of(refused) == "TASK_AND_QUERY"


@doors
async def test_40_step_semantics(door):
    async with at(door, blank(StepCounter(2), tasks=TASKS)) as client:
        opening = await open_session(client, "blank", **TASK)
        full = opening.history.respond(Message(role="assistant", content="a"))
        first = await client.step("s", episode=1, step_index=0, history=full)
        assert first.history.prompt == full.full
        assert first.history.full is None
        assert (await client.step("s", episode=1, step_index=0, history=full)).replayed
        neither = client.step("s", episode=1, step_index=1, history=opening.history)
        assert await reason_of(neither) == "FULL_MISSING"
        forged = ChatHistory(full=History((Message(role="assistant", content="a"),)))
        refused = client.step("s", episode=1, step_index=1, history=forged)
        assert await reason_of(refused) == "HISTORY_REWRITTEN"
        await client.step("s", episode=1, step_index=1, history=say("b"))
        after = client.step("s", episode=1, step_index=2, history=say("c"))
        assert await reason_of(after) == "EPISODE_DONE"
        gap = client.step("s", episode=3, step_index=0, history=say("c"))
        assert await reason_of(gap) == "STEP_GAP"


@doors
async def test_40_a_step_and_the_next_reset_in_one_call(door):
    async with at(door, dataset_chat_env(ROWS, shuffle=False, max_steps=1)) as client:
        opening = await open_session(client, "dataset")
        item = StepItem(session_id="s", episode=1, step_index=0, history=say("x"))
        outcome, following = await client.step_and_reset(item, next_split="", next_task_key="")
        assert outcome.done
        assert texts(opening) == ["What is 0+1?"]
        assert texts(following) == ["What is 1+1?"]


@doors
async def test_40_a_step_without_a_session(door):
    async with at(door, arithmetic(), blank(AddThinkingPrompt(bool), tasks=TASKS)) as client:
        choice = TaskChoice(**TASK)
        prompt = History((Message(role="user", content=KEY),))
        call = f"<request><Calculator>{KEY}<call>"
        first = await client.step_history(
            "arithmetic", choice, ChatHistory(prompt=prompt).respond(*say(call).response)
        )
        assert texts(first)[-1] == f"{TRUTH}<response>"
        last = Message(role="assistant", content=f"Result={TRUTH}<submit>")
        full = ChatHistory(full=first.history.prompt.append(last))
        second = await client.step_history("arithmetic", choice, full)
        assert second.done
        assert second.rewards[0].success
        refused = client.step_history("arithmetic", choice, ChatHistory(prompt=prompt))
        assert await reason_of(refused) == "FULL_MISSING"
        other = ChatHistory(full=History((Message(role="user", content="1+1"), last)))
        refused = client.step_history("arithmetic", choice, other)
        assert await reason_of(refused) == "HISTORY_REWRITTEN"
        needs = ChatHistory(prompt=prompt).respond(last)
        assert await reason_of(client.step_history("blank", choice, needs)) == "NEEDS_SESSION"


@doors
@pytest.mark.parametrize(
    ("transform", "answer", "reason", "terminated"),
    [
        (EndWhenIncomplete(), say("cut", is_complete=False), DoneReason.INCOMPLETE, False),
        (EndOnTag(), say("so <answer>7</answer>"), DoneReason.CONTENT, True),
        (EndOnText("<submit>"), say("7<submit>"), DoneReason.SUBMITTED, True),
        (MaxTurns(1), say("x"), DoneReason.MAX_TURNS, False),
        (OneTurn(), say("x"), DoneReason.CONTENT, True),
        (StepCounter(1), say("x"), DoneReason.MAX_TURNS, False),
        (MaxLength(10), say("a long answer"), DoneReason.MAX_LENGTH, False),
        (ToolUse([add]), say("no call"), DoneReason.NOT_DONE, False),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_41_done_state_management(door, transform, answer, reason, terminated):
    async with at(door, blank(transform, tasks=TASKS)) as client:
        await open_session(client, "blank", **TASK)
        (outcome,) = await play(client, answer)
        assert outcome.done_reason is reason
        assert outcome.terminated is terminated
        assert outcome.truncated is (outcome.done and not terminated)


class PerToken(Transform):
    """A dense reward of the caller's tokens."""

    @property
    def traits(self) -> Traits:
        return Traits(reward_names=("dense",), reward_shape=RewardShape.DENSE)

    async def score(self, episode):
        from dialoop.environments.episode import Score
        from dialoop.trajectory import Reward

        return Score(rewards=(Reward.dense("dense", (0.5, -0.25)),))


@doors
async def test_42_reward_shapes_sparse_per_turn_and_dense(door):
    turns = Rewards([NamedReward(lambda e: 0.5, name="half", weight=2.0)], every_turn=True)
    async with at(door, blank(turns, PerToken(), tasks=TASKS)) as client:
        await open_session(client, "blank", **TASK)
        half, dense = (await play(client, "x"))[0].rewards
        assert dense.per_token == (0.5, -0.25)
        assert dense.value == 0.25
        assert shape_rewards([half], RewardShape.SPARSE).shape == (1, 1)
        both = shape_rewards([half, dense], RewardShape.DENSE, num_tokens=2)
        assert np.array_equal(both, np.array([[0.5], [0.75]], dtype=np.float32))


@doors
async def test_43_reward_aggregation_by_weights(door):
    rewards = Rewards(
        [ExactResult(weight=2.0), NamedReward(lambda e: 1.0, name="format", weight=0.1)]
    )
    environment = blank(EndOnText(), rewards, tasks=TASKS)
    async with at(door, environment) as client:
        await open_session(client, "blank", **TASK)
        (outcome,) = await play(client, f"Result={TRUTH}<submit>")
        rewards = {r.name: (r.value, round(r.weight, 6)) for r in outcome.rewards}
        assert rewards == {"result": (1.0, 2.0), "format": (1.0, 0.1)}
        total = shape_rewards(outcome.rewards, RewardShape.SPARSE)[0, 0]
        assert total == pytest.approx(2.1)


@doors
async def test_44_reward_and_observation_specs(door):
    tokens = ChatEnv(name="tokens", input_mode="tokens", tokenizer=BYTES)
    tools = ChatEnv(name="tools", tasks=TASKS, transforms=(ToolUse([add]), Rewards([brief])))
    async with at(door, tools, tokens) as client:
        spec = (await client.get_environment("tools")).spec
        assert spec.input_mode is InputMode.HISTORY
        assert [f.name for f in spec.observation] == ["history.prompt", "terminated", "truncated"]
        assert [f.name for f in spec.action] == ["history.response", "history.full"]
        assert [(f.name, f.dtype, f.shape) for f in spec.reward] == [("brief", "float32", (1, 1))]
        assert spec.is_stateless
        (tool,) = spec.tool_definitions
        assert (tool.name, tool.description) == ("add", "Add two numbers.")
        assert json.loads(tool.parameters_json)["properties"]["left"] == {"type": "integer"}
        spec = (await client.get_environment("tokens")).spec
        assert spec.input_mode is InputMode.TOKENS
        assert spec.observation[0].shape == (-1,)
        assert not spec.is_stateless


def brief(episode) -> float:
    return 1 / (1 + len(episode.answer_text))


@doors
async def test_45_rewards_of_a_batch_of_sessions(door):
    environment = blank(EndOnTag(), AnswerTagReward(), tasks=RowTasks(ROWS))
    async with at(door, environment) as client:
        for number in range(3):
            await open_session(client, "blank", f"s{number}", split="train", task_key=str(number))
        items = [
            StepItem(
                session_id=f"s{number}",
                episode=1,
                step_index=0,
                history=say(f"<answer>{text}</answer>"),
            )
            for number, text in enumerate(("1", "2.0", "x"))
        ]
        outcomes = await client.batch_step(items)
        assert [o.rewards[0].value for o in outcomes] == pytest.approx([1.0, 1.0, 0.1])


@doors
async def test_46_rewards_can_be_computed_later_and_done_is_decided_at_once(door):
    from dialoop.rollout import play as rollout
    from dialoop.testing import ScriptedPolicy
    from dialoop.trajectory import Task

    environment = blank(EndOnTag(), AnswerTagReward(), tasks=RowTasks(ROWS))
    async with at(door, environment) as client:
        task = Task(task_id="t", environment="blank", split="train", key="0")
        policy = ScriptedPolicy(["<answer>1</answer>"])
        trajectory = await rollout(task, sessions=client, policy=policy)
        assert trajectory.done_reason is DoneReason.CONTENT
        (later,) = await client.score(trajectory, split="train")
        assert later.rewards == trajectory.turns[0].rewards


@doors
async def test_47_a_parse_failure_is_no_crash(door):
    environment = blank(EndOnTag(), AnswerTagReward(), MaxTurns(2), tasks=RowTasks(ROWS))
    async with at(door, environment) as client:
        await open_session(client, "blank", split="train", task_key="0")
        open_tag, last = await play(client, "<answer>1", "<think></answer><answer")
        assert not open_tag.done
        assert last.rewards[0].value == 0.0
        assert not last.failures


@doors
async def test_47_a_failing_or_infinite_reward_is_absent_and_owned(door):
    functions = [NamedReward(lambda e: float("nan"), name="nan"), NamedReward(_boom, name="boom")]
    environment = blank(MaxTurns(1), Rewards(functions), tasks=TASKS)
    async with at(door, environment) as client:
        await open_session(client, "blank", **TASK)
        (outcome,) = await play(client, "x")
        assert outcome.rewards == ()
        assert [f.owner for f in outcome.failures] == [Owner.REWARD, Owner.REWARD]
        assert "secret" not in str(outcome.failures)


def _boom(episode) -> float:
    raise RuntimeError("secret")


@doors
async def test_48_dataset_chat_env(door):
    environment = dataset_chat_env(
        ROWS,
        seed=5,
        repeats=2,
        transforms=(EndOnTag(), AnswerTagReward()),
        max_steps=1,
        system_prompt="S",
    )
    async with at(door, environment) as client:
        info = await client.get_environment("dataset")
        assert (info.splits[0].name, info.splits[0].num_tasks) == ("train", 3)
        await client.create_session("s", "dataset")
        seen = []
        for episode in range(1, 9):
            opening = await client.reset("s", episode=episode)
            seen.append((opening.info["task_key"], opening.info["epoch"], opening.info["repeat"]))
            assert opening.info["source"] == "rows"
        assert [repeat for *_, repeat in seen] == ["0", "1"] * 4
        assert {key for key, *_ in seen[:6]} == {"0", "1", "2"}
        assert seen[6][1] == "1"
        again = await client.reset("s", episode=8)  # a retry takes no further task
        assert again.info["task_key"] == seen[7][0]
