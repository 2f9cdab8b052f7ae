"""Check a run's log-probs; print the result as a JSON line, after lines of progress.

`python -m dialoop_ops.policies.rescore RUN_DIR --within-s 60`

A full forward pass of the trainer's model scores stored tokens again under the policy version that
sampled them, and compares the result with the log-prob that the engine recorded. It checks a sample
that fits into the time: of each version whose weights are still there, up to 256 trajectories. What
was not checked is counted by reason; with update mode keep_kv, for one, no version reproduces the
tokens sampled while weights were loaded.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from dialoop.episode import UpdateMode
from dialoop.errors import InvalidInput
from dialoop.sequences import Along, Column
from dialoop_learning.lora.base_weights import BaseWeights, adapted_tensors
from dialoop_learning.lora.layers import ADAPTER
from dialoop_learning.model.checkpoint_names import from_checkpoint
from dialoop_learning.model.policy import PolicyModel, load_policy
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.rl.buckets import mismatch_by_depth
from dialoop_learning.rl.routed_experts import COLUMN, Routing, experts_of
from dialoop_services.trainer.records.rows import trajectory_files
from numpy.typing import NDArray
from safetensors.torch import load_file

from dialoop_ops.runs.policies import WEIGHTS, RunPolicies

_MAX_PER_VERSION = 256
_WITHIN_S = 60.0
_PRINT_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """The tokens of one sequence that one version sampled, at `positions`.

    experts: a row for each token, where the engine recorded what computed them.
    """

    token_ids: tuple[int, ...]
    positions: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    experts: Column | None = None


@dataclass(slots=True)
class RowSample:
    """A seeded random sample of what one version sampled at one temperature."""

    num_seen: int = 0
    rows: list[SampledTokens] = field(default_factory=list)

    def add(self, tokens: SampledTokens, random: Random) -> None:
        """Add a row, so that of all that were added each is in the sample equally likely."""
        self.num_seen += 1
        if len(self.rows) < _MAX_PER_VERSION:
            self.rows.append(tokens)
        elif (place := random.randrange(self.num_seen)) < _MAX_PER_VERSION:
            self.rows[place] = tokens


@dataclass(slots=True, kw_only=True)
class Stored:
    """What a run stored: samples by (version, temperature), and counts of trajectories."""

    num_trajectories: int = 0
    num_inexact_trajectories: int = 0
    sampled: dict[tuple[str, float], RowSample] = field(
        default_factory=lambda: defaultdict(RowSample)
    )


def sampled_by_version(
    *paths: Path, within_s: float = math.inf, with_experts: bool = True
) -> Stored:
    """Return samples of the parts of trajectories.jsonl that can be re-scored, newest part first.

    Reading ends after `within_s` seconds.
    """
    ends_at, random, stored = time.monotonic() + within_s, Random(0), Stored()
    for row in _rows(reversed(paths)):
        if time.monotonic() > ends_at:
            break
        if row.get("update_mode") == UpdateMode.KEEP_KV.name:
            stored.num_inexact_trajectories += 1
            continue
        stored.num_trajectories += 1
        # A greedy sampler reports the log-probs of the untempered distribution.
        temperature = row["temperature"] or 1.0
        for sequence in row["sequences"]:
            experts = _experts_of(sequence) if with_experts else None
            for version, sampled in _sampled_tokens(sequence, experts):
                stored.sampled[version, temperature].add(sampled, random)
    return stored


def _rows(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    # Split at newlines only: a policy may sample every other line separator.
    for path in paths:
        with path.open(encoding="utf-8", newline="\n") as lines:
            yield from map(json.loads, lines)


def _sampled_tokens(
    sequence: dict[str, Any], experts: Column | None
) -> Iterator[tuple[str, SampledTokens]]:
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
        end = positions[-1] + 1
        yield (
            version,
            SampledTokens(
                token_ids=ids[:end],
                positions=positions,
                logprobs=own,
                experts=experts and replace(experts, values=experts.values[:end]),
            ),
        )


def _experts_of(sequence: dict[str, Any]) -> Column | None:
    """Return the recorded experts; None where several versions sampled, which a record mixes."""
    stored = sequence.get("columns", {}).get(COLUMN)
    versions = {(s["lineage"], s["policy_version"]) for s in sequence["segments"]}
    if stored is None or len({each for each in versions if each[0] is not None}) > 1:
        return None
    values = np.array(stored["data"], dtype=stored["data_type"])
    return Column(values=values, along=Along[stored["along"]])


def batches_of(rows: Iterable[SampledTokens], max_tokens: int) -> Iterator[list[SampledTokens]]:
    """Yield rows in batches of at most `max_tokens` tokens; a longer row is alone in its batch."""
    batch: list[SampledTokens] = []
    num_tokens = 0
    for row in rows:
        if batch and num_tokens + len(row.token_ids) > max_tokens:
            yield batch
            batch, num_tokens = [], 0
        batch.append(row)
        num_tokens += len(row.token_ids)
    if batch:
        yield batch


@torch.no_grad()
def differences_of(
    policy: PolicyModel, rows: list[SampledTokens], temperature: float, device: str = "cpu"
) -> NDArray[np.float64]:
    """Return policy minus engine [M] in nats, over the rows' sampled tokens in their order."""
    batch = pack_rows([_as_row(sampled, policy.routing) for sampled in rows]).to(device)
    own = policy(batch, temperature=temperature).logprobs.cpu()
    pairs = zip(batch.split(own), rows, strict=True)
    return np.concatenate([scores.double().numpy() - sampled.logprobs for scores, sampled in pairs])


def _as_row(sampled: SampledTokens, routing: Routing | None) -> TokenRow:
    mask = np.zeros(len(sampled.token_ids), dtype=np.bool_)
    mask[sampled.positions] = True
    row = TokenRow.from_demonstration(list(sampled.token_ids), mask.tolist())
    if sampled.experts is None:
        return row
    experts = torch.from_numpy(experts_of(sampled.experts, routing))
    return replace(row, routed_experts=experts)


def rescore(  # noqa: PLR0913 - what it may use, and who hears of it
    run_dir: Path,
    model_dir: Path,
    *,
    within_s: float = _WITHIN_S,
    device: str = "cpu",
    dtype: str = "float32",
    max_row_tokens: int = 1024,
    replays_experts: bool = True,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, Any]:
    """Re-score a sample of trajectories.jsonl within `within_s` seconds of reading and scoring.

    replays_experts: compute tokens with the experts that the engine recorded, as the trainer does.
    on_progress gets the number of rows that were scored and of those in the sample.
    max_difference is in nats, None if no token was checked. by_depth is from `mismatch_by_depth`.
    num_unchecked_rows counts by reason: policy_gone (its weights were deleted), time, and sample
    (beyond the sample of its version).
    """
    ends_at = time.monotonic() + within_s
    stored = sampled_by_version(
        *trajectory_files(run_dir), within_s=within_s / 2, with_experts=replays_experts
    )
    weights = _Weights(run_dir, model_dir)
    kept = {key: sample for key, sample in stored.sampled.items() if weights.are_kept(key[0])}
    num_sampled = sum(len(sample.rows) for sample in kept.values())
    checked: dict[tuple[str, float], list[SampledTokens]] = {}
    differences: list[NDArray[np.float64]] = []
    policy = load_policy(model_dir, device=device, dtype=dtype) if kept else None
    for number, (version, temperature) in enumerate(_in_order(kept)):
        left_s = ends_at - time.monotonic()
        if policy is None or left_s <= 0:
            break
        share_ends_at = time.monotonic() + left_s / (len(kept) - number)
        weights.load_into(policy, version)
        done = checked[version, temperature] = []
        for batch in batches_of(kept[version, temperature].rows, max_row_tokens):
            if done and time.monotonic() > share_ends_at:
                break
            differences.append(differences_of(policy, batch, temperature, device))
            done += batch
            on_progress(sum(map(len, checked.values())), num_sampled)
    rows = [row for done in checked.values() for row in done]
    depths = np.concatenate([np.empty(0, np.int64), *(row.positions for row in rows)])
    apart = np.concatenate([np.empty(0), *differences])
    return {
        "num_trajectories": stored.num_trajectories,
        "num_inexact_trajectories": stored.num_inexact_trajectories,
        "num_rows": len(rows),
        "num_tokens": sum(len(row.positions) for row in rows),
        "num_policy_versions": len({version for version, _ in checked}),
        "num_unchecked_rows": _count_unchecked(stored.sampled.values(), kept.values(), len(rows)),
        # NaN if one of them is
        "max_difference": float(np.abs(apart).max()) if rows else None,
        # As JSON has them: summary.json and the answer in one process are the same.
        "by_depth": {str(d): row for d, row in mismatch_by_depth(depths, apart).items()},
    }


def _count_unchecked(
    samples: Iterable[RowSample], kept: Collection[RowSample], num_checked: int
) -> dict[str, int]:
    """Return the number of rows that were not checked, by reason."""
    num_kept = sum(sample.num_seen for sample in kept)
    num_sampled = sum(len(sample.rows) for sample in kept)
    return {
        "policy_gone": sum(sample.num_seen for sample in samples) - num_kept,
        "sample": num_kept - num_sampled,
        "time": num_sampled - num_checked,
    }


def _in_order(keys: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return the newest version and the oldest, then the others in a seeded random order."""
    ordered = sorted(keys, key=lambda key: (int(key[0].rpartition("-")[2]), key))
    between = ordered[1:-1]
    Random(0).shuffle(between)
    return [*ordered[-1:], *ordered[:-1][:1], *between]


class _Weights:
    """The weights of a run's published policies, with adapters added to their base."""

    def __init__(self, run_dir: Path, model_dir: Path) -> None:
        self._policies = run_dir / "policies"
        self._model_dir = model_dir
        self._base: tuple[BaseWeights, str] | None = None

    def are_kept(self, version: str) -> bool:
        """Return whether the version's weights are still on the disk."""
        return any((self._policies / version / name).is_file() for name in (ADAPTER, WEIGHTS))

    @torch.no_grad()
    def load_into(self, policy: PolicyModel, version: str) -> None:
        """Replace the model's weights with those of the version.

        One tensor at a time, where the model has the checkpoint's names: a second copy of the model
        could need more memory than the trainer did.
        """
        names, tensors = self._of(version)
        own = policy.causal_lm.state_dict()
        if names <= own.keys():
            for name, tensor in tensors:
                if tensor.shape != own[name].shape:
                    raise InvalidInput(
                        f"{name} of {version} is {list(tensor.shape)}, and {list(own[name].shape)} "
                        f"in {self._model_dir}.",
                        remedy="Give --model-dir the model that the run started from.",
                    )
                own[name].copy_(tensor)
        else:
            loaded = from_checkpoint(policy.causal_lm, dict(tensors))
            policy.causal_lm.load_state_dict(loaded, strict=False)
        policy.causal_lm.tie_weights()

    def _of(self, version: str) -> tuple[Set[str], Iterable[tuple[str, torch.Tensor]]]:
        """Return the names of the version's tensors, and these with their names."""
        directory = self._policies / version
        if not (directory / ADAPTER).is_file():
            weights = load_file(directory / WEIGHTS)
            return weights.keys(), weights.items()
        if self._base is None:
            base = BaseWeights.of(self._model_dir)
            self._base = base, base.digest()
        base, digest = self._base
        return base.shapes().keys(), adapted_tensors(directory, base, digest=digest)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Re-score a sample of a run's trajectories.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--model-dir", type=Path, help="default: the one the run started from")
    parser.add_argument("--within-s", type=float, default=_WITHIN_S, help="seconds it may take")
    parser.add_argument("--device", default="cpu", help="as the trainer's: cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="as the trainer's weights")
    parser.add_argument("--max-row-tokens", type=int, default=1024, help="tokens scored at once")
    parser.add_argument("--replays-experts", type=int, default=1, help="1, or 0 to choose anew")
    parser.add_argument("--num-threads", type=int, default=0, help="as the trainer's; 0: torch's")
    arguments = vars(parser.parse_args())
    if num_threads := arguments.pop("num_threads"):
        torch.set_num_threads(num_threads)
    run_dir, model_dir = arguments.pop("run_dir"), arguments.pop("model_dir")
    model_dir = model_dir or RunPolicies.of(run_dir).model_dir
    result = rescore(run_dir, model_dir, on_progress=_print_progress(), **arguments)
    print(json.dumps(result))  # noqa: T201


def _print_progress() -> Callable[[int, int], None]:
    """Return a function that prints a JSON line, at most twice a second."""
    printed_at = -math.inf

    def show(num_done: int, num_total: int) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at >= _PRINT_EVERY_S:
            printed_at = time.monotonic()
            print(json.dumps({"num_done": num_done, "num_total": num_total}), flush=True)  # noqa: T201

    return show


if __name__ == "__main__":
    main()
