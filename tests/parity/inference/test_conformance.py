"""The conformance kit of engines: who passes it, and what it says of one that breaks a promise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dialoop.sequences import PolicyVersion
from dialoop_ops.conformance.inference import checks
from dialoop_ops.conformance.inference.running import check_engine
from dialoop_services.inference.transformers_engine.engine import TransformersEngine
from dialoop_services.runtime.device_lock import DeviceLock

EXAMPLES = Path(__file__).parents[3] / "client" / "examples"
STARTS_VLLM = (pytest.mark.heavy(reason="starts vLLM"), pytest.mark.vllm, pytest.mark.timeout(300))

pytestmark = pytest.mark.filterwarnings("ignore")


async def findings_of(engine: str, folder: Path, **options: str):
    findings = await check_engine(engine, folder=folder, **options)
    return {finding.check: finding for finding in findings}


@pytest.mark.parametrize(
    ("engine", "capabilities"),
    [
        pytest.param("transformers", set(checks.CAPABILITIES) - {"device transfer"}, id="built-in"),
        pytest.param("plain_engine:PlainEngine", set(), id="by-import-path"),
        pytest.param(
            "vllm", set(checks.CAPABILITIES) - {"routed experts"}, id="vllm", marks=STARTS_VLLM
        ),
    ],
)
async def test_it_does_what_every_engine_must_and_what_it_offers(
    engine: str, capabilities: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    findings = await findings_of(engine, tmp_path)
    assert {name: finding.problem for name, finding in findings.items() if finding.problem} == {}
    assert findings.keys() == {*checks.CORE, *checks.CAPABILITIES, "close"}
    offered = {name for name in checks.CAPABILITIES if "not offered" not in findings[name].note}
    assert offered == capabilities


async def test_the_built_in_engine_does_so_in_half_precision(tmp_path: Path) -> None:
    findings = await findings_of("transformers", tmp_path, dtype="bfloat16")
    assert {name: finding.problem for name, finding in findings.items() if finding.problem} == {}


class Mislabels(TransformersEngine):
    """Says of each score that it is of another policy."""

    async def logprobs(self, token_ids, **extra):
        scored = await super().logprobs(token_ids, **extra)
        return replace(scored, policy_version=PolicyVersion(lineage="other", number=9))


class ForgetsTemperature(TransformersEngine):
    """Gives the log-probs of temperature 1, whatever it samples at."""

    async def sample(self, prompt_ids, sampling, **options):
        sampled = await super().sample(prompt_ids, sampling, **options)
        scored = [(await self.logprobs([*prompt_ids, *s.token_ids])).logprobs for s in sampled]
        return tuple(
            replace(s, logprobs=tuple(row[len(prompt_ids) - 1 :].tolist()))
            for s, row in zip(sampled, scored, strict=True)
        )


class KeepsTheAdapter(TransformersEngine):
    """Answers with the policy alone where an adapter is named."""

    async def logprobs(self, token_ids, *, adapter=None):
        return await super().logprobs(token_ids)


class NamesExpertsOfTheTokenBefore(TransformersEngine):
    """Gives each token the experts of the one before it."""

    async def sample(self, prompt_ids, sampling, **options):
        sampled = await super().sample(prompt_ids, sampling, **options)
        return tuple(
            replace(s, routed_experts=np.roll(s.routed_experts, 1, axis=0)) for s in sampled
        )


class KeepsTheDevice(TransformersEngine):
    """Sleeps, and holds the device's lock meanwhile."""

    @classmethod
    async def start(cls, model_dir, options):
        DeviceLock(options.device_lock).try_share()
        return await super().start(model_dir, options)


class LoadsNothing(TransformersEngine):
    """Takes the version of new weights, and not the weights."""

    async def load_weights(self, path, version, **options):
        times = await super().load_weights(path, version, **options)
        await super().load_weights(path.parent / "model" / "model.safetensors", version)
        return times


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("engine", "broken"),
    [
        (Mislabels, "logprobs"),
        (ForgetsTemperature, "sample: temperature"),
        (KeepsTheAdapter, "adapters"),
        (NamesExpertsOfTheTokenBefore, "routed experts"),
        (LoadsNothing, "load"),
        (KeepsTheDevice, "sleep"),
    ],
)
async def test_an_engine_that_breaks_a_promise_is_named_with_the_check(
    engine: type, broken: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the check itself on a bench: the others would take seconds and say the same."""
    every = {**checks.CORE, **{name: run for name, (_, run) in checks.CAPABILITIES.items()}}
    monkeypatch.setattr("dialoop_ops.conformance.inference.running.CORE", {broken: every[broken]})
    monkeypatch.setattr("dialoop_ops.conformance.inference.running.CAPABILITIES", {})
    findings = await findings_of(f"{__name__}:{engine.__name__}", tmp_path, dtype=dtype)
    assert not findings[broken].is_ok
    words = (
        "differ by",
        "labelled other",
        "differ from those of a full forward pass",
        "holds the device",
    )
    assert any(each in findings[broken].problem for each in words)


@pytest.mark.parametrize(
    ("awake", "asleep", "is_ok", "says"),
    [
        (700, 700, False, "frees nothing of the 600 MiB"),
        (700, 636, True, "frees 64 of 600 MiB"),
        (100, 100, True, "holds no GPU's memory"),
    ],
)
async def test_asleep_an_engine_on_a_gpu_frees_memory_of_it(
    awake: int, asleep: int, is_ok: bool, says: str, tmp_path: Path, monkeypatch
) -> None:
    """The kit reads the memory at the start, then before and after each of two sleeps."""
    figures = iter([100, awake, awake, asleep, awake, asleep])
    kit = "dialoop_ops.conformance.inference"
    for module in ("bench", "checks", "running"):
        monkeypatch.setattr(f"{kit}.{module}.used_mib", lambda: next(figures))
    monkeypatch.setattr(f"{kit}.running.CORE", {"sleep": checks.CAPABILITIES["sleep"][1]})
    monkeypatch.setattr(f"{kit}.running.CAPABILITIES", {})
    finding = (await findings_of("transformers", tmp_path))["sleep"]
    assert finding.is_ok is is_ok
    assert says in (finding.note or finding.problem)
