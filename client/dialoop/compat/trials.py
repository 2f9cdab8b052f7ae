"""A trial's results under the names that its users' tests read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dialoop.trials.trial import TrialResult


def trial_keys(result: TrialResult) -> dict[str, Any]:
    """Return every key of `run_trial` and its alias: ids, messages, mask, session_ids."""
    return {
        "full_token_ids": result.full_token_ids,
        "full_attention_mask": result.full_attention_mask,
        "completion_only_mask": result.completion_only_mask,
        "final_completion_messages": result.final_completion_messages,
        "session_ids": result.session_ids,
        "ids": result.full_token_ids,
        "messages": result.final_completion_messages,
        "mask": result.completion_only_mask,
    }
