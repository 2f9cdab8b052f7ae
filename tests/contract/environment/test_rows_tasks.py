"""Rows 4, 28, 49, 50 and 52 of the features table: turns, modes and the ready-made environments.

Through every door, as the rows in test_environment_features.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dialoop.chat import ChatHistory, Message
from dialoop.environments import (
    ArithmeticTasks,
    ChatEnv,
    Given,
    InputMode,
    StepCounter,
    Text,
    Tokens,
)
from dialoop.episode import ResetResult, StepResult
from dialoop.tasks.gsm8k import gsm8k
from dialoop.tasks.ifeval import ifeval
from dialoop.testing import byte_tokenizer
from dialoop.trajectory import DoneReason

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
TASK = {"split": "train", "task_key": TASKS.keys("train")[0]}
BYTES = byte_tokenizer()

doors = pytest.mark.parametrize("door", DOORS)


@doors
async def test_04_full_must_be_set_and_becomes_the_next_prompt(door):
    async with at(door, ChatEnv(name="blank", tasks=TASKS)) as client:
        opening = await open_session(client, "blank", **TASK)
        prompt = opening.history.require_prompt()
        neither = client.step("s", episode=1, step_index=0, history=ChatHistory(prompt=prompt))
        assert await reason_of(neither) == "FULL_MISSING"
        for index, words in enumerate(("a", "b")):
            full = opening.history.respond(Message(role="assistant", content=words)).full
            history = ChatHistory(full=full)
            opening = await client.step("s", episode=1, step_index=index, history=history)
            assert opening.history.prompt == full
            assert opening.history.response is None
            assert opening.history.full is None
        assert roles(opening) == ["user", "assistant", "assistant"]


ANSWERS = {
    InputMode.HISTORY: say("yes"),
    InputMode.TEXT: Text(response="yes<|im_end|>"),
    InputMode.TOKENS: Tokens(response=(*BYTES.encode("yes").ids, *BYTES.end_of_turn_ids[:1])),
}


def text_of(outcome: ResetResult | StepResult, mode: InputMode) -> str:
    """The prompt of the one view that the mode has, as text."""
    views = {
        InputMode.HISTORY: outcome.history.prompt,
        InputMode.TEXT: outcome.text,
        InputMode.TOKENS: outcome.tokens,
    }
    assert [name for name, view in views.items() if view] == [mode]
    if mode is InputMode.HISTORY:
        messages = outcome.history.require_prompt()
        return "".join(f"<|im_start|>{m.role}\n{m.text}<|im_end|>\n" for m in messages)
    return outcome.text.prompt if mode is InputMode.TEXT else BYTES.decode(outcome.tokens.prompt)


@doors
@pytest.mark.parametrize("mode", list(InputMode))
async def test_28_every_input_mode_takes_a_response_alone(door, mode):
    environment = ChatEnv(name="blank", input_mode=mode, tokenizer=BYTES)
    async with at(door, environment) as client:
        assert (await client.get_environment("blank")).spec.input_mode is mode
        opening = await open_session(client, "blank", question=Given(query="hi"))
        (outcome,) = await play(client, ANSWERS[mode])
        assert text_of(opening, mode).startswith("<|im_start|>user\nhi<|im_end|>\n")
        prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert text_of(outcome, mode).rstrip() == f"{prompt}yes<|im_end|>"
        for other in set(InputMode) - {mode}:
            wrong = client.step("s", episode=1, step_index=1, history=ANSWERS[other])
            assert await reason_of(wrong) == "WRONG_MODE"


@doors
async def test_49_gsm8k(door, tmp_path: Path):
    path = tmp_path / "gsm8k.jsonl"
    row = {"question": "48 clips, then half as many?", "answer": "48+24\n#### 72"}
    path.write_text(json.dumps(row), "utf-8")
    async with at(door, gsm8k(path=path)) as client:
        info = await client.get_environment("gsm8k")
        assert info.max_turns == 1
        key = (await client.list_tasks("gsm8k", split="train", page_size=1)).tasks[0].key
        values = []
        for number, answer in enumerate(
            ("<think>48+24</think><answer>72</answer>", "<answer>7</answer>", "72")
        ):
            session = f"s{number}"
            opening = await open_session(client, "gsm8k", session, split="train", task_key=key)
            assert roles(opening) == ["system", "user"]
            assert texts(opening)[-1] == row["question"]
            (outcome,) = await play(client, answer, session=session)
            assert outcome.done
            assert [reward.name for reward in outcome.rewards] == [
                "reward_answer",
                "reward_think",
                "reward_right",
                "reward_contained",
            ]
            assert {reward.success for reward in outcome.rewards} == {number == 0}
            values.append(sum(reward.value * reward.weight for reward in outcome.rewards))
        assert values == pytest.approx([1.0, 0.1, 0.0])


@doors
async def test_50_ifeval(door, tmp_path: Path):
    path = tmp_path / "ifeval.jsonl"
    row = {
        "key": 1000,
        "prompt": "Write without commas, at most five words.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None}, {"num_words": 6, "relation": "less than"}],
    }
    path.write_text(json.dumps(row), "utf-8")
    async with at(door, ifeval(path=path)) as client:
        rewards = []
        for number, answer in enumerate(
            ("<think>so</think><answer>Fine without any</answer>", "<answer>Well, no</answer>", "x")
        ):
            session = f"s{number}"
            await open_session(client, "ifeval", session, split="train", task_key="1000")
            (outcome,) = await play(client, answer, session=session)
            assert outcome.done
            assert outcome.failures == ()
            rewards.append({reward.name: reward.value for reward in outcome.rewards})
        assert rewards[0] == pytest.approx({"ifeval": 1.15, "strict": 1.0, "loose": 1.0})
        assert rewards[1]["strict"] == 0.5
        assert rewards[2]["ifeval"] == 0.0


@doors
async def test_52_prompt_and_action_are_concatenated_in_text_mode(door):
    """What documents call LLMEnv: the next text is the last one and the action, nothing else."""
    environment = ChatEnv(
        name="text", input_mode="text", tokenizer=BYTES, transforms=(StepCounter(3),)
    )
    async with at(door, environment) as client:
        opening = await open_session(client, "text", question=Given(query="Once"))
        outcomes = await play(client, *(Text(response=part) for part in (" upon", " a", " time")))
        shown = [outcome.text.prompt for outcome in outcomes]
        start = opening.text.prompt
        assert shown == [f"{start} upon", f"{start} upon a", f"{start} upon a time"]
        assert [outcome.done for outcome in outcomes] == [False, False, True]
        assert outcomes[-1].done_reason is DoneReason.MAX_TURNS
