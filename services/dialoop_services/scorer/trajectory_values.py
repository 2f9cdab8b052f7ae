"""Log-probs and KL of the tokens of trajectories, for callers of ScorerService.

torchrl's RetrieveLogProb and RetrieveKL write 0 where a token has no value. Here such a token is
left out, and each value has the position of its token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.sequences import Floats, TokenValues

from dialoop_services.scorer.rewards import token_kl
from dialoop_services.scorer.scoring import temperature_of

if TYPE_CHECKING:
    from collections.abc import Sequence as Rows

    from dialoop.trajectory import Trajectory

    from dialoop_services.scorer.reference_batches import ReferenceBatches

Scope = Literal["assistant", "all"]


async def trajectory_logprobs(
    trajectories: Rows[Trajectory], model: ReferenceBatches, scope: Scope
) -> list[TokenValues]:
    """Return the log-probs in nats of each sequence, at the temperature it was sampled with.

    With the scope "assistant" they are of the tokens that the policy sampled, with "all" of all but
    the first.
    """
    temperatures = [temperature_of(t) for t in trajectories for _ in t.sequences]
    sequences = [sequence for t in trajectories for sequence in t.sequences]
    if scope == "all":
        ids = [sequence.token_ids.tolist() for sequence in sequences]
        return _with_positions(trajectories, await model.logprobs_of_all(ids, temperatures), scope)
    sampled = [i for i, sequence in enumerate(sequences) if sequence.num_model_tokens]
    logprobs = await model.logprobs_of_sampled(
        [sequences[i] for i in sampled], [temperatures[i] for i in sampled]
    )
    values = [np.empty(0, dtype=np.float32) for _ in sequences]
    for i, own in zip(sampled, logprobs, strict=True):
        values[i] = own
    return _with_positions(trajectories, values, scope)


async def trajectory_kl(
    trajectories: Rows[Trajectory],
    *,
    policy: ReferenceBatches | None,
    reference: ReferenceBatches,
    scope: Scope,
    estimator: str,
) -> list[TokenValues]:
    """Return the KL(policy, reference) in nats of each token in the scope, sequence by sequence.

    Without a `policy` it is the one that sampled, by the log-probs in the trajectories. Raises
    InvalidInput (RAGGED) where they do not have one for each token of the scope.
    """
    if policy is not None:
        own = [v.values for v in await trajectory_logprobs(trajectories, policy, scope)]
    else:
        _require_recorded(scope)
        own = [s.inference_logprobs for t in trajectories for s in t.sequences]
    others = await trajectory_logprobs(trajectories, reference, scope)
    pairs = zip(own, others, strict=True)
    return _with_positions(
        trajectories, [token_kl(mine, other.values, estimator) for mine, other in pairs], scope
    )


def _with_positions(
    trajectories: Rows[Trajectory], values: Rows[Floats], scope: Scope
) -> list[TokenValues]:
    rows = [(t, i, s) for t in trajectories for i, s in enumerate(t.sequences)]
    return [
        TokenValues(
            trajectory_id=trajectory.trajectory_id,
            sequence_index=index,
            positions=(
                np.flatnonzero(sequence.response_mask())
                if scope == "assistant"
                else np.arange(1, len(sequence))
            ).astype(np.int32),
            values=own,
        )
        for (trajectory, index, sequence), own in zip(rows, values, strict=True)
    ]


def _require_recorded(scope: Scope) -> None:
    if scope == "all":
        raise InvalidInput(
            "The trajectories have log-probs of sampled tokens only, and the KL of all tokens is "
            "asked for.",
            reason=Reason.RAGGED,
            remedy="Name the policy's model in `model_id`, or use TOKEN_SCOPE_ASSISTANT.",
        )
