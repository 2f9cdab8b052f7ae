"""A job whose replicas come and go while it trains: each proves itself before it serves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stack_jobs import ROOT, Job, assert_accounted, lines_of, wait_for, write_config

# Deaths and joins end at about step 60. Later steps wait: a policy that solves nine tasks of ten
# leaves one group of ten with a signal, and 250 steps take nine minutes.
NUM_STEPS = 120
# A guard against hanging: a restart may take long on a loaded machine.
PATIENCE_S = 240.0
ADMITTED = re.compile(r"A replica is in rotation\. .*replica=(\S+) epoch=(\d+)")


def admissions(job: Job) -> list[tuple[str, int]]:
    """Names and epochs of the replicas that the trainer admitted, in order."""
    path = job.run_dir / "logs" / "trainer.log"
    text = path.read_text("utf-8") if path.exists() else ""
    return [(name, int(epoch)) for name, epoch in ADMITTED.findall(text)]


def num_admitted(job: Job, name: str) -> int:
    return sum(admitted == name for admitted, _ in admissions(job))


def rows(job: Job, kind: str) -> list[dict[str, float]]:
    path = job.run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in lines_of(path)] if path.exists() else []
    return [row for row in records if row["kind"] == kind]


def start_third_replica(job: Job) -> subprocess.Popen[bytes]:
    """Start a replica that the stack knows nothing of, as somebody on another machine would."""
    pairs = Path(f"/proc/{job.service('inference')}/environ").read_bytes().decode().split("\0")
    variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    own = {"PORT": "0", "REST_PORT": "0", "NAME": "third"}
    variables |= {f"DIALOOP_INFERENCE_{key}": value for key, value in own.items()}
    with (job.directory / "third.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "dialoop_services.inference"],
            cwd=ROOT,
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.heavy(reason="a job of some minutes, whose replicas are killed and joined by another")
@pytest.mark.timeout(900)
def test_replicas_join_and_die_in_mid_job_and_nothing_is_lost(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, store="memory", num_warm_start_steps=110, num_train_steps=NUM_STEPS
    )
    text = config.read_text().replace("[inference]", "[inference]\nnum_replicas = 2")
    text = text.replace("every = 3", "every = 100")
    config.write_text(f'discovery = "registry"\n{text}')
    with Job(tmp_path, "train", str(config)) as job:
        wait_for(lambda: len(rows(job, "train")) >= 2, PATIENCE_S)
        assert {name for name, _ in admissions(job)} == {"inference", "inference-1"}
        third = start_third_replica(job)
        try:
            wait_for(lambda: num_admitted(job, "third") == 1, PATIENCE_S)
            killed = job.service("inference")
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            # It comes back under its name as another member, and proves itself again.
            wait_for(lambda: len({name for name, _ in admissions(job)}) == 3, PATIENCE_S)
            wait_for(lambda: len(set(admissions(job))) >= 4, PATIENCE_S)
            step = len(rows(job, "train"))
            third.kill()
            third.wait()
            wait_for(lambda: len(rows(job, "train")) >= min(step + 3, NUM_STEPS), PATIENCE_S)
        finally:
            third.kill()
            third.wait()
        ended = job.end(timeout_s=2 * PATIENCE_S)
    assert ended.exit_code == 0, ended.output
    assert all(ended.summary["gates"].values()), ended.summary["gates"]
    assert_accounted(ended.summary)
    assert len(rows(job, "train")) == NUM_STEPS
    by_name: dict[str, list[int]] = {}
    for name, epoch in admissions(job):
        by_name.setdefault(name, []).append(epoch)
    assert all(epochs == sorted(epochs) for epochs in by_name.values())
