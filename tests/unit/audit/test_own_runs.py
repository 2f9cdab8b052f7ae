"""Faults planted into simulated runs are found, clean runs raise no alarm, bad files are named."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from dialoop.errors import InvalidInput, NotFound
from dialoop_ops.audit import AuditReport, audit
from dialoop_ops.audit.audit import CHECKS
from dialoop_ops.cli.main import main

from tests.support.samples.planted_faults import PLANTS, NothingPlanted, Plant, engine_faults
from tests.support.samples.rollout_worlds import World, make_run, make_trl_dump

FAR = 1_000_000
"""Between the seeds of a case, so that no two cases draw one."""


def faults_of(report: AuditReport) -> set[str]:
    return {finding.fault for finding in report.findings}


def audit_planted(run_dir: Path, plant: Plant, seed: int) -> AuditReport:
    """Audit the first of some worlds that the plant changes: a few have nothing to change."""
    for drawn in range(seed, seed + 10 * FAR, FAR):
        run = make_run(run_dir, World(seed=drawn))
        with suppress(NothingPlanted):
            plant(run, np.random.default_rng(drawn))
            return audit(run.write(run_dir))
    raise NothingPlanted


def audit_played(run_dir: Path, seed: int, **settings: object) -> AuditReport:
    world = World(seed=seed, num_steps=24, **settings)  # type: ignore[arg-type]
    return audit(make_run(run_dir, world).write(run_dir))


@pytest.mark.parametrize("seed", [101, 102])
def test_a_clean_run_raises_no_alarm(tmp_path: Path, seed: int) -> None:
    report = audit(make_run(tmp_path, World(seed=seed)).write(tmp_path))
    assert not report.findings
    assert set(report.checked) == CHECKS.keys()
    assert not report.not_checked
    assert not report.limits
    assert not report.notes


@pytest.mark.parametrize(
    ("fault", "plant"),
    [(fault, plant) for fault, plants in PLANTS.items() for plant in plants],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_fault_is_found(tmp_path: Path, fault: str, plant: Plant) -> None:
    report = audit_planted(tmp_path, plant, 103)
    assert fault in faults_of(report)
    finding = next(f for f in report.findings if f.fault == fault)
    assert finding.evidence
    assert finding.remedy


@pytest.mark.parametrize("number", range(4))
def test_another_sampling_than_claimed_is_found(tmp_path: Path, number: int) -> None:
    settings = engine_faults(np.random.default_rng(104))["sampling_mismatch"][number]
    assert "sampling_mismatch" in faults_of(audit_played(tmp_path, 104, **settings))


def test_an_engine_that_keeps_its_first_weights_is_found(tmp_path: Path) -> None:
    assert "weights_never_arrived" in faults_of(audit_played(tmp_path, 105, arrives=False))


def test_a_loader_that_passes_over_long_prompts_is_found(tmp_path: Path) -> None:
    report = audit_played(tmp_path, 114, num_tasks=40, only_short_from=8)
    (finding,) = report.findings
    (place,) = finding.evidence
    assert (finding.fault, place.step) == ("vanished_prompts", 7)
    assert place.trajectory
    assert place.version == 6
    assert place.token is not None
    assert "none of the 68 since" in finding.message


@pytest.mark.heavy(reason="two hundred runs are simulated and read")
@pytest.mark.timeout(1200)
def test_of_ten_cases_for_each_fault_nearly_all_are_found(tmp_path: Path) -> None:
    missed: list[str] = []
    num_cases = 0
    cases = [(fault, plant) for fault, plants in PLANTS.items() for plant in plants]
    for number, (fault, plant) in enumerate(cases):
        for seed in range(1000 + 20 * number, 1010 + 20 * number):
            num_cases += 1
            report = audit_planted(tmp_path / f"{plant.__name__}-{seed}", plant, seed)
            if fault not in faults_of(report):
                missed.append(f"{plant.__name__} {seed}")
    for seed in range(3000, 3010):
        for fault, worlds in engine_faults(np.random.default_rng(seed)).items():
            for number, settings in enumerate(worlds):
                num_cases += 1
                report = audit_played(tmp_path / f"{fault}-{number}-{seed}", seed, **settings)
                if fault not in faults_of(report):
                    missed.append(f"{settings} {seed}")
    assert len(missed) <= 0.05 * num_cases, missed


def test_what_a_run_lacks_is_not_checked_and_never_clean(tmp_path: Path) -> None:
    run = make_run(tmp_path, World(seed=106, num_tasks=10_000), debug=False)
    run.metrics.clear()
    run.config.clear()
    for row in run.rows:
        for sequence in row["sequences"]:
            sequence["inference_logprobs"] = []
    report = audit(run.write(tmp_path))
    lacking = {
        "sampling_mismatch",
        "weights_never_arrived",
        "staleness_past_bound",
        "heldout_falls",
    }
    assert report.not_checked.keys() == lacking
    assert not lacking & set(report.checked)


def test_a_check_that_is_made_in_part_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, World(seed=112), debug=False)
    run.metrics = [row for row in run.metrics if row["kind"] != "train"]
    (tmp_path / "model" / "tokenizer.json").unlink()
    report = audit(run.write(tmp_path))
    limits = {"retokenised_history", "wrong_mask", "sampling_mismatch", "weights_never_arrived"}
    assert report.limits.keys() == limits
    assert main(["audit", str(tmp_path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "not found  " in line]
    assert not any(fault in line for fault in limits)


def test_without_a_bound_proofs_that_grow_are_found(tmp_path: Path) -> None:
    run = make_run(tmp_path, World(seed=113))
    del run.config["gates"]
    assert not audit(run.write(tmp_path)).findings
    for row in run.metrics:
        if row["kind"] == "publish":
            row["max_logprob_difference"] = 0.02 * row["policy_version"]
    assert "weights_never_arrived" in faults_of(audit(run.write(tmp_path)))


def test_torn_and_foreign_lines_are_noted_and_left_out(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, World(seed=107)).write(tmp_path)
    path = run_dir / "trajectories.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = lines[3][:50]
    lines[5] = '{"another": "row"}'
    lines[7] = "[" * 100_000
    path.write_text("\n".join(lines))
    report = audit(run_dir)
    assert report.num_rollouts == len(lines) - 4
    assert not report.findings
    (bad, *rest) = sorted(report.notes)
    assert bad.startswith("1 lines of trajectories.jsonl are not trajectories")
    assert rest[0].startswith("2 lines of trajectories.jsonl cannot be read, the first at byte")
    assert rest[1].startswith("The last line of trajectories.jsonl is not whole")


def test_a_path_without_rollouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        audit(tmp_path / "none")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(NotFound, match="has no trajectories"):
        audit(tmp_path)
    (tmp_path / "trajectories.jsonl").write_text("nonsense\n")
    with pytest.raises(InvalidInput, match="No line of"):
        audit(tmp_path)


def test_the_command_prints_the_evidence_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = make_run(tmp_path / "clean", World(seed=108)).write(tmp_path / "clean")
    assert main(["audit", str(clean)]) == 0
    assert "not found    retokenised_history, " in capsys.readouterr().out
    run = make_run(tmp_path / "old", World(seed=109))
    (plant,) = PLANTS["staleness_past_bound"]
    plant(run, np.random.default_rng(109))
    old = run.write(tmp_path / "old")
    assert main(["audit", "--json", str(clean), str(old)]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert not first["findings"]
    (finding,) = second["findings"]
    assert finding["fault"] == "staleness_past_bound"
    row = next(
        row for row in run.rows if row["trajectory_id"] == finding["evidence"][0]["trajectory"]
    )
    assert row["train_step"] - row["sequences"][0]["segments"][1]["policy_version"] > 4
    # Another bound than the run's own.
    assert main(["audit", str(old), "--claim", "max_staleness=99"]) == 0


def test_the_commands_of_the_docs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "runs" / "demo", World(seed=110)).write(tmp_path / "runs" / "demo")
    model = tmp_path / "model"
    world = World(seed=111, branches=0.0)
    make_trl_dump(tmp_path / "out", world).write(tmp_path / "out")
    (tmp_path / "out" / "model").rename(model)
    page = (Path(__file__).parents[3] / "docs" / "audit.md").read_text("utf-8")
    (block,) = re.findall(r"<!-- test: audit -->\n```sh\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    for line in block.splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "dialoop"
        assert main(words) == 0, capsys.readouterr().out


@pytest.mark.parametrize("claim", ["temperature", "heat=1", "max_staleness=many"])
def test_a_wrong_claim_is_refused(
    tmp_path: Path, claim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(tmp_path), "--claim", claim]) == 2
    assert f"--claim {claim}" in capsys.readouterr().err


def test_one_of_a_few_right_answers_is_no_alarm(tmp_path: Path) -> None:
    """Counting has few answers: each is right on many tasks, and nothing else is right there."""
    run = make_run(tmp_path, World(seed=115, num_tasks=60))
    chance = np.random.default_rng(115)
    for row in run.rows:
        count = int(row["task_key"][1:]) % 4
        answer = count if chance.random() < 0.9 else (count + 1) % 4
        row["messages"][-1]["content"] = f"Result={answer}<submit>"
        row["reward"] = float(answer == count)
    assert "duplicated_high_reward" not in faults_of(audit(run.write(tmp_path)))
    # The same answers, one of which now wins whatever is asked.
    for row in run.rows:
        if row["messages"][-1]["content"] == "Result=3<submit>" or chance.random() < 0.2:
            row["messages"][-1]["content"] = "Result=3<submit>"
            row["reward"] = 1.0
    assert "duplicated_high_reward" in faults_of(audit(run.write(tmp_path)))
