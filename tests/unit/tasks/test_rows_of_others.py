"""Rows and reward functions of verl, TRL and OpenAI's form: used unchanged, or refused by name."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dialoop_ops
import pytest
from dialoop.chat import Message
from dialoop.environments import load_environment
from dialoop.environments.tasks.files import rows_of
from dialoop.errors import DialoopError, InvalidConfig
from dialoop.import_paths import load_attribute
from dialoop.user_functions import call_now
from dialoop_ops.stack.user_code import check_functions, load_environments, working_in
from dialoop_services.config.file import parse_config

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

VERL_ROWS = [
    {
        "data_source": "sums",
        "prompt": [
            {"role": "system", "content": "Answer with a number.", "name": None},
            {"role": "user", "content": f"{n}+1", "name": None},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n, "split": "train"},
    }
    for n in range(6)
]
TRL_ROWS = [{"prompt": f"{n}+1", "target": n + 1} for n in range(6)]
CHAT_ROWS = [
    {"prompt": [{"role": "user", "content": r["prompt"]}], "target": r["target"]} for r in TRL_ROWS
]
FUNCTIONS = """
import asyncio

CALLS = []


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    CALLS.append((data_source, solution_str, ground_truth, extra_info))
    right = solution_str.strip() == ground_truth
    others = {"acc": right, "pred": solution_str, "index": extra_info["index"]}
    return {"score": 1.0 if right else 0.1, **others}


async def async_score(data_source, solution_str, ground_truth, extra_info, factor=1.0):
    await asyncio.sleep(0)
    return factor * (solution_str == ground_truth)


def is_right(prompts, completions, target, **kwargs):
    kwargs["log_metric"]("length", len(str(completions[0])))
    return [float(_text(c) == str(t)) for c, t in zip(completions, target, strict=True)]


async def short(prompts, completions, **kwargs):
    return [1.0 / len(_text(c)) for c in completions]


def only_ones(prompts, completions, target, **kwargs):
    return [None if t > 1 else 2.0 for t in target]


def close_to_reference(prompts, completions, reference, **kwargs):
    return [float(c[0]["content"] == r) for c, r in zip(completions, reference, strict=True)]


def _text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def endless(data_source, solution_str, ground_truth, extra_info=None):
    return float("inf")


def text_score(data_source, solution_str, ground_truth, extra_info=None):
    return "1.0"


def no_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}


def other_arguments(answer, truth):
    return 1.0


def raises(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str)


def one_number(prompts, completions, **kwargs):
    return 1.0


def two_numbers(prompts, completions, **kwargs):
    return [1.0, 2.0]


def texts(prompts, completions, **kwargs):
    return ["good"]


def wants_ids(prompts, completions, completion_ids, **kwargs):
    return [len(ids) for ids in completion_ids]


def wants_state(prompts, completions, trainer_state, **kwargs):
    return [1.0]


def wants_difficulty(prompts, completions, difficulty, **kwargs):
    return [1.0]


def takes_no_columns(prompts, completions):
    return [1.0]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_parquet(tmp_path / "verl.parquet", VERL_ROWS)
    write_parquet(tmp_path / "trl.parquet", TRL_ROWS)
    write_parquet(tmp_path / "chats.parquet", CHAT_ROWS)
    (tmp_path / "rewards.py").write_text(FUNCTIONS, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)


async def play(environment: Any, text: str, key: str = "1", **fields: Any) -> Any:
    opening = environment.reset(environment.tasks.get("train", key), seed=0)
    message = Message(role="assistant", content=text, **fields)
    outcome = await environment.step(opening.episode, opening.history.respond(message))
    assert outcome.episode.done
    assert not outcome.failures, outcome.failures
    return outcome


def rewards_of(outcome: Any) -> dict[str, tuple[float, float]]:
    return {reward.name: (reward.value, reward.weight) for reward in outcome.rewards}


async def test_a_compute_score_gets_the_row_as_it_is_and_its_score_is_the_reward(
    folder: Path,
) -> None:
    environment = load_environment(
        "verl", {"train_files": "verl.parquet", "compute_score": "rewards.py:compute_score"}
    )
    opening = environment.reset(environment.tasks.get("train", "1"), seed=0)
    assert [(m.role, m.text) for m in opening.episode.history] == [
        ("system", "Answer with a number."),
        ("user", "1+1"),
    ]
    assert not opening.info.get("ground_truth")
    right = await play(environment, "2")
    assert rewards_of(right) == {
        "compute_score": (1.0, 1.0),
        "acc": (1.0, 0.0),
        "index": (1.0, 0.0),
    }
    assert right.rewards[0].success is True
    assert rewards_of(await play(environment, "3"))["compute_score"] == (0.1, 1.0)
    calls = environment.transforms[-1].functions[0].function.__globals__["CALLS"]
    assert calls[0] == (
        "sums",
        "2",
        "2",
        {"index": 1, "split": "train", "num_turns": 2, "rollout_reward_scores": {}},
    )


async def test_reasoning_that_a_parser_cut_off_is_part_of_the_solution(folder: Path) -> None:
    environment = load_environment(
        "verl", {"train_files": "verl.parquet", "compute_score": "rewards.py:compute_score"}
    )
    await play(environment, "2", reasoning="One more.")
    calls = environment.transforms[-1].functions[0].function.__globals__["CALLS"]
    assert calls[-1][1] == "<think>\nOne more.\n</think>\n\n2"


async def test_an_async_compute_score_gets_its_reward_kwargs(folder: Path) -> None:
    environment = load_environment(
        "verl",
        {
            "train_files": ["verl.parquet", "verl.parquet"],
            "val_files": "verl.parquet",
            "compute_score": "rewards.py:async_score",
            "reward_kwargs": {"factor": 3.0},
        },
    )
    tasks = environment.tasks
    assert (tasks.num_tasks("train"), tasks.num_tasks("heldout")) == (12, 6)
    assert rewards_of(await play(environment, "2", key="7")) == {"async_score": (3.0, 1.0)}


@pytest.mark.parametrize("dataset", ["trl.parquet", "chats.parquet"])
async def test_reward_funcs_get_columns_in_the_form_of_the_prompt(
    folder: Path, dataset: str
) -> None:
    environment = load_environment(
        "trl",
        {
            "dataset": dataset,
            "reward_funcs": [f"rewards.py:{name}" for name in ("is_right", "short", "only_ones")],
            "reward_weights": [1.0, 0.5, 1.0],
        },
    )
    outcome = await play(environment, "2")
    length = (
        len("2") if dataset.startswith("trl") else len("[{'role': 'assistant', 'content': '2'}]")
    )
    assert rewards_of(outcome) == {
        "is_right": (1.0, 1.0),
        "length": (float(length), 0.0),
        "short": (1.0, 0.5),
        "only_ones": (0.0, 1.0),
    }
    assert [r.name for r in outcome.rewards if r.absent] == ["only_ones"]
    assert rewards_of(await play(environment, "no", key="0"))["only_ones"] == (2.0, 1.0)


async def test_the_last_assistant_message_of_a_conversation_is_the_reference(folder: Path) -> None:
    rows = [
        [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}],
        [{"role": "user", "content": "2+2"}],
    ]
    (folder / "chats.jsonl").write_text(
        "\n\n".join(json.dumps({"messages": row, "source": "web"}) for row in rows), "utf-8"
    )
    environment = load_environment(
        "messages", {"path": "chats.jsonl", "reward_funcs": "rewards.py:close_to_reference"}
    )
    assert rewards_of(await play(environment, "2", key="0")) == {"close_to_reference": (1.0, 1.0)}
    assert rewards_of(await play(environment, "2", key="1")) == {"close_to_reference": (0.0, 1.0)}
    assert environment.demonstrate is not None
    (shown,) = environment.demonstrate(environment.tasks.get("train", "0"), None)
    assert (shown.role, shown.text) == ("assistant", "2")
    with pytest.raises(DialoopError, match="Row 1 ends without"):
        environment.demonstrate(environment.tasks.get("train", "1"), None)


def test_a_saved_data_set_gives_its_splits_and_stays_on_disk(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(TRL_ROWS)
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk("saved")
    environment = load_environment("trl", {"dataset": "saved", "reward_funcs": "rewards.py:short"})
    assert environment.tasks.num_tasks("heldout") == 1
    assert environment.tasks.get("train", "3").row == TRL_ROWS[3]


def test_a_share_of_the_rows_is_held_out(folder: Path) -> None:
    rows = [{"prompt": f"{n}"} for n in range(200)]
    write_parquet(folder / "many.parquet", rows, row_group_size=7)
    tasks = load_environment(
        "trl",
        {"dataset": "many.parquet", "reward_funcs": "rewards.py:short", "heldout_fraction": 0.25},
    ).tasks
    shares = [{tasks.get(s, k).question for k in tasks.keys(s)} for s in ("train", "heldout")]
    assert not shares[0] & shares[1]
    assert sorted(map(int, shares[0] | shares[1])) == list(range(200))
    assert 20 < len(shares[1]) < 80
    with pytest.raises(DialoopError) as caught:
        tasks.get("train", tasks.keys("heldout")[0])
    assert caught.value.reason == "TASK_NOT_FOUND"


def test_rows_of_a_large_parquet_file_do_not_become_python_objects(tmp_path: Path) -> None:
    number = 100_000
    column = pyarrow.array([f"question {n} " + "x" * 400 for n in range(number)])
    parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "large.parquet")
    del column
    before = anonymous_kb()
    rows = rows_of(tmp_path / "large.parquet")
    assert rows[number - 1]["prompt"].startswith(f"question {number - 1} ")
    # As Python objects they would take over 60 MB.
    assert anonymous_kb() - before < 30_000


def anonymous_kb() -> int:
    """Memory of this process that no file backs."""
    text = Path("/proc/self/status").read_text("ascii")
    return int(text.partition("RssAnon:")[2].split()[0])


def check(options: dict[str, Any], use: str = "verl") -> InvalidConfig:
    """What `dialoop config check` says about an environment; it must say something."""
    config = parse_config(
        {"environment": {"use": use, "options": options}, "evaluation": {"num_tasks": 0}},
        source="test",
    )
    with working_in(Path.cwd()), pytest.raises(InvalidConfig) as caught:
        load_environments(config)
    return caught.value


JOB: dict[str, Any] = {
    "run": "brought",
    "collector": {"group_size": 4, "max_new_tokens": 12},
    "inference": {"max_model_len": 256},
    "train": {"num_steps": 2, "groups_per_train_step": 2, "pipeline_depth": 0},
    "evaluation": {"num_tasks": 2, "every": 0},
}


def write_documented_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Write the functions of docs/bring.md and rows for them; return its jobs' tables."""
    page = (Path(__file__).parents[3] / "docs" / "bring.md").read_text("utf-8")
    blocks = re.findall(r"<!-- test: bring -->\n```(\w+)\n(.*?)```", page, re.S)
    for language, text in blocks:
        if language == "python":
            (folder / text.partition("\n")[0].removeprefix("# ")).write_text(text, "utf-8")
    prompts = [{**row, "target": str(row["target"])} for row in CHAT_ROWS]
    write_parquet(folder / "train.parquet", VERL_ROWS)
    write_parquet(folder / "test.parquet", VERL_ROWS)
    write_parquet(folder / "prompts.parquet", prompts * 4)
    lines = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": row["target"]}]}
        for row in prompts
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines * 4)), "utf-8")
    sums = [{"question": f"{n}+1", "answer": f"{n + 1}"} for n in range(20)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, sums)), "utf-8")
    monkeypatch.chdir(folder)
    return [tomllib.loads(text) for kind, text in blocks if kind == "toml"]


async def test_the_documented_examples_pass_the_check_and_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = write_documented_files(tmp_path, monkeypatch)
    uses = ["verl", "trl", "messages", "jsonl", "own_tasks.py:make"]
    assert [job["environment"].get("use", "jsonl") for job in jobs] == uses
    for job in jobs:
        config = parse_config(job, source="docs")
        (environment,) = load_environments(config)
        check_functions(config)
        key = environment.tasks.keys("train")[0]
        assert (await play(environment, "12", key=key)).rewards


WEIGHTS = {"compute_score": 1.0, "near": 1.0, "brief": 0.1, "overlap": 1.0}


def score_directly(use: str, row: dict[str, Any], text: str) -> dict[str, float]:
    """Call the page's functions with a row, as their own library does."""
    if use == "verl":
        function = load_attribute("verl_rewards.py:compute_score", what="reward function")
        truth = row["reward_model"]["ground_truth"]
        result = function(row["data_source"], text, truth, row["extra_info"])
        return {"compute_score": result["score"], "acc": float(result["acc"])}
    functions = ("trl_rewards.py:near", "trl_rewards.py:brief")
    functions = functions if use == "trl" else ("chat_rewards.py:overlap",)
    metrics: dict[str, float] = {}
    messages = row.get("prompt") or row["messages"][:-1]
    columns = {"target": [row.get("target")], "log_metric": metrics.__setitem__}
    if use == "messages":
        columns["reference"] = [row["messages"][-1]["content"]]
    rewards: dict[str, float] = {}
    for path in functions:
        function = load_attribute(path, what="reward function")
        completion = [{"role": "assistant", "content": text}]
        (value,) = call_now(function, prompts=[messages], completions=[completion], **columns)
        rewards |= {} if value is None else {function.__name__: value}
    return rewards | metrics


@pytest.mark.heavy(reason="three jobs in this process, each trains two steps")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_rewards_of_a_job_are_those_of_the_functions_called_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    table = write_documented_files(tmp_path, monkeypatch)[number]["environment"]
    # The tiny model has a vocabulary for sums alone; its answers differ all the same.
    result = dialoop_ops.train({**JOB, "environment": table}, in_process=True, quiet=True)
    assert result.summary["num_train_steps"] == 2
    assert result.summary["trajectories"]["trained"] >= 8
    options = table["options"]
    train = rows_of(options.get("train_files") or options.get("dataset") or options["path"])
    compared = 0
    for line in (result.run_dir / "trajectories.jsonl").read_text("utf-8").splitlines():
        played = json.loads(line)
        (turn,) = played["turns"]
        row = dict(train[int(played["task_key"])])
        expected = score_directly(table["use"], row, played["messages"][-1]["content"])
        recorded = {name: value * WEIGHTS.get(name, 1.0) for name, value in expected.items()}
        assert turn["rewards"] == pytest.approx(recorded, rel=1e-5)
        counted = sum(value for name, value in recorded.items() if name in WEIGHTS)
        assert played["reward"] == pytest.approx(counted, rel=1e-5)
        compared += 1
    assert compared >= 8


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.pop("reward_model"), "no column 'reward_model'"),
        (lambda r: r.update(prompt="1+1"), "column 'prompt' is '1+1' (a str)"),
        (lambda r: r.update(prompt=[]), "column 'prompt' is [] (a list)"),
        (lambda r: r.update(data_source=3), "column 'data_source' is 3 (a int)"),
        (lambda r: r.update(reward_model="72"), "column 'reward_model' is '72' (a str)"),
        (lambda r: r.update(extra_info="none"), "column 'extra_info' is 'none' (a str)"),
    ],
)
def test_a_file_without_the_columns_is_refused_by_name(
    folder: Path, change: Change, words: str
) -> None:
    rows = [dict(row) for row in VERL_ROWS]
    for row in rows:
        change(row)
    write_parquet(folder / "bad.parquet", rows)
    error = check({"train_files": "bad.parquet", "compute_score": "rewards.py:compute_score"})
    assert words in error.message
    assert "bad.parquet" in error.message
    assert error.reason == "BAD_ROW"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(prompt=None), "column 'prompt' is missing or null"),
        (lambda r: r.update(reward_model={"style": "rule", "ground_truth": None}), "ground_truth"),
        (lambda r: r.update(prompt=[{"role": "user", "content": None}]), "column 'prompt'"),
        (lambda r: r.update(prompt=[{"role": "asistant", "content": "x"}]), "role 'asistant'"),
    ],
)
def test_a_malformed_row_is_named_with_its_number_and_column(
    folder: Path, change: Change, words: str
) -> None:
    rows = [dict(row) for row in VERL_ROWS]
    change(rows[4])
    write_parquet(folder / "bad.parquet", rows)
    error = check({"train_files": "bad.parquet", "compute_score": "rewards.py:compute_score"})
    assert "row 4 of bad.parquet" in error.message
    assert words in error.message


def test_a_line_of_another_type_is_named(folder: Path) -> None:
    lines = [json.dumps({"messages": [{"role": "user", "content": "1"}]}), '{"messages": 3}']
    (folder / "bad.jsonl").write_text("\n".join(lines), "utf-8")
    error = check({"path": "bad.jsonl"}, use="messages")
    assert "line 2 of bad.jsonl: column 'messages' is 3 (a int)" in error.message


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("other_arguments", "cannot be called with data_source, solution_str"),
        ("text_score", "returned '1.0' (a str), not a number"),
        ("no_score", "a dict without 'score', with acc"),
        (
            "raises",
            "fails for task 0 and the answer 'I do not know.': ValueError at rewards.py, line",
        ),
        ("nothing", "has no attribute 'nothing'"),
        ("endless", "gives inf for task 0 and the answer 'I do not know.'"),
    ],
)
def test_a_compute_score_of_another_form_is_refused_before_anything_starts(
    folder: Path, function: str, words: str
) -> None:
    error = check({"train_files": "verl.parquet", "compute_score": f"rewards.py:{function}"})
    assert words in error.message
    assert f"rewards.py:{function}" in error.message


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("one_number", "returned 1.0 (a float), not a list"),
        ("two_numbers", "returned 2 rewards for 1 completion"),
        ("texts", "returned 'good' (a str), not a number"),
        ("wants_ids", "needs completion_ids, which Dialoop does not give"),
        ("wants_state", "needs trainer_state, which Dialoop does not give"),
        ("wants_difficulty", "missing a required argument: 'difficulty'"),
    ],
)
def test_a_reward_func_of_another_form_is_refused_before_anything_starts(
    folder: Path, function: str, words: str
) -> None:
    error = check({"dataset": "trl.parquet", "reward_funcs": f"rewards.py:{function}"}, use="trl")
    assert words in error.message
    assert f"rewards.py:{function}" in error.message


def test_a_reward_model_and_a_wrong_number_of_weights_are_refused(folder: Path) -> None:
    error = check({"dataset": "trl.parquet", "reward_funcs": "org/model"}, use="trl")
    assert "'org/model', which is no function" in error.message
    options = {"dataset": "trl.parquet", "reward_funcs": "rewards.py:short", "reward_weights": []}
    assert "0 numbers and reward_funcs 1 functions" in check(options, use="trl").message


def test_a_missing_file_and_package_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = check({"train_files": "no.parquet", "compute_score": "rewards.py:compute_score"})
    assert error.reason == "DATA_UNREADABLE"
    error = check({"train_files": "verl.parquet", "compute_score": "no.py:compute_score"})
    assert "there is no file" in error.message
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    error = check({"train_files": "verl.parquet", "compute_score": "rewards.py:compute_score"})
    assert error.reason == "PACKAGE_MISSING"
    assert 'pip install "dialoop[datasets]"' in error.remedy
