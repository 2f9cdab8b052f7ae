"""Nothing in a row is ignored: what no reader knows or wants is refused, with place and cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from dialoop.chat import Message
from dialoop.environments import ChatEnv, load_environment
from dialoop.environments.tasks.files import rows_of
from dialoop.errors import InvalidConfig
from dialoop_ops.stack.user_code import demonstrations_in_files, load_environments, working_in
from dialoop_services.config.file import parse_config
from dialoop_services.trainer.data.demonstrations import read_demonstrations
from hypothesis import assume, given, settings
from hypothesis import strategies as st

Row = dict[str, Any]

ASK = {"role": "user", "content": "3+4?"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "content": "7", "tool_call_id": "c"}
SAID = {"role": "assistant", "content": "7"}
TALK = [ASK, CALLED, TOLD, SAID]
IFEVAL = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
FUNCTIONS = """
SEEN = []


def any_column(prompts, completions, **kwargs):
    SEEN.append(kwargs)
    return [1.0]


def target_alone(prompts, completions, target):
    SEEN.append({"target": target})
    return [float(len(target[0]))]


def score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
"""
ROWS: dict[str, Row] = {
    "jsonl": {"question": "3+4?", "answer": "7"},
    "dialoop.tasks.gsm8k:gsm8k": {"question": "3+4?", "answer": "#### 7"},
    "dialoop.tasks.maths:maths": {"problem": "3+4?", "solution": "$7$", "level": "1"},
    "dialoop.tasks.ifeval:ifeval": {"prompt": "No comma.", **IFEVAL},
    "trl": {"prompt": [ASK], "target": "7"},
    "verl": {
        "data_source": "sums",
        "prompt": [ASK],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 1},
    },
    "messages": {"messages": TALK, "target": "7"},
    "sft": {"messages": TALK, "tools": [{"type": "function", "function": {"name": "add"}}]},
}
"""A row of each format that a config can name, as its reader wants it."""
OPTIONS: dict[str, Row] = {
    "trl": {"reward_funcs": "rewards.py:target_alone"},
    "verl": {"compute_score": "rewards.py:score"},
    "messages": {"reward_funcs": "rewards.py:target_alone"},
}
FILE_KEYS = {"trl": "dataset", "verl": "train_files"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns")
    (folder / "rewards.py").write_text(FUNCTIONS, "utf-8")
    return folder


def write(file: Path, *rows: Row) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def load(use: str, file: Path, **options: Any) -> Any:
    """Read the rows of a file as `dialoop config check` does: the environment or demonstrations."""
    section: dict[str, Any] = {"evaluation": {"num_tasks": 0}}
    if use == "sft":
        section |= {"train": {"mode": "sft"}, "sft": {"file": str(file), **options}}
        return [*demonstrations_in_files(parse_config(section, source="test"))]
    options = {FILE_KEYS.get(use, "path"): str(file), **OPTIONS.get(use, {}), **options}
    section["environment"] = {"use": use, "options": options}
    with working_in(file.parent):
        (environment,) = load_environments(parse_config(section, source="test"))
    return environment


def refusal(use: str, file: Path, **options: Any) -> InvalidConfig:
    with pytest.raises(InvalidConfig) as caught:
        load(use, file, **options)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("use", ROWS)
def test_columns_that_nothing_reads_are_named_at_once_with_a_line_to_paste(
    folder: Path, use: str
) -> None:
    row = ROWS[use]
    file = write(folder / "rows.jsonl", row, {**row, "source": "web", "uid": 3}, {**row, "z": None})
    error = refusal(use, file)
    assert error.reason == "UNKNOWN_COLUMN"
    assert f"'source', 'uid' (line 2 of {file}); 'z' (line 3 of {file})" in error.message
    table = "[sft]" if use == "sft" else "the options of [environment]"
    assert f'write ignore_columns = ["source", "uid", "z"] in {table}' in error.remedy
    assert load(use, file, ignore_columns=["source", "uid", "z"])


def test_a_misspelt_column_is_told_the_one_that_it_is_near_to(folder: Path) -> None:
    file = write(folder / "rows.jsonl", {**ROWS["verl"], "abilty": "math"} | {"ability": None})
    del (row := dict(ROWS["verl"]))["ability"]
    error = refusal("verl", write(file, {**row, "abilty": "math"}))
    assert "Is 'abilty' 'ability'? " in error.remedy
    error = refusal("jsonl", write(file, {"question": "q", "anwser": "7"}))
    assert "no column 'answer'" in error.message
    assert "'question', 'anwser'" in error.message


@pytest.mark.parametrize("name", ["prompts", "completions", "log_metric", "completion_ids"])
@pytest.mark.parametrize("function", ["any_column", "target_alone"])
def test_a_column_never_stands_for_what_the_policy_wrote(
    folder: Path, name: str, function: str
) -> None:
    file = write(folder / "rows.jsonl", {**ROWS["trl"], name: "a stored answer"})
    options = {"reward_funcs": f"rewards.py:{function}"}
    error = refusal("trl", file, **options)
    assert error.reason == "UNKNOWN_COLUMN"
    assert f"{name!r}: " in error.message
    environment = load("trl", file, **options, ignore_columns=[name])
    seen = environment.transforms[-1].functions[0].function.__globals__["SEEN"]
    assert "a stored answer" not in str(seen)


@pytest.mark.parametrize(
    ("use", "name", "why"),
    [
        ("trl", "completion", "none of the data set is trained"),
        ("trl", "images", "a prompt is messages of text"),
        ("messages", "tools", "the policy would not see them"),
        ("messages", "reference", "gets the last message under that name"),
        ("verl", "agent_name", "answered in one turn"),
        ("verl", "extra_info", "Give rows that are answered in one turn"),
        ("verl", "reward_model", "column 'reward_model.style' is 'model'"),
        ("dialoop.tasks.gsm8k:gsm8k", "text", "'text' says the same"),
    ],
)
def test_a_column_that_contradicts_the_format_is_refused_with_the_cause(
    folder: Path, use: str, name: str, why: str
) -> None:
    values = {"extra_info": {"tools_kwargs": {"a": 1}}, "reward_model": {"style": "model"}}
    row = {**ROWS[use], name: values.get(name, "x")}
    assert why in str(refusal(use, write(folder / "rows.jsonl", row)))


async def test_a_function_gets_the_columns_that_it_takes(folder: Path) -> None:
    file = write(folder / "rows.jsonl", {**ROWS["trl"], "level": 2})
    both = ["rewards.py:any_column", "rewards.py:target_alone"]
    environment = load("trl", file, reward_funcs=both)
    assert isinstance(environment, ChatEnv)
    opening = environment.reset(environment.tasks.get("train", "0"), seed=0)
    answer = opening.history.respond(Message(role="assistant", content="8"))
    outcome = await environment.step(opening.episode, answer)
    assert {r.name: r.value for r in outcome.rewards} == {"any_column": 1.0, "target_alone": 1.0}
    seen = environment.transforms[-1].functions[0].function.__globals__["SEEN"]
    assert (seen[-2]["target"], seen[-2]["level"]) == (["7"], [2])
    assert seen[-1] == {"target": ["7"]}


def test_rows_of_preferences_have_no_prompt_that_could_be_played(folder: Path) -> None:
    file = write(folder / "rows.jsonl", {"chosen": [ASK, SAID], "rejected": [ASK, TOLD]})
    error = refusal("trl", file)
    assert f"no column 'prompt': line 1 of {file} has 'chosen', 'rejected'" in error.message
    error = refusal("trl", write(file, {"prompt": [ASK], "chosen": "7", "rejected": "8"}))
    assert "'chosen', 'rejected' (line 1" in error.message
    error = refusal("sft", write(file, {"prompt": "3+4?", "completion": "7"}))
    assert "no column 'messages': line 1" in error.message


@pytest.mark.parametrize("use", ["jsonl", "dialoop.tasks.gsm8k:gsm8k", "trl", "messages", "sft"])
@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_rows_of_every_format_may_be_parquet_or_a_saved_data_set(
    tmp_path: Path, use: str, kind: str
) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "rewards.py").write_text(FUNCTIONS, "utf-8")
    rows = [deepcopy(ROWS[use]) for _ in range(4)]
    if use == "sft":  # as Parquet has them: a struct has the fields of all rows
        rows[0]["tools"] = []
        rows[1]["messages"] = [ASK, {**SAID, "weight": 1}]
    saved = datasets.Dataset.from_list([{**row, "uid": 1} for row in rows])
    if kind == "saved":
        file = tmp_path / "saved"
        datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(str(file))
    else:
        file = tmp_path / "rows.parquet"
        saved.to_parquet(str(file))
    assert f"'uid' (row 0 of {file})" in refusal(use, file).message
    read = load(use, file, ignore_columns=["uid"])
    if use != "sft":
        assert read.tasks.num_tasks("train") == 4
        assert "heldout" in read.tasks.splits or kind == "parquet"
        return
    ((first, second, third, _),) = read
    assert third.history[1].tool_calls[0].arguments_json == '{"a": 3}'
    assert (first.tools, third.tools[0]["function"]) == ((), {"name": "add"})
    assert [m.text for m in second.history] == ["3+4?", "7"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ('{"question": "é", "answer": "1"}'.encode("latin-1"), "Line 1 of .* byte 15 is 0xe9"),
        ('{"question": "é", "answer": "1"}'.encode("utf-16"), "the file is UTF-16"),
        (b'{"question": "q",\n"answer": "1"}', r"Line 1 .* not JSON at character 1. \(.*\): {"),
        (b'[\n{"question": "q", "answer": "1"}\n]', "Line 1 of .* a JSON list begins there"),
        (b'{"question": "q", "answer": "1", "answer": "2"}', "the key 'answer' stands twice"),
        (b"[" * 100_000, "a JSON list begins"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_not_utf_8_lines_of_json_is_told_with_line_and_cause(
    tmp_path: Path, data: bytes, why: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(data)
    for read in (rows_of, read_demonstrations, lambda path: load("jsonl", path)):
        with pytest.raises(InvalidConfig, match=why):
            read(file)


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"question": "q", "answer": "1"}')
    assert load_environment("jsonl", {"path": str(tmp_path / "rows.jsonl")}).tasks.splits


def test_a_text_of_parquet_that_is_not_utf_8_is_told_by_its_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    raw = pyarrow.array([b"3+4?", b"caf\xe9"], pyarrow.binary())
    column = pyarrow.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column, "target": column}), file)
    (tmp_path / "rewards.py").write_text(FUNCTIONS, "utf-8")
    assert f"Row 1 of {file}" in refusal("trl", file).message


# The gate: one unknown or contradicting thing in one row of each format.

names = st.from_regex(r"[a-z]{1,3}_[a-z]{1,8}", fullmatch=True)
values = st.recursive(
    st.booleans() | st.integers(-9, 9) | st.text("ab", min_size=1, max_size=4),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=2) | st.dictionaries(names, inner, min_size=1)
    ),
    max_leaves=3,
)
Spoil = Callable[[st.DataObject, str, Row], "tuple[Row | bytes, str]"]
"""Returns a spoilt row, or its bytes, and a word of what the refusal has to name."""


def unknown_column(data: st.DataObject, use: str, row: Row) -> tuple[Row | bytes, str]:
    name = data.draw(names.filter(lambda name: name not in ("extra_info", "data_source")))
    return {**row, name: data.draw(values | st.none())}, name


def column_of_another_type(data: st.DataObject, use: str, row: Row) -> tuple[Row | bytes, str]:
    optional = ("ability", "extra_info", "target", "tools", "level", "key")
    name = data.draw(st.sampled_from([name for name in row if name not in optional]))
    wrong = data.draw(st.none() | st.booleans() | st.just([]) | st.just({"a_b": 1}))
    return {**row, name: wrong}, name


def without_a_column(data: st.DataObject, use: str, row: Row) -> tuple[Row | bytes, str]:
    optional = ("ability", "extra_info", "target", "tools", "level", "key")
    name = data.draw(st.sampled_from([name for name in row if name not in optional]))
    return {other: value for other, value in row.items() if other != name}, name


def key_twice(data: st.DataObject, use: str, row: Row) -> tuple[Row | bytes, str]:
    name = data.draw(st.sampled_from(sorted(row)))
    more = f"{json.dumps(name)}: {json.dumps(data.draw(values))}, "
    return ("{" + more + json.dumps(row)[1:]).encode(), name


def no_utf_8(data: st.DataObject, use: str, row: Row) -> tuple[Row | bytes, str]:
    text = json.dumps(row).encode()
    place = data.draw(st.integers(0, len(text)))
    return text[:place] + b"\xe9" + text[place:], "UTF-8"


def half_a_character(data: st.DataObject, use: str, row: Row) -> tuple[Row | bytes, str]:
    half = chr(data.draw(st.integers(0xD800, 0xDFFF)))
    spoilt = deepcopy(row)
    places = [(spoilt, name) for name, value in spoilt.items() if isinstance(value, str)]
    places += [(m, "content") for m in _messages(spoilt)]
    where, name = data.draw(st.sampled_from(places))
    where[name] = f"a{half}b"
    return spoilt, name


def cut_off(data: st.DataObject, use: str, row: Row) -> tuple[Row | bytes, str]:
    text = json.dumps(row).encode()
    return text[: data.draw(st.integers(1, len(text) - 1))], "not JSON"


def _messages(row: Row) -> list[Row]:
    messages: list[Row] = row.get("messages") or row.get("prompt")
    return messages if isinstance(messages, list) else []


def unknown_field(data: st.DataObject, use: str, row: Row) -> tuple[Row | bytes, str]:
    spoilt, name = deepcopy(row), data.draw(names.filter(lambda name: name != "tool_calls"))
    assume(_messages(spoilt))
    data.draw(st.sampled_from(_messages(spoilt)))[name] = data.draw(values)
    return spoilt, name


def wrong_weight(data: st.DataObject, use: str, row: Row) -> tuple[Row | bytes, str]:
    spoilt = deepcopy(row)
    assume(_messages(spoilt))
    message = data.draw(st.sampled_from(_messages(spoilt)))
    allowed = use in ("messages", "sft") and message["role"] == "assistant"
    weight = data.draw(
        st.sampled_from([True, False, 0.5, 2, -1, "0", [0]] + [0, 1] * (not allowed))
    )
    message["weight"] = weight
    return spoilt, "weight"


def wrong_call(data: st.DataObject, use: str, row: Row) -> tuple[Row | bytes, str]:
    spoilt = deepcopy(row)
    calls = [call for message in _messages(spoilt) for call in message.get("tool_calls", ())]
    assume(calls)
    call = data.draw(st.sampled_from(calls))
    where = data.draw(st.sampled_from(["call", "function", "arguments", "name"]))
    if where == "arguments":
        wrong = ['{"a": 1, "a": 2}', '{"a": ', "[1]", "3", "", 3, None, ["a"]]
        call["function"]["arguments"] = data.draw(st.sampled_from(wrong))
    elif where == "name":
        call["function"]["name"] = data.draw(st.none() | st.integers())
    else:
        name = data.draw(names)
        (call if where == "call" else call["function"])[name] = data.draw(values)
    return spoilt, "tool_calls[0]"


SPOILS: tuple[Spoil, ...] = (
    *(unknown_column, column_of_another_type, without_a_column, key_twice, no_utf_8),
    *(half_a_character, cut_off, unknown_field, wrong_weight, wrong_call),
)


@pytest.mark.parametrize("use", ROWS)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_one_unknown_or_contradicting_thing_in_a_row_never_passes_in_silence(
    folder: Path, use: str, data: st.DataObject
) -> None:
    spoil = data.draw(st.sampled_from(SPOILS))
    spoilt, word = spoil(data, use, ROWS[use])
    line = data.draw(st.integers(0, 2))
    rows = [json.dumps(ROWS[use]).encode()] * 3
    rows[line] = spoilt if isinstance(spoilt, bytes) else json.dumps(spoilt).encode()
    file = folder / "spoilt.jsonl"
    file.write_bytes(b"\n".join(rows))
    error = refusal(use, file)
    assert word in error.message
    assert f"line {line + 1} of {file}" in error.message.replace("Line", "line")
