"""The conformance kit of engines: who passes it, and what it says of one that breaks a promise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dialoop.sequences import PolicyVersion
from dialoop_services.inference.conformance import checks
from dialoop_services.inference.conformance.running import check_engine
from dialoop_services.inference.transformers_engine.engine import TransformersEngine

EXAMPLES = Path(__file__).parents[3] / "client" / "examples"
STARTS_VLLM = (pytest.mark.heavy(reason="starts vLLM"), pytest.mark.vllm, pytest.mark.timeout(300))

pytestmark = pytest.mark.filterwarnings("ignore")


async def findings_of(engine: str, folder: Path):
    return {finding.check: finding for finding in await check_engine(engine, folder=folder)}


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


class LoadsNothing(TransformersEngine):
    """Takes the version of new weights, and not the weights."""

    async def load_weights(self, path, version, **options):
        times = await super().load_weights(path, version, **options)
        await super().load_weights(path.parent / "model" / "model.safetensors", version)
        return times


@pytest.mark.parametrize(
    ("engine", "broken"),
    [
        (Mislabels, "logprobs"),
        (ForgetsTemperature, "sample: temperature"),
        (KeepsTheAdapter, "adapters"),
        (NamesExpertsOfTheTokenBefore, "routed experts"),
        (LoadsNothing, "load"),
    ],
)
async def test_an_engine_that_breaks_a_promise_is_named_with_the_check(
    engine: type, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the check itself on a bench: the others would take seconds and say the same."""
    every = {**checks.CORE, **{name: run for name, (_, run) in checks.CAPABILITIES.items()}}
    monkeypatch.setattr(
        "dialoop_services.inference.conformance.running.CORE", {broken: every[broken]}
    )
    monkeypatch.setattr("dialoop_services.inference.conformance.running.CAPABILITIES", {})
    findings = await findings_of(f"{__name__}:{engine.__name__}", tmp_path)
    assert not findings[broken].is_ok
    words = ("differ by", "labelled other", "differ from those of a full forward pass")
    assert any(each in findings[broken].problem for each in words)
