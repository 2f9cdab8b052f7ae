"""Faults planted into dumps of TRL are found, clean dumps raise no alarm, bad files are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from dialoop.errors import DialoopError, InvalidInput, NotFound
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_ops.audit import AuditReport, Claims, audit
from dialoop_ops.audit.audit import CHECKS
from dialoop_ops.cli.main import main

from tests.support.samples.planted_faults import TRL_PLANTS, TrlPlant, engine_faults
from tests.support.samples.rollout_worlds import World, make_trl_dump

CLAIMS = Claims(max_staleness=4)
# What log_completions writes, without what only a batch has.
TABLE = ("step", "prompt", "completion", "right", "advantage")


def world_of(seed: int, **settings: object) -> World:
    return World(seed=seed, branches=0.0, **settings)  # type: ignore[arg-type]


def report_of(folder: Path) -> AuditReport:
    return audit(folder, claims=CLAIMS, tokenizer=Tokenizer.from_directory(folder / "model"))


def audit_planted(folder: Path, plant: TrlPlant, seed: int) -> AuditReport:
    dump = make_trl_dump(folder, world_of(seed))
    plant(dump, np.random.default_rng(seed))
    return report_of(dump.write(folder, is_parquet=seed % 2 == 0))


def audit_played(folder: Path, seed: int, **settings: object) -> AuditReport:
    world = world_of(seed, num_steps=24, **settings)
    return report_of(make_trl_dump(folder, world).write(folder))


def faults_of(report: AuditReport) -> set[str]:
    return {finding.fault for finding in report.findings}


@pytest.mark.parametrize("is_parquet", [False, True], ids=["jsonl", "parquet"])
def test_a_clean_dump_raises_no_alarm(tmp_path: Path, is_parquet: bool) -> None:
    make_trl_dump(tmp_path, world_of(201)).write(tmp_path, is_parquet=is_parquet)
    report = report_of(tmp_path)
    assert not report.findings
    assert set(report.checked) == CHECKS.keys()
    assert report.kind == "trl"


@pytest.mark.parametrize(
    ("fault", "plant"),
    [(fault, plant) for fault, plants in TRL_PLANTS.items() for plant in plants],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_fault_is_found(tmp_path: Path, fault: str, plant: TrlPlant) -> None:
    assert fault in faults_of(audit_planted(tmp_path, plant, 202))


def test_what_engine_and_loader_did_otherwise_is_found(tmp_path: Path) -> None:
    report = audit_played(tmp_path / "sampling", 203, temperature=0.6)
    assert "sampling_mismatch" in faults_of(report)
    report = audit_played(tmp_path / "loader", 206, num_tasks=40, only_short_from=8)
    assert faults_of(report) == {"vanished_prompts"}
    report = audit_played(tmp_path / "weights", 204, arrives=False)
    assert "weights_never_arrived" in faults_of(report)


@pytest.mark.heavy(reason="a hundred and sixty dumps are simulated and read")
@pytest.mark.timeout(1200)
def test_of_ten_cases_for_each_fault_nearly_all_are_found(tmp_path: Path) -> None:
    missed: list[str] = []
    num_cases = 0
    cases = [(fault, plant) for fault, plants in TRL_PLANTS.items() for plant in plants]
    for number, (fault, plant) in enumerate(cases):
        for seed in range(5000 + 20 * number, 5010 + 20 * number):
            num_cases += 1
            report = audit_planted(tmp_path / f"{plant.__name__}-{seed}", plant, seed)
            if fault not in faults_of(report):
                missed.append(f"{plant.__name__} {seed}")
    for seed in range(7000, 7010):
        for fault, worlds in engine_faults(np.random.default_rng(seed)).items():
            for number, settings in enumerate(worlds):
                num_cases += 1
                report = audit_played(tmp_path / f"{fault}-{number}-{seed}", seed, **settings)
                if fault not in faults_of(report):
                    missed.append(f"{settings} {seed}")
    assert len(missed) <= 0.05 * num_cases, missed


def test_a_table_of_completions_alone_is_checked_as_far_as_it_goes(tmp_path: Path) -> None:
    dump = make_trl_dump(tmp_path, world_of(205))
    dump.rows = [{name: row[name] for name in TABLE} for row in dump.rows]
    report = report_of(dump.write(tmp_path, is_parquet=True))
    texts_allow = ("length_bias", "duplicated_high_reward", "heldout_falls", "vanished_prompts")
    assert report.checked == texts_allow
    assert report.not_checked["wrong_mask"] == "there are no token ids"
    assert report.num_rollouts == len(dump.rows)
    (tmp_path / "trainer_state.json").unlink()
    assert "heldout_falls" in report_of(tmp_path).not_checked


def test_columns_of_numbers_are_rewards_unless_some_are_named(tmp_path: Path) -> None:
    dump = make_trl_dump(tmp_path, world_of(206))
    for row in dump.rows:  # a number that is no reward, and follows the length
        row["num_tokens"] = float(sum(row["completion_mask"]))
    dump.write(tmp_path)
    assert "length_bias" in faults_of(report_of(tmp_path))
    words = ["--claim", "rewards=right", "--tokenizer", str(tmp_path / "model")]
    assert main(["audit", str(tmp_path), *words]) == 0


def test_rows_that_are_no_completions_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = {"step": 1, "prompt": "1+1", "completion": "2", "right": 1.0}
    rows = [
        good,
        {"step": 1},
        good | {"completion": [3]},
        good | {"completion_ids": "abc"},
        good | {"completion_ids": [1, 2], "completion_mask": [1, 1, 1]},
        good | {"completion_ids": [1.5]},
        good | {"step": "first"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step"')
    report = audit(path)
    assert report.num_rollouts == 1
    assert set(report.notes) == {
        "6 rows are not completions of TRL; they were left out.",
        "The last line of rows.jsonl is not whole; it was left out.",
    }


def test_what_is_no_dump_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"has no \.jsonl or \.parquet"):
        audit(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1", "answer": 2}\n')
    with pytest.raises(InvalidInput, match="its columns are answer, question"):
        audit(path)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and no more")
    with pytest.raises(DialoopError, match=r"broken\.parquet"):
        audit(broken)
