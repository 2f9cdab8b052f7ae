"""`make gpu-smoke`: what it says without a GPU, and how it tells what passed from what did not."""

from __future__ import annotations

import json
import tomllib

import pytest
from dialoop_ops.conformance.inference import running
from dialoop_ops.stack.devices import Node, plan_devices
from dialoop_services.config.file import parse_config

from benchmarks.gpu import smoke
from benchmarks.gpu.engine import figures_of
from benchmarks.gpu.smoke import CHECKS, Check, Outcome
from benchmarks.servers.families import make_family

HERE = {
    "passes": Check(name="passes", what="", words=("json.tool", "--help")),
    "fails": Check(name="fails", what="", words=("json.tool", "/no/such/file")),
    "lacks": Check(name="lacks", what="", words=("json.tool",), needs=("no_such_package",)),
    "two": Check(name="two", what="", words=("json.tool",), num_gpus=2),
}


def test_without_a_gpu_it_says_what_it_would_run_and_exits_2(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(smoke, "gpu_names", list)
    monkeypatch.chdir(tmp_path)
    assert smoke.main([]) == 2
    printed = capsys.readouterr().out
    assert "no GPU" in printed
    assert all(check.name in printed for check in CHECKS)
    assert not (tmp_path / "runs").exists()


def test_what_cannot_run_is_not_run_and_says_why(tmp_path) -> None:
    ran = smoke.run_all(list(HERE.values()), num_gpus=1, kept=tmp_path)
    outcomes = {outcome.check: outcome for outcome in ran}
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "passes": "passed",
        "fails": "failed",
        "lacks": "not run",
        "two": "not run",
    }
    assert "no_such_package is not installed" in outcomes["lacks"].why
    assert "needs 2 GPUs" in outcomes["two"].why
    assert outcomes["fails"].why
    assert [kept.name for kept in tmp_path.iterdir()] == ["fails"]
    assert "/no/such/file" in (tmp_path / "fails" / "stderr").read_text("utf-8")
    late = smoke.run_all([HERE["passes"]], num_gpus=1, kept=tmp_path, limit_s=0)
    assert (late[0].status, "are over" in late[0].why) == ("not run", True)


def test_a_check_that_hangs_is_a_failure(tmp_path) -> None:
    hangs = Check(name="hangs", what="", words=("http.server", "0", "--bind", "127.0.0.1"))
    outcome = smoke.run_one(hangs, tmp_path, limit_s=0.5)
    assert (outcome.status, "took more than" in outcome.why) == ("failed", True)


@pytest.mark.parametrize(("status", "code"), [("passed", 0), ("not run", 0), ("failed", 1)])
def test_the_json_has_the_machine_and_the_exit_code_what_failed(
    status, code, monkeypatch, capsys, tmp_path
):
    outcome = Outcome(check="train step", status=status, figures={"tokens_per_s": 5.0})
    monkeypatch.setattr(smoke, "gpu_names", lambda: ["Card"])
    monkeypatch.setattr(smoke, "run_all", lambda checks, **options: [outcome])
    path = tmp_path / "smoke.json"
    assert smoke.main(["--output", str(path)]) == code
    document = json.loads(path.read_text("utf-8"))
    assert document["gpus"] == ["Card"]
    assert document["checks"][0]["figures"] == {"tokens_per_s": 5.0}
    assert status in capsys.readouterr().out


@pytest.mark.parametrize("check", [c for c in CHECKS if c.job], ids=lambda check: check.name)
def test_every_job_of_a_check_is_valid_and_fits_the_gpus_that_it_asks_for(check, tmp_path) -> None:
    config = parse_config(tomllib.loads(smoke.job_file(check, tmp_path)), source="job.toml")
    gpus = tuple(map(str, range(check.num_gpus)))
    plan = plan_devices(config, (Node(gpus=gpus),))
    users = {each.name: each.gpus for each in plan.processes if each.gpus}
    assert set(users) == {"trainer", "inference"}
    assert config.engine in (*check.needs, "transformers")


def test_the_jobs_model_is_read_alike_by_vllm_and_transformers(tmp_path) -> None:
    """vLLM's Qwen2 takes a head's width from the hidden size, whatever head_dim says."""
    for fields in (smoke.MODEL, running._WIDE):
        directory = make_family("qwen2", tmp_path / str(fields["intermediate_size"]), fields=fields)
        config = json.loads((directory / "config.json").read_text("utf-8"))
        assert config["head_dim"] == config["hidden_size"] / config["num_attention_heads"]


def test_the_gate_of_a_job_stands_outside_the_noise_of_bfloat16(tmp_path) -> None:
    at_probes, missed = 0.9, 3.5  # nats seen on a GPU: by rounding, by a publish that went wrong
    for check in (each for each in CHECKS if each.job):
        config = parse_config(tomllib.loads(smoke.job_file(check, tmp_path)), source="job.toml")
        assert at_probes < config.logprob_bound < missed


@pytest.mark.parametrize(("difference", "status"), [(0.16, "passed"), (0.6, "failed")])
def test_sampled_tokens_hold_within_less_than_the_probes(
    difference, status, monkeypatch, tmp_path
) -> None:
    check = Check(name="a job", what="", job={"engine": "vllm"})
    monkeypatch.setattr(smoke, "_words_of", lambda check, folder, *, rehearsal: ["json.tool", "-h"])
    run = tmp_path / "runs" / "smoke"
    run.mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps({"rescoring": {"max_difference": difference}}))
    outcome = smoke.run_one(check, tmp_path, limit_s=30)
    assert outcome.status == status
    assert ("0.6 nats" in outcome.why) is (status == "failed")


def test_the_engine_check_compares_with_the_trainer() -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    figures = figures_of("cpu", fields=small, num_tokens=3)
    assert 0 <= figures["difference_from_trainer_on_cpu"] < figures["bound"]
    assert figures["tokens_per_s"] > 0


def test_every_module_that_it_runs_is_there() -> None:
    from importlib.util import find_spec

    modules = {check.words[0] for check in CHECKS if check.words}
    assert all(find_spec(module) for module in modules)
