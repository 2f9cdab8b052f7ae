"""What the preflight says of GPUs, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from dialoop.reasons import Reason
from dialoop_services.config.file import parse_config
from dialoop_services.stack.preflight import mistakes_in


def reasons_of(**values: Any) -> dict[Any, str]:
    """The reasons of a job's mistakes, each with what it says."""
    mistakes = mistakes_in(parse_config(values, source="job.toml"))
    return {mistake.reason: str(mistake) for mistake in mistakes}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


@pytest.mark.usefixtures("one_gpu")
def test_adapters_in_float32_are_refused_where_vllm_computes_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapters = {"max_adapters": 2}
    says = reasons_of(engine="vllm", inference=adapters)[Reason.ADAPTERS_NEED_16_BITS]
    assert "max_adapters is 2" in says
    assert 'dtype = "bfloat16" in [inference]' in says
    fits: list[dict[str, Any]] = [
        {"inference": adapters | {"dtype": "bfloat16"}},
        {"inference": adapters, "dtype": "bfloat16"},
        {"inference": {}},
        {"inference": adapters, "engine": "transformers"},
    ]
    for values in fits:
        assert Reason.ADAPTERS_NEED_16_BITS not in reasons_of(**{"engine": "vllm", **values})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Reason.ADAPTERS_NEED_16_BITS not in reasons_of(engine="vllm", inference=adapters)
