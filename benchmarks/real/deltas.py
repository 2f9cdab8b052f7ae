"""Train SmolLM2-135M, send every step to an engine by what changed, and compare all bits.

For each number format of the trained weights and each learning rate: 50 steps of AdamW on 32 tokens
of this repository's docs, each sent in bfloat16 over `chunks` to a replica of the transformers
engine, which proves its file's SHA-256. `equal_steps` counts the steps after which each parameter
of the engine has the bits of the trainer's, rounded to bfloat16. `share` is the bytes that went
over the wire, as a part of the whole; a step that is none of `deltas` went whole.
`python -m benchmarks.real.deltas > benchmarks/results/real_deltas.json`
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from dialoop.clients.inference import WeightsManifest
from dialoop.sequences import PolicyVersion
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.packing.rows import TokenRow
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.replica.replica import Replica
from dialoop_services.inference.transformers_engine.engine import TransformersEngine
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.learner.learner_state import ExportedWeights
from dialoop_services.trainer.publish.publisher import weights_sender_of
from dialoop_services.trainer.settings import TrainerSettings

from benchmarks.real.__main__ import MODEL, fetch_model
from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor

ROOT = Path(__file__).resolve().parents[2]
RATES, FORMATS = (1e-6, 1e-5, 1e-4), ("float32", "bfloat16")
NUM_STEPS, ROW_TOKENS = 50, 32


class Wire:
    """A replica of this process as a publisher calls it, with the bytes that come to it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.num_bytes, self.load_s = 0, 0.0

    async def load_weights(self, manifest: Any, contents: Any, *, deadline_s: float) -> None:
        """Load as the service does."""
        began = time.perf_counter()

        async def counted() -> Any:
            async for chunk in contents:
                self.num_bytes += len(chunk)
                yield chunk

        async with asyncio.timeout(deadline_s):
            await self._replica.load(manifest, counted())
        self.load_s = time.perf_counter() - began


def rows_of(model_dir: Path, number: int) -> list[list[int]]:
    """Return so many rows of the docs' tokens."""
    text = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    ids = Tokenizer.from_directory(model_dir).encode(text[: number * ROW_TOKENS * 6]).ids
    return [ids[at : at + ROW_TOKENS] for at in range(0, number * ROW_TOKENS, ROW_TOKENS)]


def equals(engine: Any, learner: Learner) -> bool:
    """Return whether each of the engine's parameters has the bits of the trainer's, rounded."""
    theirs = engine._model.state_dict()
    ours = learner.state.policy.causal_lm.state_dict()
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name].bfloat16().view(torch.int16), theirs[name].view(torch.int16))
        for name in theirs
    )


async def run(model_dir: Path, folder: Path, *, dtype: str, rate: float, num_steps: int) -> Any:
    """Return the figures of one number format and learning rate."""
    settings = TrainerSettings(
        model_dir=model_dir,
        run_dir=folder,
        dtype=cast("Any", dtype),
        inference_dtype="bfloat16",
        data_plane="chunks",
        learning_rate=rate,
    )
    options = EngineOptions(max_model_len=ROW_TOKENS, max_num_seqs=4, dtype="bfloat16")
    engine = await TransformersEngine.start(model_dir, options)

    async def report(_: bool) -> None:
        pass

    wire = Wire(Replica(engine, weights_root=None, report=report))
    learner, sender = Learner(settings), weights_sender_of(settings)
    before: ExportedWeights | None = None
    shares, whole_s, delta_s, train_s, num_equal = [], [], [], [], 0
    for number, ids in enumerate([[], *rows_of(model_dir, num_steps)]):
        if ids:
            began = time.perf_counter()
            row = TokenRow.from_demonstration(ids, [False] + [True] * (len(ids) - 1))
            learner.sft_step([row])
            train_s.append(time.perf_counter() - began)
        weights = learner.export(folder / str(number % 2) / "model.safetensors")
        if before is not None:
            weights = weights.since(before)
        wire.num_bytes = 0
        version = PolicyVersion(lineage="bench", number=number + 1)
        manifest = WeightsManifest(
            policy_version=version, sha256=weights.sha256, num_bytes=weights.num_bytes
        )
        await sender.send(cast("Any", wire), manifest, weights, deadline_s=600)
        before = weights
        if not ids:
            continue  # the first one is whole
        (whole_s if weights.delta is None else delta_s).append(wire.load_s)
        shares.append(wire.num_bytes / weights.num_bytes)
        num_equal += equals(engine, learner)
    await engine.close()
    return {
        "steps": num_steps,
        "equal_steps": num_equal,
        "deltas": len(delta_s),
        "whole_bytes": weights.num_bytes,
        "share_mean": round(statistics.mean(shares), 5),
        "share_max": round(max(shares), 5),
        "share_last": round(shares[-1], 5),
        "load_delta_s": round(statistics.median(delta_s), 3) if delta_s else None,
        "load_whole_s": round(statistics.median(whole_s), 3) if whole_s else None,
        "train_s": round(statistics.median(train_s), 2),
    }


def main() -> None:
    """Measure each number format and learning rate, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tiny", action="store_true", help="on the demo's model: is all there?")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        model_dir = arguments.model
        if arguments.tiny:
            model_dir = make_tiny_model(Path(place, "model"), seed=0)
        elif model_dir == MODEL:
            fetch_model()
        for dtype, rate in product(arguments.formats, arguments.rates):
            folder = Path(tempfile.mkdtemp(dir=place))
            figures[f"{dtype}_{rate:.0e}"] = asyncio.run(
                run(model_dir, folder, dtype=dtype, rate=rate, num_steps=arguments.steps)
            )
            gc.collect()
            print(figures, file=sys.stderr)  # a run takes an hour on a busy machine
    print_figures({"processor": processor(), "torch": torch.__version__}, figures)


if __name__ == "__main__":
    main()
