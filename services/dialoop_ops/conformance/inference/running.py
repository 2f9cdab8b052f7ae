"""Run every check on an engine that is named by its import path."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dialoop.errors import InvalidConfig, Unsupported
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason
from dialoop_learning.model.tiny import make_random_model
from dialoop_services.config.engines import ENGINES, facts_of_engine, require_device
from dialoop_services.inference.engine import Engine, EngineOptions, OutsideWeights
from dialoop_services.inference.weights.adapter_files import AdapterLimits
from dialoop_services.runtime.device_lock import DEVICE_LOCK

from dialoop_ops.conformance.environment.checks import Finding, finding_of
from dialoop_ops.conformance.environment.play import Broken
from dialoop_ops.conformance.inference.bench import RANK, EngineBench, reference, used_mib
from dialoop_ops.conformance.inference.checks import (
    CAPABILITIES,
    CORE,
    REFUSABLE,
    Run,
    close_twice,
)

_REFUSED = "refused by name,"
# Heads as wide as vLLM's kernels need on a CPU and on CUDA. Its Qwen2 takes their width from the
# model's, whatever head_dim says.
_WIDE: dict[str, Any] = {
    "tie_word_embeddings": True,
    "hidden_size": 128,
    "intermediate_size": 96,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


async def check_engine(
    engine: str,
    *,
    folder: Path,
    model_dir: Path | None = None,
    own: Mapping[str, Any] = MappingProxyType({}),
    device: str = "cpu",
    dtype: str = "float32",
) -> tuple[Finding, ...]:
    """Start the engine of that name or import path and run every check on it.

    folder: where the kit writes models and weights. model_dir: a model to check with; a tiny one
    of the kit's own if it is left out. own: options as [inference.engine] gives them. device: that
    of [inference]; the reference is on the CPU in float32 always. dtype: the engine's. An engine
    whose weights are outside may refuse what REFUSABLE lists; the finding says what it refused with
    which reason. Raises InvalidConfig: ENGINE_NOT_FOUND, and for a device that the engine is not
    told.
    """
    try:
        require_device(engine, device)
    except ValueError as error:
        raise InvalidConfig(f"{error}.", remedy="Leave --device out.") from error
    adapters = AdapterLimits(max_adapters=1, max_rank=2 * RANK)
    options = EngineOptions(
        max_model_len=64,
        max_num_seqs=4,
        adapters=adapters,
        own=own,
        device=device,
        dtype=dtype,
        device_lock=folder / DEVICE_LOCK,
    )
    model_dir = model_dir or make_random_model(folder / "model", "qwen2", fields=_WIDE)
    async with _bench(engine, model_dir, folder, options) as bench:
        findings: list[Finding] = []
        for name, check in CORE.items():
            before = [each for each in findings if name.startswith(f"{each.check}: ")]
            is_refused = any(each.note.startswith(_REFUSED) for each in before)
            findings.append(
                Finding(check=name, note=before[0].note)
                if is_refused
                else await _finding(name, check, bench)
            )
        for name, (protocol, check) in CAPABILITIES.items():
            if isinstance(bench.engine, protocol):
                findings.append(await _finding(name, check, bench))
            else:
                findings.append(Finding(check=name, note=f"not offered: no {protocol.__name__}"))
        findings.append(await _finding("close", close_twice, bench))
    return tuple(findings)


@asynccontextmanager
async def _bench(
    engine: str, model_dir: Path, folder: Path, options: EngineOptions
) -> AsyncIterator[EngineBench]:
    kind: Any = load_attribute(
        facts_of_engine(engine).path,
        what="engine",
        reason=Reason.ENGINE_NOT_FOUND,
        built_in=ENGINES,
    )
    before = used_mib()
    running: Engine = await kind.start(model_dir, options)
    try:
        yield EngineBench(
            engine=running,
            model_dir=model_dir,
            folder=folder,
            options=options,
            held_mib=used_mib() - before,
        )
    finally:
        await running.close()
        reference.cache_clear()


async def _finding(name: str, check: Run, bench: EngineBench) -> Finding:
    async def note() -> str:
        try:
            return await check(bench)
        except Unsupported as error:
            if name in REFUSABLE and isinstance(bench.engine, OutsideWeights):
                return f"{_REFUSED} {error.reason}: {error.message}"
            raise Broken(f"It is refused: {error.message}", error.remedy) from error

    return await finding_of(name, note())
