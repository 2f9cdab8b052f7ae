"""IFEval: each of the 25 checks, strict and loose, and the three aggregators."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from dialoop.chat import History, Message
from dialoop.environments import Episode, TaskData
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.tasks.ifeval import (
    Followed,
    IfEvalReward,
    additive_v1,
    collate_ifeval,
    ifeval,
    tiered_v2,
    weighted_v3,
)
from dialoop.tasks.ifeval_checks import CHECKS, check_all, follows
from dialoop.tasks.ifeval_text import count_words, sentences, words
from dialoop.tasks.ifeval_words import WORDS, words_of

GOLDENS = Path(__file__).parents[2] / "goldens" / "ifeval_checks.json"

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["sun", "moon"]}, "Sun and Moon.", "Sun alone."),
    (
        "keywords:frequency",
        {"keyword": "go", "frequency": 2, "relation": "at least"},
        "Go, go!",
        "Go!",
    ),
    (
        "keywords:frequency",
        {"keyword": "go", "frequency": 2, "relation": "less than"},
        "Go!",
        "Go go",
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "A category.", "The cat."),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_frequency": 3, "let_relation": "at least"},
        "Eleven eels",
        "An eel",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "One. Two!",
        "Dr. One is here.",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        "two words",
        "now three words",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First.\n\nThen, second.",
        "First.\n\nAnd then.",
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        "[name] of [place]",
        "[name]",
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        "Dear you.\nP.S. me",
        "Dear you.",
    ),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*one* and **two**",
        "*one*",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<< >>"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "Say hi. Hi.", "Hi."),
    ("startend:end_checker", {"end_phrase": "The end."}, "So. THE END.", "The end. So."),
    ("startend:quotation", {}, '"Quoted."', 'Not "quoted".'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "A BIG word",
        "one BIG word",
    ),
    ("change_case:english_capital", {}, "ALL OF IT.", "All of it."),
    ("change_case:english_lowercase", {}, "all of it.", "All of it."),
    ("punctuation:no_comma", {}, "None here.", "One, here."),
]


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES)
def test_each_instruction_is_told_from_its_violation(
    name: str, arguments: dict[str, Any], right: str, wrong: str
) -> None:
    assert follows(name, arguments, prompt="", response=right)
    assert not follows(name, arguments, prompt="", response=wrong)
    assert not follows(name, arguments, prompt="", response="  ")


def test_every_instruction_has_a_case() -> None:
    assert {name for name, *_ in CASES} | {"language:response_language"} == set(CHECKS)


def test_every_instruction_has_words_with_its_arguments() -> None:
    assert set(WORDS) == set(CHECKS)
    for name, arguments, *_ in CASES:
        told = words_of(name, arguments)
        assert "{" not in told, told
        of_prompt = {} if name == "combination:repeat_prompt" else arguments
        for value in of_prompt.values():
            for part in value if isinstance(value, list) else [value]:
                assert str(part) in told, (name, told)
    most = {"num_words": 3, "relation": None}
    assert words_of("length_constraints:number_words", most) == "Write at least 3 words."
    words = {"keywords": ["always", "remember"]}
    assert words_of("keywords:existence", words) == "Use these words: always, remember."


async def test_the_reward_tells_which_instructions_failed() -> None:
    """The same words each time, in the order of the row; none where all were followed."""
    names = ["punctuation:no_comma", "startend:quotation", "length_constraints:number_words"]
    kwargs = [{}, {}, {"num_words": 3, "relation": "less than"}]
    row = {"instruction_id_list": json.dumps(names), "kwargs": json.dumps(kwargs)}
    reward, told = IfEvalReward(in_blocks=False), []
    for text in ("One, and no more", "One, and no more", '"Two words"'):
        said = Message(role="assistant", content=text)
        task = TaskData(key="0", question="Write.", metadata=row)
        episode = Episode(task=task, seed=0, history=History((said,)), answer=said, terminated=True)
        score = await reward.score(episode)
        assert [r.feedback for r in score.rewards[1:]] == ["", ""]
        told.append(score.rewards[0].feedback)
    await reward.release()
    first = ("Do not use any commas.", "Put the whole answer in double quotation marks.")
    assert told == ["\n".join((*first, "Write less than 3 words."))] * 2 + [""]


def test_languages_are_told_apart() -> None:
    pytest.importorskip("langdetect")
    german = "Das ist ein ganz gewöhnlicher deutscher Satz über das Wetter."
    name = "language:response_language"
    assert follows(name, {"language": "de"}, prompt="", response=german)
    assert not follows(name, {"language": "en"}, prompt="", response=german)


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(InvalidInput, match="be_nice"):
        follows("be_nice", {}, prompt="", response="x")


@pytest.mark.parametrize(
    "case", json.loads(GOLDENS.read_text("utf-8")), ids=lambda case: f"{case[0]}-{case[2]!r}"
)
def test_edge_cases_are_judged_as_published(case: tuple[str, dict[str, Any], str, bool]) -> None:
    """Where an earlier form of a check was wrong, and others; infra/test_compat.sh asks lm-eval."""
    name, arguments, text, right = case
    assert follows(name, arguments, prompt="", response=text) is right


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hi. You? Yes!", ["Hi.", "You?", "Yes!"]),
        ("3.5 is it. ok", ["3.5 is it.", "ok"]),
        ('He said "Hi." She left.', ['He said "Hi."', "She left."]),
        (
            "Dr. Ames of the U.S. army came. (So it is.)",
            ["Dr. Ames of the U.S. army came.", "(So it is.)"],
        ),
        ("At 5 p.m. The sun set... and rose.", ["At 5 p.m.", "The sun set... and rose."]),
        (
            "J. Ames likes plan B. The rest, e.g. you, does not.",
            ["J. Ames likes plan B.", "The rest, e.g.", "you, does not."],
        ),
        ("1. One\n2. two", ["1.", "One\n2. two"]),
        ("Wow!!", ["Wow!", "!"]),
    ],
)
def test_sentences_are_told_without_data_files(text: str, parts: list[str]) -> None:
    assert sentences(text) == parts


def test_words_are_cut_as_nltk_cuts_them() -> None:
    assert words("I CAN'T, we're SO-SO.") == ["I", "CA", "N'T", ",", "we", "'re", "SO-SO", "."]
    assert words("CANNOT (IT'S) a...B") == ["CAN", "NOT", "(", "IT", "'S", ")", "a", "...", "B"]
    assert count_words("it's well_read \u0939\u093f\u0928\u094d\u0926\u0940") == 4


def test_rows_that_ask_for_a_language_need_langdetect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    row = {"prompt": "x", "instruction_id_list": ["change_case:english_lowercase"], "kwargs": [{}]}
    with pytest.raises(InvalidConfig, match="langdetect") as caught:
        collate_ifeval(row)
    assert caught.value.reason == "PACKAGE_MISSING"
    collate_ifeval(row | {"instruction_id_list": ["punctuation:no_comma"]})


def test_loose_reading_forgives_a_preamble() -> None:
    results = check_all(["change_case:english_lowercase"], [{}], "", "Sure:\nall lower")
    assert results == {"strict": [False], "loose": [True]}


def _result(**fields: Any) -> Followed:
    return Followed(**{"strict": (True, True), "loose": (True, True), **fields})


def test_aggregators_golden_numbers() -> None:
    assert _result().weighted == pytest.approx(1.0)
    # half of two instructions: 0.3 / 2 strictly, everything loosely: 0.15 + 0.2 + 0.1
    half = _result(strict=(True, False))
    assert half.weighted == pytest.approx(0.45)
    assert weighted_v3(_result()) == pytest.approx(1.15)
    assert weighted_v3(half) == pytest.approx(0.6)
    assert additive_v1(_result()) == pytest.approx(2.2)
    assert additive_v1(_result(num_think_blocks=0, is_complete=False)) == pytest.approx(1.5)
    assert tiered_v2(_result()) == pytest.approx((1 + 0.3 + 0.2) * 1.2)
    assert tiered_v2(_result(num_think_blocks=0)) == pytest.approx(1.5 * 0.3 * 1.2)
    assert tiered_v2(_result(num_answer_blocks=2)) == pytest.approx(1.5 * 0.7 * 1.2)
    assert tiered_v2(_result(num_answer_blocks=0)) == 0.0


async def test_the_environment_scores_the_answer_block(tmp_path: Path) -> None:
    path = tmp_path / "ifeval.jsonl"
    row = {
        "key": 1000,
        "prompt": "Write without commas, at most five words.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None}, {"num_words": 6, "relation": "less than"}],
    }
    path.write_text(json.dumps(row), "utf-8")
    environment = ifeval(path=path)

    async def score(text: str) -> dict[str, float]:
        opening = environment.reset(environment.tasks.get("train", "1000"), seed=0)
        message = Message(role="assistant", content=text)
        outcome = await environment.step(opening.episode, opening.history.respond(message))
        assert outcome.episode.done
        return {reward.name: reward.value for reward in outcome.rewards}

    try:
        good = await score("<think>hm, yes</think><answer>Fine without any</answer>")
        assert good == {"ifeval": pytest.approx(1.15), "strict": 1.0, "loose": 1.0}
        bad = await score("<answer>Well, no</answer>")
        assert bad["strict"] == 0.5
        assert (await score("Fine without any"))["ifeval"] == 0.0
        hollow = await score("<think> </think><answer></answer>")
        assert hollow == {"ifeval": 0.0, "strict": 0.0, "loose": 0.0}
        assert await score("<answer></answer><answer>Fine without any</answer>") == await score(
            "<answer>Fine without any</answer>"
        )
    finally:
        for transform in environment.transforms:
            await transform.release()


@pytest.mark.parametrize(
    "fields",
    [
        {"instruction_id_list": ["no_such"], "kwargs": [{}]},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []},
        {},
    ],
)
def test_a_row_that_cannot_be_checked_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"prompt": "x", **fields}), "utf-8")
    with pytest.raises(InvalidConfig) as caught:
        ifeval(path=path)
    assert caught.value.reason == "BAD_ROW"


def test_an_unknown_aggregator_is_named() -> None:
    with pytest.raises(InvalidConfig, match="weighted_v3"):
        IfEvalReward(aggregator="best")


async def test_without_blocks_the_whole_message_is_judged(tmp_path: Path) -> None:
    row = {"prompt": "Hi.", "instruction_id_list": ["punctuation:no_comma"]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row | {"kwargs": [{}]}), "utf-8")
    env = ifeval(path=path, in_blocks=False)
    assert env.system_prompt == ""
    for text, value in (("One two.", 1.0), ("One, two.", 0.0)):
        opening = env.reset(env.tasks.get("train", "0"), seed=0)
        said = opening.history.respond(Message(role="assistant", content=text))
        outcome = await env.step(opening.episode, said)
        assert {r.name: r.value for r in outcome.rewards}["strict"] == value
    await env.release()
