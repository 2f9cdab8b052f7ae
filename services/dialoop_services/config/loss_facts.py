"""The advantages a loss is meant for: the scorer computes them, and knows nothing of losses.

advantages_of(config)                  # {"divide_by_std": False, "leave_one_out": True} of rloo
doubts_about_advantages(config)        # ("Loss rloo is meant for [scorer] ...",)
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop_services.config.job import JobConfig

_GRPO = MappingProxyType({"divide_by_std": True, "leave_one_out": False})
_WITHOUT_STD = MappingProxyType({"divide_by_std": False, "leave_one_out": False})
_MEANT: Mapping[str, Mapping[str, bool]] = MappingProxyType(
    {
        "dr_grpo": _WITHOUT_STD,
        "dppo_mask": _WITHOUT_STD,
        "reinforce_pp": _WITHOUT_STD,  # it whitens over the whole train step instead
        "rloo": MappingProxyType({"divide_by_std": False, "leave_one_out": True}),
    }
)


def advantages_of(config: JobConfig) -> dict[str, bool]:
    """What the scorer is told: the config's word, or what the loss is meant for (GRPO's if any)."""
    meant = _MEANT.get(config.train.loss, _GRPO)
    said = {name: getattr(config.scorer, name) for name in meant}
    return {name: meant[name] if value is None else value for name, value in said.items()}


def doubts_about_advantages(config: JobConfig) -> tuple[str, ...]:
    """One sentence for each way in which the config departs from what its loss is named after."""
    if config.train.mode != "rl" or not config.train.num_steps:
        return ()
    loss, given = config.train.loss, advantages_of(config)
    meant = {name: value for name, value in _MEANT.get(loss, {}).items() if value != given[name]}
    if loss == "dapo" and not config.scorer.drop_uniform:
        meant["drop_uniform"] = True
    return tuple(
        f"loss {loss} is meant for [scorer] {name} = {str(value).lower()}, which is not what "
        "this config has"
        for name, value in meant.items()
    )
