"""A job that records experts: bfloat16 answers, float32 training, every service, either queue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialoop_ops.policies.rescore import rescore

from benchmarks.servers.families import make_family
from tests.support.stack_jobs import ROOT, Job

CONFIG = """
run = "job"
engine = "transformers"
store = "{store}"
console = false
[model]
directory = "{model}"
[environment]
use = "capitals:capitals"
[inference]
record_routed_experts = true
dtype = "bfloat16"
[collector]
group_size = 4
max_new_tokens = 24
[train]
num_steps = 4
groups_per_train_step = 4
loss = "grpo"
[warm_start]
num_steps = 0
[evaluation]
num_tasks = 0
[gates]
rescoring_s = 10
"""


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


@pytest.mark.heavy(reason="runs a job on each queue, most of a minute each")
@pytest.mark.parametrize("store", ["memory", "redis"])
def test_what_the_engine_chose_is_replayed_through_the_whole_stack(
    tmp_path: Path, store: str
) -> None:
    model = make_family("qwen3_moe", tmp_path / "model", fields={"max_position_embeddings": 512})
    (tmp_path / "capitals.py").write_text((ROOT / "client/examples/capitals.py").read_text())
    (tmp_path / "job.toml").write_text(CONFIG.format(store=store, model=model))
    with Job(tmp_path, "train", "job.toml") as job:
        ended = job.end(240)
    assert ended.exit_code == 0, ended.output
    steps = [r for r in rows_of(ended.run_dir / "metrics.jsonl") if r["kind"] == "train"]
    assert [row["train_step"] for row in steps] == [1, 2, 3, 4]
    for row in steps:
        assert row["num_recorded_choices"] > 100
        assert 0 <= row["routing_differs"] < 0.3
        assert row["own_routing_mismatch_kl"] > 0
        assert row["replayed_mismatch_kl"] > 0
    assert sum(row["routing_differs"] for row in steps) > 0
    for trajectory in rows_of(ended.run_dir / "trajectories.jsonl"):
        for sequence in trajectory["sequences"]:
            column = sequence["columns"]["routed_experts"]
            assert (column["data_type"], column["along"]) == ("uint8", "TOKENS")
            experts = np.array(column["data"])
            assert experts.shape[0] == len(sequence["token_ids"])
            is_computed = (experts < 4).all(axis=(1, 2))
            assert (experts[~is_computed] == 255).all()
            assert not is_computed[-1]
            assert (~is_computed).sum() <= len(trajectory["turns"])  # the last token of each answer
    closing = ended.summary["rescoring"]
    replayed, own = (
        rescore(ended.run_dir, model, replays_experts=replays) for replays in (True, False)
    )
    assert closing["max_difference"] == pytest.approx(replayed["max_difference"], abs=1e-4)
    assert replayed["num_tokens"] == own["num_tokens"] > 500
    kls = [answer["by_depth"]["0"]["mismatch_kl"] for answer in (replayed, own)]
    assert kls[0] < 1.2 * kls[1]  # as a rule a third, but few choices differ
