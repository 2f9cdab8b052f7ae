"""What must hold at the end of a run: always that it is exact, and what the config asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop_services.config.job import JobConfig


def gates_of(summary: Mapping[str, Any], config: JobConfig) -> dict[str, bool]:
    """Each gate by name and whether it holds."""
    return {**_exactness(summary, config), **_configured_gates(summary, config)}


def _exactness(summary: Mapping[str, Any], config: JobConfig) -> dict[str, bool]:
    bound = config.gates.logprob_difference_at_most
    accounting = summary["accounting"]
    staleness = [int(age) for age in summary["staleness_histogram"]]
    return {
        "every trajectory is accounted for": accounting["ledger_adds_up"]
        and accounting["collectors_agree"]
        and accounting["trainer_agrees"],
        f"nothing trained was staler than {config.train.max_staleness}": max(staleness, default=0)
        <= config.train.max_staleness,
        f"log-probs after every publish within {bound:g}": summary["max_logprob_difference"]
        <= bound,
        f"re-scored log-probs within {bound:g}": summary["rescoring"].get(
            "max_difference", float("inf")
        )
        <= bound,
    }


def _configured_gates(summary: Mapping[str, Any], config: JobConfig) -> dict[str, bool]:
    gates = config.gates
    at_least = (
        ("heldout_greedy_after", gates.heldout_greedy_after_at_least),
        ("heldout_sampled_gain", gates.heldout_sampled_gain_at_least),
        ("tool_call_rate_after", gates.tool_call_rate_after_at_least),
        ("share_of_train_steps_with_older_data", gates.older_data_share_at_least),
        ("num_policy_versions", gates.policy_versions_at_least),
    )
    found = {
        f"{name} at least {bound:g}": (summary[name] or 0) >= bound
        for name, bound in at_least
        if bound is not None
    }
    bound = gates.heldout_greedy_before_at_most
    if bound is not None:
        before = summary["heldout_greedy_before"]
        found[f"heldout_greedy_before at most {bound:g}"] = before is not None and before <= bound
    return found
