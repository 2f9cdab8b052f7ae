"""The debug table: every number that a loss reads of a train step, one line for each sequence.

It is `dialoop_extras.seed_interface.debug_table` for sequences of
several turns.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dialoop_learning.packing.rows import TokenRow
    from torch import Tensor

    from dialoop_services.trainer.data.batches import Batch

FILE = "debug_table.jsonl"


def write_debug_table(
    run_dir: Path,
    batch: Batch,
    rows: Sequence[TokenRow],
    policy_logprobs: Sequence[Tensor],
    read_by: Mapping[str, Any],
) -> None:
    """Add a line for each row; the policy's log-probs are float [M].

    `read_by` has the train step and the version of the weights that read the rows.
    """
    with (run_dir / FILE).open("a", encoding="utf-8") as lines:
        for row, logprobs in zip(rows, policy_logprobs, strict=True):
            line = {**read_by} | _line(batch, row, logprobs)
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")


def _line(batch: Batch, row: TokenRow, logprobs: Tensor) -> dict[str, Any]:
    group = batch.groups[row.group_index]
    trajectory = group.trajectories[row.trajectory_index or 0]
    return {
        "trajectory_id": trajectory.trajectory_id,
        "group_id": group.group_id,
        "policy_versions": [str(version) for version in trajectory.policy_versions],
        "num_tokens": len(row.token_ids),
        "num_response_tokens": int(row.response_mask.sum()),
        "response_positions": row.response_mask.nonzero().squeeze(-1).tolist(),
        "response_tokens": row.token_ids[row.response_mask].tolist(),
        "policy_logprobs": logprobs.tolist(),
        **{
            name: None if (values := getattr(row, name)) is None else values.tolist()
            for name in ("inference_logprobs", "ref_logprobs", "advantages", "staleness")
        },
        "temperature": row.temperature,
        "reward": trajectory.reward,
        "rewards": [
            {reward.name: reward.recorded for reward in turn.rewards if not reward.absent}
            for turn in trajectory.turns
        ],
        "answer": trajectory.history[-1].content,
    }
