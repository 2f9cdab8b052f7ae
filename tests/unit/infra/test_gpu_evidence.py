"""`make gpu-evidence`: the order of its lines, what a cut leaves, and what a rehearsal is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from dialoop.chat import Message
from dialoop_ops.stack.devices import Node, plan_devices
from dialoop_services.config.file import parse_config
from dialoop_services.config.job import JobConfig

from benchmarks.gpu import evidence, lines, pack, place
from benchmarks.gpu.lines import LINES, Ended, Line, Place
from benchmarks.gpu.smollm2 import instructions

ROOT = Path(__file__).parents[3]
CARD = {"name": "Card", "driver": "580", "memory": "81559 MiB"}


def rows_in(folder: Path) -> dict[str, dict[str, Any]]:
    document = json.loads((folder / evidence.RESULTS).read_text("utf-8"))
    return {row["name"]: row for row in document["rows"]}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The command with lines of the test, on a machine with one GPU."""

    def prepare(work: Path, **options: Any) -> Place:
        fields = {name: options[name] for name in ("num_gpus", "is_rehearsal")}
        return Place(work=work, environment={}, **fields)

    monkeypatch.setattr(evidence, "gpus_here", lambda: [CARD])
    monkeypatch.setattr(evidence, "prepare", prepare)
    monkeypatch.setattr(evidence, "versions_of", lambda place: {"vllm": "0.32.0"})
    monkeypatch.setattr(evidence, "COMMITTED", tmp_path / "none.json")
    monkeypatch.delenv("OUT", raising=False)

    def main(these: dict[str, Any], *words: str) -> int:
        made = [
            Line(number=i, name=name, what="", run=run, least_s=5.0)
            for i, (name, run) in enumerate(these.items())
        ]
        monkeypatch.setattr(evidence, "LINES", made)
        return evidence.main(["--work", str(tmp_path), "--commit", "c0ffee", *words])

    return main


def ends(status: str, calls: list[str] | None = None) -> Callable[..., Ended]:
    def line(place: Place, limit_s: float, note: Any) -> Ended:
        if calls is not None:
            calls.append(status)
        return Ended(status=status, figures={"tokens": 5})

    return line


def test_without_a_gpu_it_says_so_in_one_sentence_and_exits_2(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(evidence, "gpus_here", list)
    assert evidence.main(["--work", str(tmp_path)]) == 2
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_result_names_card_driver_versions_and_commit(run, tmp_path) -> None:
    assert run({"job": ends("passed")}) == 0
    row = rows_in(tmp_path / "gpu_evidence")["job"]
    assert (row["commit"], row["card"], row["rehearsal"]) == ("c0ffee", "Card", False)
    assert (row["gpus"], row["versions"]) == ([CARD], {"vllm": "0.32.0"})
    assert (row["status"], row["figures"]) == ("passed", {"tokens": 5})


def test_the_next_run_takes_the_lines_that_have_no_good_result(run, tmp_path, monkeypatch) -> None:
    first, again, calls = ends("passed"), ends("failed"), list[str]()
    assert run({"a": first, "b": again, "c": ends("not run")}) == 1
    monkeypatch.setenv("OUT", str(tmp_path / "out"))  # empty at each start, where it is set
    counted = ends("passed", calls)
    assert run({"a": counted, "b": counted, "c": counted, "d": counted}) == 0
    assert len(calls) == 2
    statuses = {name: row["status"] for name, row in rows_in(tmp_path / "out").items()}
    assert statuses == {"a": "passed", "b": "passed", "c": "not run", "d": "passed"}
    assert run({"a": counted}) == 0
    assert run({"a": counted}, "--all") == 0
    assert run({"a": counted}, "--commit", "another") == 0
    assert len(calls) == 4
    assert run({"a": counted}, "--only", "b") == 2


def test_a_rehearsal_is_never_taken_for_a_gpus_result(run, tmp_path, monkeypatch) -> None:
    calls: list[str] = []
    assert run({"a": ends("passed", calls)}, "--rehearse") == 0
    row = rows_in(tmp_path / "gpu_rehearsal")["a"]
    assert (row["rehearsal"], row["card"], row["gpus"]) == (True, "none", [])
    # Its rows may be committed beside those of a card, and excuse no line there.
    monkeypatch.setattr(evidence, "COMMITTED", tmp_path / "gpu_rehearsal" / evidence.RESULTS)
    assert run({"a": ends("passed", calls)}) == 0
    assert len(calls) == 2


def test_a_cut_loses_only_what_came_later(run, tmp_path) -> None:
    def cut(place: Place, limit_s: float, note: Any) -> Ended:
        note(Ended(status="running", figures={"steps": 3}))
        raise KeyboardInterrupt  # as a machine that is taken away

    with pytest.raises(KeyboardInterrupt):
        run({"a": ends("passed"), "b": cut, "c": ends("passed")})
    rows = rows_in(tmp_path / "gpu_evidence")
    assert [row["status"] for row in rows.values()] == ["passed", "running"]
    assert rows["b"]["figures"] == {"steps": 3}
    calls: list[str] = []
    assert run({name: ends("passed", calls) for name in "abc"}) == 0
    assert len(calls) == 2


def test_a_line_without_time_is_left_for_the_next_run(run, capsys) -> None:
    assert run({"a": ends("passed")}, "--within", "4") == 1
    assert "no time left: run the command again" in capsys.readouterr().out


def test_a_process_that_takes_too_long_is_ended_with_its_children(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(lines, "_GRACE_S", 0.5)
    here = Place(work=tmp_path, environment={}, num_gpus=1, is_rehearsal=False)
    program = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']);"
        "print(child.pid, flush=True); child.wait()"
    )
    out, began = tmp_path / "slow.out", time.monotonic()
    assert lines._run(here, ["-c", program], out, 3.0) is None
    assert time.monotonic() - began < 20
    child = Path(f"/proc/{out.read_text().strip()}/status")
    while child.exists() and "Z (zombie)" not in child.read_text():  # until the test's limit
        time.sleep(0.05)


def test_a_jobs_times_are_of_this_start_and_its_rewards_of_all(tmp_path) -> None:
    train = {"kind": "train", "num_trained_tokens": 10, "truncated_share": 0.5, "lease_s": 0.1}
    rows = [
        {**train, "time": 50.0, "reward": 0.1, "train_s": 9.0, "publish_s": 9.0},
        {**train, "time": 110.0, "reward": 0.2, "train_s": 1.0, "publish_s": 2.0},
        {"kind": "publish", "time": 111.0, "num_bytes": 2**21, "max_logprob_difference": 0.3},
        {**train, "time": 114.0, "reward": 0.4, "train_s": 3.0, "publish_s": 4.0},
        {"kind": "evaluation", "time": 115.0, "label": "after_greedy", "mean_reward": 0.7},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tr'
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "inference.log").write_text("x\nGraph capturing finished in 14 secs\n")
    out = tmp_path / "out"
    ready = ("inference   ready at 127.0.0.1:1 after 26.0 s", "stack       all services are ready")
    out.write_text(f"  26.1 s  {ready[0]}\n  30.0 s  {ready[1]}\n")
    figures = lines.job_figures(tmp_path, out, begun=100.0)
    assert (figures["ready_s"], figures["ready_by_service_s"]) == (30.0, {"inference": 26.1})
    assert figures["median_s"] == {"lease": 0.1, "train": 2.0, "publish": 3.0, "step": 4.0}
    assert (figures["rewards"], figures["publish_mib"]) == ([0.1, 0.2, 0.4], 2.0)
    assert figures["largest_difference_at_probes"] == 0.3
    assert figures["heldout"] == {"after_greedy": 0.7}
    assert figures["engine_start"] == ["Graph capturing finished in 14 secs"]


def job_of(settings: Mapping[str, object]) -> JobConfig:
    table = tomllib.loads((place.JOB / "job.toml").read_text("utf-8"))
    for key, value in settings.items():
        section, name = key.split(".")
        table[section][name] = value
    return parse_config(table, source="job.toml")


def test_the_job_file_is_one_that_a_user_would_write() -> None:
    """It sets nothing that is there for one card, and its trainer and vLLM fit on one."""
    text = (place.JOB / "job.toml").read_text("utf-8")
    assert not re.search("gpu_memory_utilization|enforce_eager|data_plane", text)
    plan = plan_devices(job_of({}), (Node(gpus=("0",)),))
    assert {each.name for each in plan.processes if each.gpus} == {"trainer", "inference"}


def test_a_rehearsal_trains_with_the_same_file_on_a_cpu() -> None:
    plan = plan_devices(job_of(lines._REHEARSED), (Node(gpus=()),))
    assert not any(each.gpus for each in plan.processes)


async def test_an_answer_earns_what_it_follows_if_it_speaks_of_its_topic() -> None:
    environment = instructions.environment
    tasks = {
        split: [environment.tasks.get(split, key) for key in environment.tasks.keys(split)]
        for split in ("train", "heldout")
    }
    topics = [{task.metadata["topic"] for task in tasks[split]} for split in tasks]
    assert not topics[0] & topics[1]
    wanted = '["startend:end_checker"]'
    task = next(task for task in tasks["train"] if task.metadata["instructions"] == wanted)
    earned = []
    topic = task.metadata["topic"]
    for text in (f"I know a lot about {topic} by now. That is all.", "That is all.", "Well."):
        opening = environment.reset(task, seed=0)
        answer = Message(role="assistant", content=text)
        outcome = await environment.step(opening.episode, opening.history.respond(answer))
        earned.append(outcome.rewards[0].value)
    assert earned == pytest.approx([1.0, 0.2, 0.0])


def test_lines_come_in_the_order_of_their_worth_and_those_of_smoke_are_its_checks() -> None:
    from benchmarks.gpu.smoke import CHECKS

    numbers = [line.number for line in LINES]
    assert numbers == sorted(numbers)
    assert set(numbers) == {1, 2, 3, 4, 5}
    names = {check.name for check in CHECKS}
    checks = [
        line.run.keywords["check"] for line in LINES if "check" in getattr(line.run, "keywords", {})
    ]
    assert len(checks) == 5
    assert set(checks) <= names


def test_the_command_needs_no_package_before_it_has_unpacked_them() -> None:
    words = (sys.executable, "-S", "-m", "benchmarks.gpu.evidence", "--help")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--rehearse" in done.stdout


def test_what_is_packed_is_the_vllm_that_setup_installs() -> None:
    wanted = re.findall(r"^vllm==\S+", pack.REQUIREMENTS.read_text("utf-8"), re.MULTILINE)
    assert wanted
    locked = ROOT / "infra" / "requirements" / "locked" / "inference-gpu.txt"
    assert f"\n{wanted[0]} " in locked.read_text("utf-8")


@pytest.mark.heavy(reason="starts vLLM six times")
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_the_evidence_of_a_gpu_is_rehearsed_whole_on_a_cpu(tmp_path: Path) -> None:
    words = ("-m", "benchmarks.gpu.evidence", "--rehearse", "--work", str(tmp_path))
    done = subprocess.run(
        (sys.executable, *words), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "gpu_rehearsal" / "gpu_evidence.json").read_text("utf-8"))
    rows = {row["name"]: row for row in document["rows"]}
    assert all(row["rehearsal"] and row["card"] == "none" for row in rows.values())
    expected = {line.name: "passed" if line.rehearses else "not run" for line in LINES}
    assert {name: row["status"] for name, row in rows.items()} == expected
    job, rest = rows["job"]["figures"], rows["heldout"]["figures"]
    assert job["ready_s"] > 0
    assert (job["num_steps"], rest["num_steps"]) == (2, 2)  # it goes on where the first line ended
    assert all(rest["gates"].values())
    assert rows["rates"]["figures"]["tokens_per_s"].keys() >= {"dialoop", "plain"}
    logs = tmp_path / "gpu_rehearsal" / "gpu_evidence_logs.tar.gz"
    assert logs.stat().st_size > 0
