"""Facts of task sources: endless pages, fixed splits, and files that say where they are broken."""

import copy
import gc
import json
import pickle
import subprocess
import sys
import tracemalloc
from collections import Counter

import pytest
from dialoop.environments import ArithmeticTasks, JsonlTasks, load_environment
from dialoop.environments.tasks import stored
from dialoop.environments.tasks.source import permute
from dialoop.errors import InvalidConfig, InvalidInput, NotFound

TASKS = ArithmeticTasks()
SMALL = ArithmeticTasks(low=10, high=14, num_heldout=1)


def take(tasks, count: int, size: int, **options) -> list[tuple[int, str]]:
    refs, token = [], ""
    while len(refs) < count:
        page = tasks.page("train", page_token=token, page_size=size, **options)
        refs += [(ref.epoch, ref.key) for ref in page.tasks]
        token = page.next_page_token
    return refs[:count]


def test_heldout_is_256_problems_and_no_pair_of_numbers_is_in_both_splits():
    train, heldout = (
        {tuple(sorted(key.split("+"))) for key in TASKS.keys(split)}
        for split in ("train", "heldout")
    )
    assert TASKS.num_tasks("heldout") == 256
    assert 7000 < TASKS.num_tasks("train") < 7600
    assert not train & heldout


def test_splits_are_the_same_in_every_process():
    code = (
        "from dialoop.environments import ArithmeticTasks as A; t = A(); "
        "print(t.keys('heldout')[:3], t.page('train', page_size=3, shuffle_seed=5).tasks)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_a_problem_has_its_result():
    key = TASKS.keys("train")[0]
    task = TASKS.get("train", key)
    assert task.question == key
    assert int(task.answer) == sum(map(int, key.split("+")))


def test_subtraction_has_no_negative_results():
    tasks = ArithmeticTasks(operations="-")
    answers = [int(tasks.get("train", key).answer) for key in tasks.keys("train")[:500]]
    assert min(answers) >= 0


@pytest.mark.parametrize("bad", [{"operations": "*"}, {"low": 5, "high": 4}, {"high": 12}])
def test_impossible_arithmetic_is_rejected(bad):
    with pytest.raises(InvalidConfig):
        ArithmeticTasks(**bad)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("seed", [0, 9])
def test_pages_run_on_and_each_epoch_holds_each_task_once(size, seed):
    num = SMALL.num_tasks("train")
    refs = take(SMALL, 3 * num, size, shuffle_seed=seed)
    assert refs == take(SMALL, 3 * num, 5, shuffle_seed=seed)
    for epoch in range(3):
        keys = [key for e, key in refs if e == epoch]
        assert Counter(keys) == Counter(SMALL.keys("train"))


def test_seed_zero_keeps_the_order_and_others_shuffle_each_epoch_anew():
    num = SMALL.num_tasks("train")
    keys = [key for _, key in take(SMALL, 2 * num, num, shuffle_seed=3)]
    assert [key for _, key in take(SMALL, num, num)] == list(SMALL.keys("train"))
    assert keys[:num] != keys[num:]
    assert keys[:num] != list(SMALL.keys("train"))


def test_one_epoch_ends():
    num = SMALL.num_tasks("train")
    page = SMALL.page("train", page_size=num - 1, one_epoch=True)
    assert len(page.tasks) == num - 1
    last = SMALL.page("train", page_token=page.next_page_token, page_size=9, one_epoch=True)
    assert (len(last.tasks), last.next_page_token) == (1, "")
    assert SMALL.page("train", page_token="1:0", one_epoch=True).tasks == ()


@pytest.mark.parametrize(
    "token", ["x", "1", "1:", ":1", "-1:0", "0:999999", "0:1:2", "²:1", "9" * 50]
)
def test_foreign_page_tokens_are_rejected(token):
    with pytest.raises(InvalidInput) as caught:
        TASKS.page("train", page_token=token)
    assert caught.value.reason == "BAD_PAGE_TOKEN"


@pytest.mark.parametrize("size", [-1, 10_001])
def test_page_sizes_out_of_range_are_rejected(size):
    with pytest.raises(InvalidInput):
        TASKS.page("train", page_size=size)


def test_unknown_splits_and_tasks_are_not_found():
    with pytest.raises(NotFound) as caught:
        TASKS.page("test")
    assert caught.value.reason == "SPLIT_NOT_FOUND"
    with pytest.raises(NotFound) as caught:
        TASKS.get("train", TASKS.keys("heldout")[0])
    assert caught.value.reason == "TASK_NOT_FOUND"
    assert TASKS.require_split("") == "train"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000])
def test_permutations_are_permutations(size):
    assert sorted(permute(i, size, "seed") for i in range(size)) == list(range(size))


def write(path, *lines: str):
    path.write_text("\n".join(lines) + "\n")
    return path


GOOD = '{"question": "3+4?", "answer": "so\\n#### 7", "level": 2}'


def test_a_file_gives_tasks_by_id_or_line_number(tmp_path):
    path = write(tmp_path / "t.jsonl", GOOD, "", '{"id": "b", "question": "q", "answer": 5}')
    tasks = JsonlTasks(path)
    assert (tasks.splits, [*tasks.keys("train")]) == (("train",), ["1", "b"])
    assert tasks.get("train", "1").metadata == {"level": "2"}
    assert tasks.get("train", "b").answer == "5"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{oops", "not JSON"),
        ("[1]", "a JSON list begins there"),
        ("[", "a JSON list begins there"),
        ("3", "it is no JSON object: 3"),
        ('{"question": "q", "question": "r"}', "the key 'question' stands twice"),
        ('{"question": "q \\ud83d", "answer": "1"}', "question has half a character"),
        ('{"answer": "1"}', "column 'question' is missing"),
        ('{"question": " ", "answer": "1"}', "column 'question' is ' '"),
        ('{"question": "q"}', "column 'answer' is missing"),
        ('{"question": "q", "answer": NaN}', "column 'answer' is nan"),
        ('{"question": "q", "answer": true}', "column 'answer' is True"),
        ('{"question": "q", "answer": "#### "}', "column 'answer' is '#### '"),
        ('{"question": "q", "answer": "1", "id": [1]}', r"column 'id' is \[1\]"),
        ('{"question": "q", "answer": "1", "id": "1"}', "'1', which is the key of line 1 of"),
    ],
)
def test_a_broken_line_is_named_with_its_file_and_number(tmp_path, line, why):
    path = write(tmp_path / "t.jsonl", GOOD, line)
    with pytest.raises(InvalidConfig, match=why) as caught:
        JsonlTasks(path)
    assert str(path) in caught.value.message
    assert caught.value.message.lower().startswith("line 2 of ")
    assert caught.value.remedy


def test_a_question_may_hold_any_line_separator(tmp_path):
    path = write(tmp_path / "t.jsonl", '{"question": "a\u2028b\x85c", "answer": "1"}', GOOD)
    assert [*JsonlTasks(path).keys("train")] == ["1", "2"]


def test_a_file_stays_on_disk(tmp_path):
    lines = [json.dumps({"question": f"{i}?" * 50, "answer": str(i)}) for i in range(20_000)]
    path = write(tmp_path / "t.jsonl", *lines)
    tracemalloc.start()
    try:
        tasks = JsonlTasks(path, heldout_fraction=0.1)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 50 * len(lines)  # bytes; the file has several hundred a line
    assert tasks.get("train", tasks.keys("train")[-1]).question.startswith("19999?")


def test_the_file_that_was_checked_is_the_file_that_is_read(tmp_path):
    path = write(tmp_path / "t.jsonl", GOOD, '{"id": "b", "question": "q", "answer": "5"}')
    tasks = JsonlTasks(path)
    write(tmp_path / "new.jsonl", GOOD).replace(path)
    assert tasks.get("train", "b").question == "q"
    tasks = JsonlTasks(path)
    path.write_text("x" * path.stat().st_size)
    with pytest.raises(InvalidConfig, match=r"Line 1 of .* cannot be read"):
        tasks.get("train", "1")


@pytest.mark.parametrize("again", [copy.deepcopy, lambda tasks: pickle.loads(pickle.dumps(tasks))])
def test_a_copy_outlives_the_original_and_reads_its_own_file(tmp_path, monkeypatch, again):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.jsonl", GOOD, '{"id": "b", "question": "q", "answer": "5"}')
    tasks = JsonlTasks("t.jsonl", heldout_fraction=0.5)
    splits = {split: [*tasks.keys(split)] for split in tasks.splits}
    state, same = pickle.dumps(tasks), again(tasks)
    del tasks
    gc.collect()
    monkeypatch.chdir(tmp_path.parent)
    with write(tmp_path / "other.jsonl", GOOD, GOOD).open():  # takes the number of a closed file
        assert {split: [*same.keys(split)] for split in same.splits} == splits
    (tmp_path / "t.jsonl").unlink()
    with pytest.raises(InvalidConfig, match="cannot be read: No such file"):
        pickle.loads(state)


def test_keys_with_the_same_hash_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "hash_of", lambda _key: 7)
    rows = [{"id": name, "question": f"{name}?", "answer": "1"} for name in "abc"]
    tasks = JsonlTasks(write(tmp_path / "t.jsonl", *map(json.dumps, rows)))
    assert [tasks.get("train", key).question for key in "cab"] == ["c?", "a?", "b?"]
    assert "d" not in tasks.keys("train")
    with pytest.raises(InvalidConfig, match="'b', which is the key of line 2"):
        JsonlTasks(write(tmp_path / "u.jsonl", *map(json.dumps, [*rows, rows[1]])))


def test_missing_and_empty_files_are_rejected(tmp_path):
    with pytest.raises(InvalidConfig, match="cannot be read"):
        JsonlTasks(tmp_path / "none.jsonl")
    with pytest.raises(InvalidConfig, match=r"\.jsonl has no tasks"):
        JsonlTasks(write(tmp_path / "e.jsonl", ""))


def test_heldout_tasks_come_from_a_file_or_by_hash(tmp_path):
    lines = [f'{{"question": "q{i}", "answer": "{i}"}}' for i in range(200)]
    path = write(tmp_path / "t.jsonl", *lines)
    by_hash = JsonlTasks(path, heldout_fraction=0.2)
    train, heldout = set(by_hash.keys("train")), set(by_hash.keys("heldout"))
    assert not train & heldout
    assert len(train | heldout) == 200
    assert 20 < len(heldout) < 60
    other = write(tmp_path / "h.jsonl", GOOD)
    assert JsonlTasks(path, heldout_path=other).num_tasks("heldout") == 1
    with pytest.raises(InvalidConfig):
        JsonlTasks(path, heldout_path=other, heldout_fraction=0.1)


def test_environments_load_by_name_and_by_import_path(tmp_path, monkeypatch):
    write(
        tmp_path / "my_own_env.py",
        "from dialoop.environments import ArithmeticTasks, ChatEnv",
        "made = ChatEnv(name='made', tasks=ArithmeticTasks())",
        "def make(turns=1): return made",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_environment("arithmetic", {"max_turns": 2}).traits.max_turns == 2
    assert load_environment("my_own_env:made").name == "made"
    assert load_environment("my_own_env:make", {"turns": 2}).name == "made"
    path = write(tmp_path / "t.jsonl", GOOD)
    options = {"path": str(path), "ignore_columns": ["level"]}
    assert load_environment("jsonl", options).tasks.num_tasks("train") == 1


@pytest.mark.parametrize(
    ("use", "options"),
    [
        ("nope", {}),
        ("no_such_module_at_all:x", {}),
        ("json:nothing", {}),
        ("json:dumps", {"obj": 1}),
        ("math:pi", {}),
        ("math:pi", {"a": 1}),
        ("arithmetic", {"unknown": 1}),
        ("jsonl", {}),
    ],
)
def test_what_is_no_environment_is_rejected(use, options):
    with pytest.raises(InvalidConfig):
        load_environment(use, options)
