"""Check a run's log-probs; print one JSON line.

`python -m dialoop_services.trainer.records.rescore RUN_DIR`

A full forward pass of the trainer's model scores every stored token again under the policy version
that sampled it. The result is compared with the log-prob that the engine recorded. With update mode
keep_kv no version reproduces the tokens sampled while weights were loaded, so those trajectories
are left out and counted.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dialoop.episode import UpdateMode
from dialoop.errors import DataLost
from dialoop.reasons import Reason
from dialoop.views.run_files import trajectory_files
from numpy.typing import NDArray
from safetensors.torch import load_file

from dialoop_services.learning.lora.base_weights import BaseWeights, adapted_tensors
from dialoop_services.learning.lora.layers import ADAPTER
from dialoop_services.learning.model.policy import PolicyModel, load_policy
from dialoop_services.learning.packing.rows import TokenRow, pack_rows
from dialoop_services.trainer.publish.export import WEIGHTS, RunPolicies

_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """The tokens of one sequence that one version sampled, at `positions`."""

    token_ids: tuple[int, ...]
    positions: NDArray[np.int64]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The sampled tokens of a run, by (version, temperature)."""

    num_trajectories: int
    num_inexact_trajectories: int
    sampled: dict[tuple[str, float], list[SampledTokens]]


def sampled_by_version(*paths: Path) -> Stored:
    """Return the sampled tokens in the parts of trajectories.jsonl that can be re-scored."""
    by_version: dict[tuple[str, float], list[SampledTokens]] = defaultdict(list)
    num_trajectories = num_inexact = 0
    for row in _rows(paths):
        if row.get("update_mode") == UpdateMode.KEEP_KV.name:
            num_inexact += 1
            continue
        num_trajectories += 1
        # A greedy sampler reports the log-probs of the untempered distribution.
        temperature = row["temperature"] or 1.0
        for sequence in row["sequences"]:
            for version, sampled in _sampled_tokens(sequence):
                by_version[version, temperature].append(sampled)
    return Stored(
        num_trajectories=num_trajectories, num_inexact_trajectories=num_inexact, sampled=by_version
    )


def _rows(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    # Split at newlines only: a policy may sample every other line separator.
    for path in paths:
        with path.open(encoding="utf-8", newline="\n") as lines:
            yield from map(json.loads, lines)


def _sampled_tokens(sequence: dict[str, Any]) -> Iterator[tuple[str, SampledTokens]]:
    start = 0
    ids = tuple(sequence["token_ids"])
    logprobs = np.array(sequence["inference_logprobs"], dtype=np.float32)
    for segment in sequence["segments"]:
        if segment["source"] != "MODEL":
            continue
        positions = np.arange(segment["start"], segment["start"] + segment["length"])
        version = f"{segment['lineage']}-{segment['policy_version']}"
        own = logprobs[start : start + len(positions)]
        start += len(positions)
        # Later tokens change nothing, so a row ends where its version's tokens end.
        yield (
            version,
            SampledTokens(token_ids=ids[: positions[-1] + 1], positions=positions, logprobs=own),
        )


@torch.no_grad()
def largest_difference(policy: PolicyModel, rows: list[SampledTokens], temperature: float) -> float:
    """Return the largest absolute difference in nats over the rows' sampled tokens."""
    worst = 0.0
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[start : start + _ROWS_AT_ONCE]
        batch = pack_rows([_as_row(sampled) for sampled in part])
        own = policy(batch, temperature=temperature).logprobs
        for scores, sampled in zip(batch.split(own), part, strict=True):
            difference = np.abs(scores.numpy() - sampled.logprobs).max()
            worst = max(worst, float(difference))
    return worst


def _as_row(sampled: SampledTokens) -> TokenRow:
    mask = np.zeros(len(sampled.token_ids), dtype=np.bool_)
    mask[sampled.positions] = True
    return TokenRow.from_demonstration(list(sampled.token_ids), mask.tolist())


def rescore(run_dir: Path, model_dir: Path) -> dict[str, float]:
    """Re-score trajectories.jsonl; raise DataLost when a version's weights are gone."""
    stored = sampled_by_version(*trajectory_files(run_dir))
    policy, weights = load_policy(model_dir), _Weights(run_dir, model_dir)
    worst, num_tokens = 0.0, 0
    for (version, temperature), rows in sorted(stored.sampled.items()):
        policy.causal_lm.load_state_dict(weights.of(version), strict=False)
        policy.causal_lm.tie_weights()
        worst = max(worst, largest_difference(policy, rows, temperature))
        num_tokens += sum(len(sampled.positions) for sampled in rows)
    return {
        "num_trajectories": stored.num_trajectories,
        "num_inexact_trajectories": stored.num_inexact_trajectories,
        "num_tokens": num_tokens,
        "num_policy_versions": len({version for version, _ in stored.sampled}),
        "max_difference": worst,
    }


class _Weights:
    """The weights of a run's published policies, with adapters added to their base."""

    def __init__(self, run_dir: Path, model_dir: Path) -> None:
        self._policies = run_dir / "policies"
        self._model_dir = model_dir
        self._base: tuple[BaseWeights, str] | None = None

    def of(self, version: str) -> dict[str, torch.Tensor]:
        """Return the version's tensors; raise DataLost (POLICY_GONE) when they were deleted."""
        directory = self._policies / version
        if (directory / ADAPTER).is_file():
            if self._base is None:
                base = BaseWeights.of(self._model_dir)
                self._base = base, base.digest()
            return adapted_tensors(directory, self._base[0], digest=self._base[1])
        if not (directory / WEIGHTS).is_file():
            raise DataLost(
                f"The weights of policy {version} were deleted.",
                reason=Reason.POLICY_GONE,
                remedy="Run with keep_policies = 0 to re-score everything.",
            )
        return dict(load_file(directory / WEIGHTS))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Re-score a run's trajectories.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--model-dir", type=Path, help="default: the one the run started from")
    arguments = parser.parse_args()
    model_dir = arguments.model_dir or RunPolicies.of(arguments.run_dir).model_dir
    print(json.dumps(rescore(arguments.run_dir, model_dir)))  # noqa: T201


if __name__ == "__main__":
    main()
