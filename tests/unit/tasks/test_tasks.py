"""Ready-made tasks: data from files, GSM8K, MATH, countdown, reasoning-gym."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from dialoop.chat import Message
from dialoop.environments import ChatEnv, load_environment
from dialoop.environments.tasks.files import file_tasks, rows_of
from dialoop.errors import DeadlineExceeded, InvalidConfig, InvalidInput
from dialoop.tasks.countdown import CountdownTasks, countdown, value_of
from dialoop.tasks.gsm8k import gsm8k, gsm8k_truth
from dialoop.tasks.maths import MathReward, maths
from dialoop.tasks.reasoning_gym import reasoning_gym
from dialoop.trajectory import DoneReason

ROWS = [
    {"question": "Sold 48 and half as many?", "answer": "48+24=72\n#### 72"},
    {"question": "Twelve each, three?", "answer": "#### 1,036.50"},
]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n", "utf-8")
    return path


async def _answer(environment: ChatEnv, text: str, key: str = "0") -> Any:
    opening = environment.reset(environment.tasks.get("train", key), seed=0)
    message = Message(role="assistant", content=text)
    return await environment.step(opening.episode, opening.history.respond(message))


def _rewards(outcome: Any) -> dict[str, float]:
    return {reward.name: reward.value for reward in outcome.rewards}


def test_the_same_rows_come_from_json_lines_parquet_and_a_saved_data_set(
    jsonl: Path, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(ROWS)
    saved.to_parquet(str(tmp_path / "train.parquet"))
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(
        str(tmp_path / "both")
    )
    assert [dict(r) for r in rows_of(jsonl)] == ROWS
    assert [dict(r) for r in rows_of(tmp_path / "train.parquet")] == ROWS
    both = file_tasks(tmp_path / "both")
    assert (both.num_tasks("train"), both.num_tasks("heldout")) == (2, 1)
    assert both.get("train", "0").question == ROWS[0]["question"]


def test_a_share_of_the_rows_is_held_out_by_hash(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps({"query": f"q{i}"}) for i in range(200)), "utf-8")
    tasks = file_tasks(path, heldout_fraction=0.25)
    questions = [{tasks.get(s, k).question for k in tasks.keys(s)} for s in tasks.splits]
    assert not questions[0] & questions[1]
    assert len(questions[0]) + len(questions[1]) == 200
    assert 20 < len(questions[1]) < 80


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", "{"), ("b.jsonl", "[1]"), ("c.csv", "x"), ("d.parquet", "x")]
)
def test_data_that_cannot_be_read_says_so(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, "utf-8")
    with pytest.raises(InvalidConfig) as caught:
        list(rows_of(tmp_path / name))
    assert caught.value.reason == "DATA_UNREADABLE"


@pytest.mark.parametrize(
    ("text", "reward", "right"),
    [
        ("<think>48+24</think><answer>72</answer>", 1.0, True),
        ("<answer> $72.00 </answer>", 1.0, True),
        ("<answer>72 clips</answer>", 0.1, False),
        ("<answer>7</answer>", 0.1, False),
        ("72", 0.0, False),
        ("<answer>72", 0.0, False),
        ("<think></think><answer> </answer>", 0.0, False),
    ],
)
async def test_gsm8k_rewards_are_one_a_tenth_or_nothing(
    jsonl: Path, text: str, reward: float, right: bool
) -> None:
    outcome = await _answer(gsm8k(path=jsonl), text)
    assert sum(r.value * r.weight for r in outcome.rewards) == pytest.approx(reward)
    assert all(r.success is right for r in outcome.rewards)
    assert outcome.episode.done


async def test_gsm8k_tells_every_component(jsonl: Path) -> None:
    outcome = await _answer(gsm8k(path=jsonl), "<think>x</think><answer>about 72</answer>")
    assert _rewards(outcome) == {
        "reward_answer": 1.0,
        "reward_think": 1.0,
        "reward_right": 0.0,
        "reward_contained": 1.0,
    }
    assert outcome.episode.done_reason is DoneReason.CONTENT


def test_gsm8k_truth_is_what_follows_the_one_mark() -> None:
    assert gsm8k_truth("#### 1,036.50") == "1036.5"
    for answer in ("72", "#### 1 #### 2"):
        with pytest.raises(InvalidInput):
            gsm8k_truth(answer)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("\\boxed{\\frac{2}{4}}", True),
        ("So it is $0.5$", True),
        ("\\boxed{2}", False),
        ("?", False),
    ],
)
async def test_math_compares_by_mathematics(tmp_path: Path, text: str, right: bool) -> None:
    pytest.importorskip("math_verify")
    path = tmp_path / "math.jsonl"
    path.write_text(json.dumps({"problem": "Half?", "solution": "\\boxed{\\frac12}"}), "utf-8")
    environment = maths(path=path)
    try:
        outcome = await _answer(environment, text)
    finally:
        for transform in environment.transforms:
            await transform.release()
    assert _rewards(outcome) == {"math": float(right)}


async def test_a_formula_that_hangs_is_killed() -> None:
    reward = MathReward(timeout_s=0.01)
    with pytest.raises(DeadlineExceeded):
        await reward.check({"answer_text": "1", "wanted": "1"}, timeout_s=0.01)
    await reward.release()


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(8 - 4) * 6", Fraction(24)),
        ("8 / 6", Fraction(4, 3)),
        ("8 + 8", None),  # used twice
        ("5 + 4", None),  # not given
        ("8 / (4 - 4)", None),
        ("8 ** 4", None),
        ("__import__('os')", None),
        ("8 -", None),
        ("(" * 500, None),
    ],
)
def test_countdown_expressions_keep_the_rules(expression: str, value: Fraction | None) -> None:
    assert value_of(expression, [4, 6, 8]) == value


async def test_countdown_rewards_the_target_and_the_form() -> None:
    environment = countdown(num_tasks=50)
    key = environment.tasks.keys("train")[0]
    task = environment.tasks.get("train", key)
    numbers = json.loads(task.metadata["numbers"])
    right = next(e for e in _expressions(numbers) if value_of(e, numbers) == int(task.answer))
    rewards = [
        _rewards(await _answer(environment, text, key))["countdown"]
        for text in (f"<answer>{right}</answer>", f"<answer>{numbers[0]}</answer>", "x")
    ]
    assert rewards == [1.0, 0.1, 0.0]


def _expressions(numbers: list[int]) -> list[str]:
    """Left-folded expressions over every order of the numbers: how puzzles are made."""
    from itertools import permutations, product

    return [
        f"(({a} {x} {b}) {y} {c}) {z} {d}"
        for a, b, c, d in permutations(numbers)
        for x, y, z in product("+-*/", repeat=3)
    ]


def test_countdown_tasks_are_the_same_everywhere_and_splits_share_none() -> None:
    first, second = CountdownTasks(num_tasks=100), CountdownTasks(num_tasks=100)
    key = first.keys("train")[3]
    assert first.get("train", key) == second.get("train", key)
    assert not set(first.keys("train")) & set(first.keys("heldout"))


async def test_a_reasoning_gym_task_is_scored_by_the_package() -> None:
    pytest.importorskip("reasoning_gym")
    environment = reasoning_gym(task="leg_counting", num_tasks=3, num_heldout=2)
    task = environment.tasks.get("train", "1")
    right = await _answer(environment, f"<answer>{task.answer}</answer>", "1")
    wrong = await _answer(environment, "<answer>-1</answer>", "1")
    assert _rewards(right) == {"reasoning_gym": 1.0}
    assert _rewards(wrong)["reasoning_gym"] < 1.0
    with pytest.raises(InvalidConfig) as caught:
        reasoning_gym(task="no_such_task")
    assert caught.value.reason == "TASK_NOT_FOUND"


async def test_no_question_of_reasoning_gyms_training_is_held_out() -> None:
    """The package makes item i of the seed s from s + i: two seeds in a row are nearly alike."""
    pytest.importorskip("reasoning_gym")
    digits: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    environment = reasoning_gym(task="chain_sum", num_tasks=200, num_heldout=60, **digits)
    tasks = environment.tasks
    train, heldout = (
        [tasks.get(split, key) for key in tasks.keys(split)] for split in ("train", "heldout")
    )
    assert (len(train), len(heldout)) == (200, 60)
    assert not {task.question for task in train} & {task.question for task in heldout}
    replaced = [task for task in train if task.metadata["round"] != "0"]
    assert replaced, "some came up in both, by chance"
    right = await _answer(environment, f"<answer>{replaced[0].answer}</answer>", replaced[0].key)
    assert _rewards(right) == {"reasoning_gym": 1.0}


async def test_a_split_that_nothing_could_be_held_out_of_is_refused() -> None:
    pytest.importorskip("reasoning_gym")
    digits: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    environment = reasoning_gym(task="chain_sum", num_tasks=1, num_heldout=2000, **digits)
    with pytest.raises(InvalidConfig, match="hardly a question"):
        environment.tasks.get("train", "0")


async def test_a_reasoning_gym_answer_without_blocks_is_the_whole_message() -> None:
    pytest.importorskip("reasoning_gym")
    environment = reasoning_gym(task="leg_counting", num_tasks=3, num_heldout=2, in_blocks=False)
    assert "<answer>" not in environment.system_prompt
    task = environment.tasks.get("train", "1")
    right = await _answer(environment, f" {task.answer}\n", "1")
    wrong = await _answer(environment, f"<answer>{task.answer}</answer>", "1")
    assert _rewards(right) == {"reasoning_gym": 1.0}
    assert _rewards(wrong)["reasoning_gym"] < 1.0


def test_tasks_load_by_import_path_as_a_config_names_them(jsonl: Path) -> None:
    environment = load_environment("dialoop.tasks.gsm8k:gsm8k", {"path": str(jsonl)})
    assert environment.name == "gsm8k"
    assert load_environment("dialoop.tasks.countdown:countdown", {"num_tasks": 5}).tasks.splits
