"""Snippets of torchrl's LLM page (S1) on wrappers, collectors and rewards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dialoop.environments import OneTurn, TaskData, arithmetic
from dialoop.episode import ContinuedText
from dialoop.errors import InvalidConfig
from dialoop.tasks.ifeval import Followed
from dialoop.testing import ScriptedPolicy
from dialoop_extras.compat import (
    ChatEnv,
    GSM8KRewardParser,
    IfEvalScorer,
    LLMCollector,
    PolicyVersion,
    Text,
    TransformersWrapper,
    vLLMWrapper,
)

from tests.support.samples.scripted_tokens import BYTES, ScriptedTokens


class TextPolicy(ScriptedTokens):
    """A policy that continues a text, as an inference service does."""

    async def generate(self, *, text: str, **options: Any) -> Any:
        (sample,) = await super().generate(token_ids=BYTES.encode(text).ids, **options)
        return (replace(sample, text=ContinuedText(prompt=text, response=self.script(text))),)


@pytest.mark.parametrize("wrapper", [TransformersWrapper, vLLMWrapper])
async def test_s1_lines_322_and_333_to_336_text_mode_gives_text(wrapper: Any) -> None:
    view = await wrapper(TextPolicy(lambda text: "world"), input_mode="text")(
        Text(prompt="Hello, ")
    )
    assert view.text == Text(prompt="Hello, ", response="world", full="Hello, world")


async def test_s1_lines_492_to_505_the_policys_version_is_in_the_data() -> None:
    class Policy(ScriptedPolicy):
        async def load_weights(self, manifest: Any, chunks: Any) -> Any:
            return manifest

    collector = LLMCollector(
        arithmetic(max_turns=1),
        policy=Policy(["Result=1<submit>"]),
        weight_updater=None,
        dialog_turns_per_batch=2,
        total_dialog_turns=4,
        track_policy_version=True,
    )
    versions = []
    async for data in collector:
        versions.append(data["policy_version"])
        await collector.update_policy_weights_("manifest")
    assert versions == [[0, 0], [1, 1]]
    assert collector.policy_version_tracker.version == 2


async def test_the_versions_of_a_stamp_of_ones_own_are_in_the_data() -> None:
    stamp = PolicyVersion(version_type="uuid")
    options = {"track_policy_version": stamp, "total_dialog_turns": 1}
    collector = LLMCollector(arithmetic(max_turns=1), policy=ScriptedPolicy(["1"]), **options)
    ((version,),) = [data["policy_version"] async for data in collector]
    assert version == stamp.version
    plain = LLMCollector(arithmetic(), policy=ScriptedPolicy(["1"]), total_dialog_turns=1)
    ((data,),) = [data async for data in plain]
    assert data.turns


async def test_s1_lines_769_to_783_an_aggregator_of_ones_own() -> None:
    def aggregator(score: Followed) -> float:
        format_score = score.weighted
        structure_score = (score.num_think_blocks == 1) * 0.5 + (score.num_answer_blocks == 1) * 0.5
        completion_bonus = float(score.is_complete) * 0.2
        return format_score + structure_score + completion_bonus

    task = TaskData(
        key="1",
        question="Say hello without a comma.",
        metadata={"instruction_id_list": '["punctuation:no_comma"]', "kwargs": "[{}]"},
    )
    answer = {"role": "assistant", "content": "<think>x</think><answer>hello</answer>"}
    rewards = {}
    for aggregate in (True, aggregator, "additive_v1"):
        env = ChatEnv().append_transform(IfEvalScorer(aggregate_reward=aggregate))
        opening = env.reset(task, seed=0)
        outcome = await env.step(opening.episode, opening.history.respond(answer))
        assert outcome.episode.terminated
        rewards[aggregate] = outcome.rewards[0].value
        await env.release()
    assert rewards[aggregator] == pytest.approx(2.2)
    assert rewards[True] != rewards[aggregator]
    with pytest.raises(InvalidConfig, match="needs one reward"):
        IfEvalScorer(aggregate_reward=False)


async def rewards_of(text: str) -> tuple[dict[str, float], Any]:
    """The rewards of an answer to "3+4?" by GSM8K's parser, in an episode of one turn."""
    env = ChatEnv(transforms=(OneTurn(),)).append_transform(GSM8KRewardParser())
    task = TaskData(key="1", question="3+4?", answer="It is 3+4.\n#### 7")
    opening = env.reset(task, seed=0)
    answer = {"role": "assistant", "content": text}
    outcome = await env.step(opening.episode, opening.history.respond(answer))
    return {reward.name: reward.value for reward in outcome.rewards}, outcome


async def test_s1_lines_704_to_710_and_739_to_751_the_parser_names_its_rewards_and_ends() -> None:
    rewards, outcome = await rewards_of("<think>3 and 4</think><answer>7</answer>")
    names = {"reward_answer", "reward_think", "reward_right", "reward_contained"}
    env = ChatEnv().append_transform(GSM8KRewardParser())
    assert set(rewards) == set(env.traits.reward_names) == names
    assert outcome.episode.terminated
    assert all(reward.success for reward in outcome.rewards)
    wrong, _ = await rewards_of("<think>3 and 4</think><answer>8</answer>")
    assert sum(wrong.values()) < sum(rewards.values())


@pytest.mark.parametrize("text", ["<think>1 < 2 & 3</answer>", "<answer", "7", ""])
async def test_s1_lines_795_to_798_what_cannot_be_parsed_is_an_empty_answer(text: str) -> None:
    rewards, outcome = await rewards_of(text)
    assert not outcome.failures
    assert rewards["reward_right"] == 0.0
