"""Seed 003's text environment, and each defect of its origin that ours does not have."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from dialoop.chat import ChatHistory
from dialoop.environments.tools.text_tools import ToolInputError
from dialoop.episode import ContinuedText, Sample
from dialoop.errors import InvalidConfig, InvalidInput, Unavailable
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.testing import byte_tokenizer
from dialoop.trajectory import Owner, SamplingParams, StopReason
from dialoop_extras.compat.trl_text import TrlTextEnvironment
from dialoop_extras.text_environment.environment import TextEnvironment, TextLimits, each
from dialoop_extras.text_environment.history import TextHistory

VERSION = PolicyVersion(lineage="main", number=3)
TOKENIZER = byte_tokenizer()
CALL = "<request><add>1+2<call>"


@dataclass
class Scripted:
    """Answers with the given texts in turn; every episode begins at the first."""

    texts: list[str]
    samplings: list[SamplingParams] = field(default_factory=list)

    async def generate(
        self, *, token_ids: Iterable[int], sampling: SamplingParams, turn: int
    ) -> tuple[Sample, ...]:
        self.samplings.append(sampling)
        prompt, text = list(token_ids), self.texts[min(turn, len(self.texts) - 1)]
        ids = list(TOKENIZER.encode(text, trusted=True).ids)
        model = {"source": Source.MODEL, "turn": turn, "policy_version": VERSION}
        sequence = sequence_of(
            [(prompt, {"source": Source.PROMPT}), (ids, model)], logprobs=[-0.5] * len(ids)
        )
        ended = text.endswith(("<call>", "<submit>", "<|im_end|>"))
        return (
            Sample(
                history=ChatHistory(),
                sequence=sequence,
                stop_reason=StopReason.STOP if ended else StopReason.LENGTH,
                text=ContinuedText(prompt="", response=text),
            ),
        )


def add(query: str) -> str:
    first, second = query.split("+")
    return str(int(first) + int(second))


def _environment(
    *texts: str, kind: type[TextEnvironment] = TextEnvironment, **options: Any
) -> TextEnvironment:
    options = {"tools": [add], **options}
    return kind(Scripted(list(texts)), TOKENIZER, **options)


async def test_a_tool_answers_inline_and_only_the_models_tokens_are_counted() -> None:
    run = await _environment(CALL, "Result=3<submit>").run(["What is 1+2? "])
    history = run.histories[0]
    assert history.text == "What is 1+2? " + CALL + "3<response>Result=3<submit>"
    assert history.completed
    assert not history.truncated
    written = "".join(chr(t) for t in run.responses[0] if t < 256)
    assert len(written) == len(run.masks[0])
    model = [m for m in run.masks[0] if m]
    assert len(model) == len(CALL) + len("Result=3<submit>")
    assert len(run.masks[0]) - len(model) == len("3<response>")
    assert TOKENIZER.decode(run.queries[0]) == "What is 1+2? "


async def test_generation_stops_at_call_and_submit() -> None:
    environment = _environment("Result=3<submit>")
    await environment.run(["q"])
    assert environment.policy.samplings[0].stop == ("<call>", "<submit>")  # type: ignore[attr-defined]


async def test_what_was_sampled_becomes_a_sequence_with_versions_and_logprobs() -> None:
    run = await _environment(CALL, "Result=3<submit>").run(["q"])
    sequence = run.histories[0].sequence()
    assert [s.source for s in sequence.segments] == [
        Source.PROMPT,
        Source.MODEL,
        Source.TOOL,
        Source.MODEL,
    ]
    assert sequence.num_model_tokens == len(sequence.inference_logprobs)
    assert sequence.policy_versions == (VERSION,)
    assert sequence.token_ids.tolist() == run.queries[0] + run.responses[0]


async def test_rewards_take_lists_and_what_run_was_given() -> None:
    def exact(texts: list[str], answers: list[str]) -> list[float]:
        return [float(f"={a}<" in t) for t, a in zip(texts, answers, strict=True)]

    run = await _environment("Result=3<submit>", reward=exact).run(["a", "b"], answers=["3", "4"])
    assert run.rewards == [1.0, 0.0]


async def test_a_reward_of_one_text_is_wrapped() -> None:
    reward = each(lambda text, answer: float(answer in text))
    run = await _environment("Result=3<submit>", reward=reward).run(["a", "b"], answer=["3", "4"])
    assert run.rewards == [1.0, 0.0]


async def test_a_reward_that_fails_is_absent_and_no_zero() -> None:
    def broken(texts: list[str]) -> list[float]:
        raise ZeroDivisionError

    run = await _environment("x<submit>", reward=broken).run(["a"])
    assert run.rewards == [None]
    assert run.histories[0].failures[0].owner is Owner.REWARD


async def test_run_unpacks_as_the_seed_shows() -> None:
    queries, responses, masks, rewards, histories = await _environment("x<submit>").run(["a"])
    assert len(queries) == len(responses) == len(masks) == len(rewards) == len(histories) == 1


async def test_text_without_a_call_or_submit_ends_the_episode() -> None:
    run = await _environment("I do not know").run(["q"])
    assert run.histories[0].completed
    assert len(run.histories[0].segments) == 2


async def test_prompt_stands_before_each_query() -> None:
    run = await _environment("x<submit>", prompt="1+1?<request><add>1+1<call>2<response>\n").run(
        ["q"]
    )
    assert run.histories[0].text.startswith("1+1?")
    assert run.histories[0].segments[0].source is Source.PROMPT


async def test_max_length_counts_tokens() -> None:
    limits = TextLimits(max_length=20)
    run = await _environment(CALL, limits=limits).run(["q"])
    assert run.histories[0].truncated
    assert len(run.histories[0].segments) == 2


async def test_an_unknown_tool_is_told_by_its_name() -> None:
    run = await _environment("<request><div>1+2<call>", "x<submit>").run(["q"])
    assert "Unknown tool div.<response>" in run.histories[0].text


async def test_out_of_turns_is_truncated_and_the_reward_reads_the_model() -> None:
    read: list[str] = []

    def reward(texts: list[str]) -> list[float]:
        read.extend(texts)
        return [0.0] * len(texts)

    limits = TextLimits(max_turns=2)
    run = await _environment(CALL, reward=reward, limits=limits).run(["q"])
    assert run.histories[0].completed
    assert run.histories[0].truncated
    assert read == [CALL]


async def test_an_end_of_text_in_the_prompt_ends_nothing() -> None:
    run = await _environment(CALL, "x<submit>", prompt="shot<|im_end|>").run(["q"])
    assert run.histories[0].text.endswith("3<response>x<submit>")


async def test_every_call_of_a_turn_is_answered() -> None:
    run = await _environment(CALL + "<request><add>2+2<call>", "x<submit>").run(["q"])
    assert "3<response>4<response>x" in run.histories[0].text


async def test_a_tool_that_prints_submit_submits_nothing() -> None:
    run = await _environment(CALL, "x<submit>", tools={"add": lambda q: "<submit><|im_end|>"}).run(
        ["q"]
    )
    history = run.histories[0]
    assert history.last_model_text == "x<submit>"
    tool = history.segments[2]
    assert not any(TOKENIZER.is_special(token) for token in tool.token_ids)


async def test_a_limit_below_the_dots_cuts_plainly() -> None:
    tools = {"add": lambda q: "abcdefg"}
    run = await _environment(
        CALL, "x<submit>", tools=tools, limits=TextLimits(max_tool_response=2)
    ).run(["q"])
    assert "<call>ab<response>" in run.histories[0].text


async def test_a_tools_number_is_text() -> None:
    run = await _environment(CALL, "x<submit>", tools={"add": lambda q: 3}).run(["q"])
    assert "<call>3<response>" in run.histories[0].text


async def test_functions_in_a_list_have_their_own_names_and_none_is_no_tools() -> None:
    def sub(query: str) -> str:
        return "7"

    run = await _environment("<request><sub>9-2<call>", "x<submit>", tools=[add, sub]).run(["q"])
    assert "<call>7<response>" in run.histories[0].text
    alone = await _environment(CALL, "x<submit>", tools=None).run(["q"])
    assert "Unknown tool add." in alone.histories[0].text


async def test_the_policys_mistake_is_text_and_a_broken_tool_is_a_failure() -> None:
    def picky(query: str) -> str:
        raise ToolInputError("two numbers, please")

    def broken(query: str) -> str:
        raise RuntimeError("secret")

    run = await _environment(CALL, "x<submit>", tools={"add": picky}).run(["q"])
    assert "Tool error: two numbers, please<response>" in run.histories[0].text
    failed = (await _environment(CALL, tools={"add": broken}, reward=len).run(["q"])).histories[0]
    assert failed.failures[0].owner is Owner.TOOL
    assert failed.reward is None
    assert "secret" not in failed.failures[0].message


async def test_an_engine_that_is_away_is_a_failure_of_inference() -> None:
    class Away(Scripted):
        async def generate(self, **_: Any) -> tuple[Sample, ...]:
            raise Unavailable("away")

    environment = TextEnvironment(Away([]), TOKENIZER)
    history = (await environment.run(["q"])).histories[0]
    assert history.failures[0].owner is Owner.INFERENCE
    assert history.truncated


async def test_a_query_cannot_forge_a_special_token() -> None:
    history = (await _environment("x<submit>").run(["<|im_end|>"])).histories[0]
    assert not any(TOKENIZER.is_special(token) for token in history.segments[0].token_ids)


async def test_no_query_and_bad_limits_are_refused() -> None:
    with pytest.raises(InvalidInput):
        await _environment("x").run([])
    with pytest.raises(InvalidConfig):
        TextLimits(max_turns=0)


def test_history_attributes_are_those_of_the_seed() -> None:
    history = (
        TextHistory()
        .append_segment("ask ", [1, 2], source=Source.PROMPT)
        .append_segment("say", [3], source=Source.MODEL, versions=[(1, VERSION)])
        .append_segment("tool", [4, 5], source=Source.TOOL)
        .complete(truncated=True)
        .with_reward(0.5)
    )
    assert history.text_spans == [(0, 4), (4, 7), (7, 11)]
    assert history.system_spans == [True, False, True]
    assert history.tokens == [1, 2, 3, 4, 5]
    assert history.token_spans == [(0, 2), (2, 3), (3, 5)]
    assert history.token_masks == [0, 0, 1, 0, 0]
    assert history.split_query_response_tokens() == ([1, 2], [3, 4, 5], [1, 0, 0])
    assert (history.completed, history.truncated, history.reward) == (True, True, 0.5)
    assert history.last_text_segment == "tool"
    assert history.last_model_text == "say"


@pytest.mark.parametrize(("text", "ids"), [("", [1]), ("a", [])])
def test_an_empty_segment_is_a_value_error(text: str, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="segment"):
        TextHistory().append_segment(text, ids, source=Source.MODEL)


def test_text_tokens_and_legend_are_shown_in_colour(capsys: pytest.CaptureFixture[str]) -> None:
    history = (
        TextHistory()
        .append_segment("ab", TOKENIZER.encode("ab").ids, source=Source.PROMPT)
        .append_segment("cd", TOKENIZER.encode("cd").ids, source=Source.MODEL)
        .with_reward(1.0)
    )
    history.show_text(show_legend=True)
    history.show_tokens(TOKENIZER)
    shown = capsys.readouterr().out
    assert "abcd" in shown
    assert "Reward: 1.0" in shown
    assert "Prompt System Model Reward" in shown


def test_trl_compatibility_reproduces_what_its_tests_pin_down() -> None:
    read: list[str] = []

    def reward(texts: list[str]) -> list[float]:
        read.extend(texts)
        return [0.0] * len(texts)

    def trl(*texts: str, **options: Any) -> TextHistory:
        environment = _environment(*texts, kind=TrlTextEnvironment, reward=reward, **options)
        assert isinstance(environment, TrlTextEnvironment)
        return environment.run_blocking(["q"]).histories[0]

    assert "Tool error: 'div'<response>" in trl("<request><div>1+2<call>", "x<submit>").text
    out = trl(CALL, limits=TextLimits(max_turns=1))
    assert (out.completed, out.truncated) == (False, False)
    assert read[-1] == "3<response>"
    assert len(trl(CALL, "x<submit>", prompt="shot<|im_end|>").segments) == 2
    assert "3<response>x" in trl(CALL + "<request><add>2+2<call>", "x<submit>").text
    limits = TextLimits(max_tool_response=2)
    long = trl(CALL, "x<submit>", tools={"add": lambda q: "abcdefg"}, limits=limits)
    assert "<call>abcdef...<response>" in long.text
