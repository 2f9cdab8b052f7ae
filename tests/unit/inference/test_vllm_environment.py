"""What vLLM is started with: no compiler, no network, and no warning that nobody can act on."""

from __future__ import annotations

import json
import logging
import logging.config
import os

import psutil
import pytest
import torch
from dialoop_services.inference.vllm_engine.environment import LOGGING, prepare

VARIABLES = (
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "TORCHDYNAMO_DISABLE",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_CONFIG_PATH",
    "VLLM_LOGGING_LEVEL",
    "VLLM_NO_USAGE_STATS",
)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that the end of the test puts back what was there
        monkeypatch.delenv(name)


def test_a_cpu_needs_no_compiler() -> None:
    prepare()
    assert os.environ.get("TORCHDYNAMO_DISABLE") == (None if torch.cuda.is_available() else "1")
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_on_a_cpu_the_core_runs_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(3))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8 if logical else 4)
    prepare()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["OMP_NUM_THREADS"] == "2"  # of three cores


def test_a_worker_process_of_vllm_is_kept_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    prepare()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert "OMP_NUM_THREADS" not in os.environ  # vLLM sets it for its worker


def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    prepare()
    assert os.environ["TORCHDYNAMO_DISABLE"] == "0"
    assert "VLLM_LOGGING_CONFIG_PATH" not in os.environ
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    prepare()
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"


def test_what_is_always_so_on_a_cpu_is_not_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("vllm")
    before = (logger.handlers, logger.level, logger.propagate)
    try:
        logging.config.dictConfig(json.loads(LOGGING.read_text("utf-8")))
        child = logging.getLogger("vllm.triton_utils.importing")
        child.warning("Triton is installed, but doesn't include CPU backend. Disabling Triton.")
        child.warning("The disk is full.")
        child.error("Triton failed.")
    finally:
        logger.handlers, logger.level, logger.propagate = before
        logger.setLevel(before[1])
    stderr_text = capsys.readouterr().err
    assert "Disabling" not in stderr_text
    assert "The disk is full." in stderr_text
    assert "Triton failed." in stderr_text
