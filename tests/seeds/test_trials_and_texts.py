"""Snippets of MetaRLGym's plan of environments (S2) and of TRL's page of text environments (S3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dialoop.errors import DialoopWarning, InvalidConfig
from dialoop.testing import byte_tokenizer
from dialoop_extras.compat import (
    DirectOutputAgent,
    TextEnvironment,
    TextHistory,
    TwentyQuestionsEnv,
)
from dialoop_extras.text_environment import each
from dialoop_extras.trials import ScriptedAgent

from tests.support.samples.scripted_tokens import ScriptedTokens

PROMPT = """\
What is 13-3?
<request><SimpleCalculatorTool>13-3<call>10.0<response>
Result=10<submit>
"""


def test_s2_lines_5_to_17_and_62_to_71_a_trial_has_all_keys_without_a_tokenizer_too() -> None:
    env = TwentyQuestionsEnv(tokenizer=None, episodes_per_trial=1, free_shots=0)
    inputs = [{"solution": "apple"}, {"solution": "pear"}]
    result = env.run_trial(inputs, llm=None, sampling_params=None, agent=ScriptedAgent(["[apple]"]))
    assert result["ids"] == result["full_token_ids"] == [[], []]
    assert result["messages"] == result["final_completion_messages"]
    assert result["mask"] == result["completion_only_mask"]
    assert len(set(result["session_ids"])) == 2
    (reward_func,) = env.get_rubric()
    rewards = reward_func(
        completions=result["final_completion_messages"], session_ids=result["session_ids"]
    )
    assert rewards[0] > rewards[1]


def test_s2_lines_51_to_60_and_98_to_101_an_agent_of_the_llm_plays() -> None:
    tokenizer = byte_tokenizer()
    llm = ScriptedTokens(lambda prompt: "[apple]")
    env = TwentyQuestionsEnv(tokenizer=tokenizer)
    agent = DirectOutputAgent(llm=llm, sampling_params={"max_tokens": 8, "temperature": 0.5})
    with pytest.warns(DialoopWarning, match="does not use trainer"):
        result = env.run_trial([{"solution": "apple"}], agent=agent, trainer=None)
    assert sum(result["mask"][0]) == len("[apple]")
    ours = env.run_trial([{"solution": "apple"}], llm, {"max_tokens": 8})
    assert ours["ids"] == result["ids"]
    with pytest.raises(InvalidConfig, match="an llm with a tokenizer"):
        TwentyQuestionsEnv().run_trial([{"solution": "apple"}], agent=agent)


def add(text: str) -> str:
    int_1, int_2 = text.split("+")
    return str(int(int_1) + int(int_2))


def reward_fn(result: str, answers: str) -> float:
    """Simplified reward function returning 1 if result matches answer and 0 otherwise."""
    result_parsed = result.split("=")[1].split("<")[0]
    return float(result_parsed == answers)


def text_env(answers: list[str], reward: Any, **options: Any) -> Any:
    script = iter(answers)
    return TextEnvironment(
        model=ScriptedTokens(lambda prompt: next(script)),
        tokenizer=byte_tokenizer(),
        tools={"SimpleCalculatorTool": add},
        reward_fn=reward,
        prompt=PROMPT,
        max_turns=2,
        max_tool_response=100,
        generation_kwargs={"do_sample": "true"},
        **options,
    )


def test_s3_lines_43_to_73_80_to_102_and_125_to_130_a_query_is_played_with_a_tool() -> None:
    env = text_env(
        ["<request><SimpleCalculatorTool>1+2<call>", "Result=3<submit>"], each(reward_fn)
    )
    queries, responses, masks, rewards, histories = env.run(["What is 1+2?"], answers=["3"])
    assert (len(queries), rewards) == (1, [1.0])
    assert len(responses[0]) == len(masks[0])
    assert 0 < sum(masks[0]) < len(masks[0])
    (history,) = histories
    assert "<request><SimpleCalculatorTool>1+2<call>3<response>" in history.text
    assert (history.completed, history.truncated) == (True, False)
    spans = (history.text_spans, history.system_spans, history.token_spans)
    assert len({len(each_of) for each_of in spans}) == 1
    assert len(history.tokens) == len(history.token_masks)


def test_s3_line_111_a_reward_of_one_string_is_refused_with_the_hint_to_each() -> None:
    with pytest.raises(InvalidConfig, match="takes one text") as caught:
        text_env(["Result=3<submit>"], reward_fn)
    assert "each(" in caught.value.remedy

    def plain(result, answers):  # type: ignore[no-untyped-def]
        return float(result.split("=")[1] == answers)

    (history,) = text_env(["Result=3<submit>"], plain).run(["q"], answers=["3"]).histories
    (failure,) = history.failures
    assert history.reward is None
    assert "with `each`" in failure.message
    (history,) = (
        text_env(["Result=3<submit>"], lambda texts, answers: 1).run(["q"], answers=[]).histories
    )
    assert "with `each`" in history.failures[0].message


def test_s3_line_108_a_models_object_is_refused() -> None:
    class PreTrainedModel(torch.nn.Module):
        def generate(self, **options: Any) -> Any:
            raise NotImplementedError

    with pytest.raises(InvalidConfig, match="PreTrainedModel, which is no policy") as caught:
        TextEnvironment(PreTrainedModel(), byte_tokenizer())
    assert "Dialoop(address).inference" in caught.value.remedy


def test_s3_lines_158_to_171_a_history_knows_who_wrote_what() -> None:
    history = TextHistory("What is 13-3?", [1, 2], system=True)
    history = history.append_segment("<request>", [3], system=False)
    history = history.append_segment("10<response>", [4, 5], system=True)
    assert history.text == "What is 13-3?<request>10<response>"
    assert history.system_spans == [True, False, True]
    assert history.token_masks == [0, 0, 1, 0, 0]
