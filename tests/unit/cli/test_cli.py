"""The `dialoop` command without a stack: what it prints, and how it refuses."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from dialoop.errors import DialoopError
from dialoop.running_stacks import (
    find_stack,
    find_stacks,
    read_announcement,
    require_addresses,
)
from dialoop_ops.cli import doctor as doctor_module
from dialoop_ops.cli.main import main
from dialoop_services.config.file import load_config, toml_of

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Never the repository's runs/: somebody may be training there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@contextmanager
def living(name: str, pid: int, **addresses: str):
    """What a stack that lives keeps under runs/."""
    run_dir = Path("runs", name)
    run_dir.mkdir(parents=True)
    with Path("runs", f".{name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(str(pid))
        lock.flush()
        if addresses:
            (run_dir / "stack.json").write_text(json.dumps({"pid": pid, "addresses": addresses}))
        yield run_dir


def row(**fields) -> dict:
    segments = [
        {"start": 0, "length": 2, "source": "PROMPT", "lineage": None, "policy_version": None},
        {"start": 2, "length": 1, "source": "MODEL", "lineage": "main", "policy_version": 4},
    ]
    sequence = {
        "token_ids": [5, 8, 2],
        "segments": segments,
        "inference_logprobs": [-0.25],
        "advantage": 1.5,
        "fork_cause": "NONE",
    }
    return {
        "outcome": "trained",
        "label": "",
        "train_step": 3,
        "trajectory_id": "abc",
        "task_key": "1+2",
        "environment": "arithmetic",
        "reward": 1.0,
        "done_reason": "SUBMITTED",
        "num_tool_calls": 0,
        "messages": [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}],
        "sequences": [sequence],
        "failures": [],
    } | fields


def write_rows(*rows: dict) -> None:
    Path("trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_down_without_a_name_leaves_other_runs_alone(monkeypatch, capsys):
    killed = []
    monkeypatch.setattr(os, "kill", lambda *call: killed.append(call))
    with living("training", pid=os.getpid()):
        assert main(["down"]) == 1
    assert killed == []
    assert "Running: training." in capsys.readouterr().err


def test_a_run_in_use_is_not_started_again_and_keeps_its_log(capsys):
    with living("default", pid=12345):
        Path("runs/default.log").write_text("of the living one")
        assert main(["up", "--detach"]) == 2
    assert "in use by process 12345" in capsys.readouterr().err
    assert Path("runs/default.log").read_text() == "of the living one"


def test_down_that_does_not_end_in_time_says_so(monkeypatch, capsys):
    killed = []
    monkeypatch.setattr(os, "kill", lambda *call: killed.append(call))
    with living("default", pid=12345):
        assert main(["down", "--timeout", "0"]) == 1
    assert [pid for pid, _ in killed] == [12345]
    assert "still stopping" in capsys.readouterr().err


def test_status_asks_which_of_several_stacks(capsys):
    with living("one", pid=1), living("two", pid=2):
        assert main(["status"]) == 2
        assert "Name one of: one, two." in capsys.readouterr().err
        assert main(["status", "two"]) == 1
    assert "starting or stopping" in capsys.readouterr().out


def test_a_stack_is_alive_as_long_as_it_holds_its_lock():
    with living("mine", pid=77, replay="127.0.0.1:1") as run_dir:
        assert [stack.pid for stack in find_stacks(Path("runs"))] == [77]
        assert require_addresses(run_dir) == {"replay": "127.0.0.1:1"}
        assert read_announcement(run_dir, 78) is None
    assert find_stack(run_dir) is None
    with pytest.raises(DialoopError, match="No stack is serving"):
        require_addresses(run_dir)


def test_an_episode_is_played_by_hand(monkeypatch, capsys):
    answers = iter(["<request><Calculator>22+28<call>", "Result=50<submit>"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    assert main(["play", "arithmetic", "--split", "heldout", "--task", "22+28"]) == 0
    printed = capsys.readouterr().out
    assert "tool: 50<response>" in printed
    assert "submitted: reward 1 (result 1)" in printed


def test_an_environment_of_the_user_is_found_in_the_current_folder(monkeypatch, capsys):
    Path("mine_for_cli.py").write_text(
        "from dialoop.environments import arithmetic\n\ndef made(low):\n"
        "    return arithmetic(low=low, num_heldout=2)\n"
    )
    monkeypatch.setattr("builtins.input", lambda prompt: "Result=0<submit>")
    assert main(["play", "mine_for_cli:made", "--option", "low=50"]) == 0
    assert "reward 0" in capsys.readouterr().out


def test_input_that_ends_early_is_an_error_and_no_reward(monkeypatch, capsys):
    def end_input(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end_input)
    assert main(["play", "arithmetic"]) == 1
    assert "input ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "(3 of 3)"),
        (["--index", "0"], "(1 of 3)"),
        (["--worst"], "(2 of 3)"),
        (["--best"], "(1 of 3)"),
        (["--task", "2+2"], "task 2+2"),
        (["--id", "ffe"], "trajectory ffe1"),
        (["--label", "after_greedy"], "evaluation, after_greedy"),
        (["--outcome", "trained", "--worst"], "(2 of 2)"),
    ],
)
def test_show_finds_a_trajectory(arguments, shown, capsys):
    other = row(trajectory_id="ffe1", task_key="2+2", reward=0.0)
    write_rows(row(), other, row(outcome="evaluation", label="after_greedy", reward=0.5))
    assert main(["show", ".", *arguments]) == 0
    assert shown in capsys.readouterr().out


def test_show_says_what_each_episode_of_a_trial_earned_and_what_an_answer_missed(capsys):
    turns = [{"rewards": {"ifeval": 0.0}, "feedback": {"ifeval": "No comma.\x1b[2J"}}]
    write_rows(row(labels={"trial_rewards": "0 2"}, turns=turns))
    assert main(["show", "."]) == 0
    printed = capsys.readouterr().out
    assert "labels: trial_rewards = 0 2" in printed
    assert "ifeval: No comma.\\x1b[2J" in printed


@pytest.mark.parametrize(("which", "shown"), [("--worst", "trained1"), ("--best", "trained2")])
def test_show_prefers_what_was_trained(which, shown, capsys):
    played = {"outcome": "evaluation", "label": "before_greedy"}
    write_rows(
        row(trajectory_id="bad", reward=-1.0, **played),
        row(trajectory_id="trained1", reward=0.0),
        row(trajectory_id="trained2", reward=0.5),
        row(trajectory_id="good", reward=1.0, **played),
    )
    assert main(["show", ".", which]) == 0
    assert f"trajectory {shown} " in capsys.readouterr().out
    assert main(["show", ".", which, "--outcome", "evaluation"]) == 0
    assert "evaluation, before_greedy" in capsys.readouterr().out


def test_show_has_the_consoles_filters_and_lists_as_json(capsys):
    tool = {"owner": "TOOL", "reason": "TOOL_TIMEOUT", "message": "late"}
    other = row(trajectory_id="ffe1", reward=0.0, failures=[tool], environment="web")
    write_rows(row(), other, row(trajectory_id="last", messages=[]))
    for words, ids in (
        (["--reward", ":0.5"], ["ffe1"]),
        (["--owner", "ANY"], ["ffe1"]),
        (["--environment", "arithmetic", "--length", "1"], ["abc", "last"]),
        (["--version", "5:"], []),
        (["--text", "1+2"], ["abc", "ffe1"]),
    ):
        assert main(["show", ".", "--list", "--json", *words]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["trajectory_id"] for line in lines] == ids
    assert main(["show", ".", "--reward", "much"]) == 2
    assert "reward is 'much'" in capsys.readouterr().err
    assert main(["show", ".", "--json", "--worst"]) == 0
    assert json.loads(capsys.readouterr().out) == other


def test_show_prints_a_group_and_nothing_that_steers_the_terminal(capsys):
    answer = [{"role": "assistant", "content": "\x1b]0;title\x07red"}]
    group = [row(trajectory_id=name, group_id="g/1", messages=answer) for name in ("a1", "b2")]
    write_rows(*group, row(trajectory_id="c3", group_id="g/2"))
    assert main(["show", ".", "--group", "--id", "a1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "advantage" in head
    assert [line.split()[1] for line in lines] == ["a1", "b2"]
    assert all("\x1b" not in line and "red" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "trajectory d (4 of 4)"),
        (["--index", "0"], "trajectory a (1 of 4)"),
        (["--index", "-3"], "trajectory b (2 of 4)"),
        (["--best"], "trajectory b (2 of 4)"),
        (["--worst"], "trajectory c (3 of 4)"),
    ],
)
def test_show_reads_all_parts_of_a_run_in_their_order(arguments, shown, capsys):
    for part, (name, reward) in {
        "trajectories.000009.jsonl": ("a", 0.5),
        "trajectories.000010.jsonl": ("b", 1.0),
        "trajectories.1000000.jsonl": ("c", 0.0),
        "trajectories.jsonl": ("d", 0.5),
    }.items():
        Path(part).write_text(json.dumps(row(trajectory_id=name, reward=reward)) + "\n")
    assert main(["show", ".", *arguments]) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize("index", ["4", "-5", f"-{10**30}"])
def test_show_names_how_many_there_are_for_an_index_that_is_not(index, capsys):
    write_rows(row(), row(), row(), row())
    assert main(["show", ".", "--index", index]) == 2
    assert "4 trajectories match" in capsys.readouterr().err


def test_show_holds_no_trajectory_that_it_does_not_print(monkeypatch, capsys):
    class Counted(dict):
        alive = most = 0

        def __init__(self, *arguments):
            super().__init__(*arguments)
            Counted.alive += 1
            Counted.most = max(Counted.most, Counted.alive)

        def __del__(self):
            Counted.alive -= 1

    rows = (Counted(row(reward=float(n))) for n in range(50))
    monkeypatch.setattr("dialoop_ops.cli.show.read_rows", lambda *parts: rows)
    assert main(["show", ".", "--best"]) == 0
    assert "(50 of 50)" in capsys.readouterr().out
    assert Counted.most <= 4


def test_show_prints_each_token_with_what_training_knows_of_it(capsys):
    write_rows(row())
    assert main(["show", "trajectories.jsonl", "--tokens"]) == 0
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert cells[0] == ["0", "5", "prompt", "-", "-", "-", "-"]
    assert cells[2] == ["2", "2", "model", "-0.2500", "yes", "1.500", "main-4"]


def test_show_says_who_failed(capsys):
    failure = {"owner": "TOOL", "reason": "TOOL_TIMEOUT", "message": "It took too long."}
    write_rows(row(failures=[failure]))
    assert main(["show", "."]) == 0
    assert "tool failed: TOOL_TIMEOUT: It took too long." in capsys.readouterr().out


def test_show_leaves_out_a_line_that_is_being_written(capsys):
    write_rows(row())
    with Path("trajectories.jsonl").open("a") as file:
        file.write('{"half": ')
    assert main(["show", "."]) == 0
    assert "(1 of 1)" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["no json\n", "{}\n", "[]\n"])
def test_show_refuses_what_is_no_file_of_trajectories(content, capsys):
    Path("trajectories.jsonl").write_text(content)
    assert main(["show", "."]) == 2
    assert "not a file of trajectories" in capsys.readouterr().err


def test_doctor_names_what_is_missing_and_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv("REDIS_URL", "redis://user:secret@127.0.0.1:1/0")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "pip install torch==2.13.0" in printed
    assert "Training cannot start: dialoop-services, torch, transformers." in printed
    assert "DOES NOT ANSWER" in printed
    assert "secret" not in printed
    assert main(["doctor", "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert (checks["torch"]["value"], checks["torch"]["is_required"]) == ("", True)
    assert checks["torch"]["remedy"] == "pip install torch==2.13.0"


@pytest.mark.parametrize(
    ("installed", "engine"),
    [({"vllm", "torch"}, "vllm from 64 samples"), ({"torch"}, "transformers, since vllm")],
)
def test_doctor_recommends_an_engine_without_a_gpu(installed, engine, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in installed or None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    (finding,) = [each for each in doctor_module.examine() if each.name == "engine to take"]
    assert finding.value.startswith(engine)


@pytest.mark.parametrize(
    ("script", "value", "remedy"),
    [
        ("echo 'Cannot connect to the Docker daemon' >&2; exit 1", "", "daemon does not answer"),
        ("echo 29.1.3", "docker 29.1.3", ""),
    ],
)
def test_doctor_asks_the_container_daemon(script, value, remedy, tmp_path, monkeypatch):
    program = tmp_path / "docker"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = [check for check in doctor_module.examine() if check.name == "containers"]
    assert finding.value == value
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("script", "value", "remedy"),
    [
        (
            "echo '0, GPU-7, NVIDIA H100, 81559, 300'",
            "GPU 0 (NVIDIA H100): 0.3 of its 79.6 GiB are free",
            "",
        ),
        ("echo 'No devices were found'; exit 6", "", "no GPU that it has: nvidia-smi says No dev"),
        ("echo 'No devices were found'", "", "says No devices were found"),
        ("echo mismatch >&2; exit 18", "", "says mismatch"),
    ],
)
def test_doctor_says_what_a_gpu_has_left_and_of_a_driver_without_one(
    script, value, remedy, tmp_path, monkeypatch
):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (finding,) = [check for check in doctor_module.examine() if check.name == "gpu"]
    assert finding.value == value
    assert remedy in finding.remedy


def test_doctor_imports_none_of_what_it_looks_for():
    code = (
        "import sys; from dialoop_ops.cli.doctor import examine; examine(); "
        "print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_missing_thing_has_a_remedy():
    assert all(finding.remedy for finding in doctor_module.examine() if not finding.value)


def stack(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, because it turns into another program."""
    environment = (
        os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'services'}:{ROOT / 'client'}"} | variables
    )
    command = [sys.executable, "-m", "dialoop_ops.cli.main", *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * PATIENCE_S,
        env=environment,
    )


def test_the_printed_config_is_whole_and_reads_back_as_itself():
    Path("job.toml").write_text('run = "mine"\n[environment]\noptions = { low = 5, "a b" = "x" }\n')
    first = stack("config", "print", "job.toml")
    assert first.returncode == 0, first.stderr
    Path("again.toml").write_text(first.stdout)
    assert toml_of(load_config(Path("again.toml"), environment={})) == first.stdout
    assert 'pipeline_depth = "auto"' in first.stdout
    origins = stack("config", "print", "job.toml", "--origins").stdout.splitlines()
    assert 'run = "mine"  # job.toml' in origins
    assert 'pipeline_depth = "auto"  # default' in origins


def test_an_unknown_key_is_one_sentence_and_exit_code_2():
    Path("job.toml").write_text("[train]\nlerning_rate = 1\n")
    done = stack("config", "print", "job.toml")
    assert done.returncode == 2
    assert "did you mean 'learning_rate'?" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_list_whose_reader_takes_only_the_first_lines_ends_in_silence():
    write_rows(*[row()] * 2000)
    command = f"{sys.executable} -m dialoop_ops.cli.main show . --list | head -1"
    ended = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True)
    assert ended.returncode == 0
    assert ended.stderr == b""
    assert len(ended.stdout.splitlines()) == 1
