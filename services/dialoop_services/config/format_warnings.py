"""Number formats that a config may have and that seldom do what is meant.

doubts_about_formats(config)    # ("dtype bfloat16 rounds away ...",)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dialoop_services.config.job import JobConfig

_HALF = "bfloat16"
_ROUNDING = 1e-2
"""Nats: below this, the largest difference of log-probs with and without bfloat16 does not stay."""


def doubts_about_formats(config: JobConfig) -> tuple[str, ...]:
    """One sentence for each format that rounds what the job is about."""
    trains = config.train.num_steps or config.train.mode == "sft" or config.warm_start.num_steps
    bound = config.gates.logprob_difference_at_most
    doubts: list[str] = []
    if trains and config.dtype == _HALF:
        doubts.append(
            "dtype bfloat16 rounds away updates below a 256th of a weight; float32 with "
            f'autocast = "{_HALF}" in [train] and dtype = "{_HALF}" in [inference] keeps them'
        )
    if trains and _HALF in (config.dtype, config.inference.dtype) and bound < _ROUNDING:
        doubts.append(
            f"log-probs in bfloat16 differ by more than logprob_difference_at_most = {bound:g} in "
            "[gates]: set it to 0.1 or so"
        )
    return tuple(doubts)
