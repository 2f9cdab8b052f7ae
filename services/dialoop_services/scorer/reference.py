"""The reference model: log-probs of tokens another model sampled. Only this module needs torch."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from pathlib import Path

import torch
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.sequences import Floats, Sequence
from dialoop_learning.model.forest_attention import copies_keys
from dialoop_learning.model.policy import PolicyModel, load_policy
from dialoop_learning.packing.rows import TokenRow, pack_rows, plant_rows
from dialoop_learning.rl.packing_plan import plan_rows


class ReferenceModel:
    """A frozen model that scores packed rows, for one caller at a time."""

    def __init__(self, model: PolicyModel, *, max_row_tokens: int) -> None:
        self._model = model
        self._max_row_tokens = max_row_tokens
        weight = model.causal_lm.get_output_embeddings().weight
        self._vocab_size = int(weight.shape[0])
        self._device = weight.device

    def logprobs_of_sampled(
        self, sequences: Rows[Sequence], temperatures: Rows[float]
    ) -> list[Floats]:
        """Return for each sequence float32 [M], nats, at its sampling temperature."""
        return self._logprobs([TokenRow.from_sequence(s) for s in sequences], temperatures)

    def logprobs_of_all(
        self, token_ids: Rows[Rows[int]], temperatures: Rows[float]
    ) -> list[Floats]:
        """Return for each row float32 [L - 1], nats, of all tokens but the first.

        Raise InvalidInput (EMPTY_SEQUENCE, TOKEN_OUT_OF_RANGE).
        """
        for ids in token_ids:
            if not len(ids):
                raise InvalidInput("A row has no tokens.", reason=Reason.EMPTY_SEQUENCE)
        rows = [
            TokenRow.from_demonstration(ids, [False] + [True] * (len(ids) - 1)) for ids in token_ids
        ]
        return self._logprobs(rows, temperatures)

    @torch.no_grad()
    def _logprobs(self, rows: list[TokenRow], temperatures: Rows[float]) -> list[Floats]:
        lengths = [len(row.token_ids) for row in rows]
        self._require_in_vocabulary(rows)
        plan = plan_rows(
            lengths,
            max_tokens=max([self._max_row_tokens, *lengths]),
            forest=plant_rows(rows),
            whole=copies_keys(self._device),
        )
        logprobs: dict[int, Floats] = {}
        for indices in plan:
            batch = pack_rows([rows[index] for index in indices])
            counts = torch.tensor([int(rows[index].response_mask.sum()) for index in indices])
            scale = torch.tensor([temperatures[index] for index in indices])
            scores = self._model(
                batch.to(self._device), temperature=torch.repeat_interleave(scale, counts)
            )
            parts = batch.split(scores.logprobs.cpu())
            logprobs |= {i: part.numpy() for i, part in zip(indices, parts, strict=True)}
        return [logprobs[index] for index in range(len(rows))]

    def _require_in_vocabulary(self, rows: list[TokenRow]) -> None:
        for row in rows:
            lowest, highest = int(row.token_ids.min()), int(row.token_ids.max())
            if lowest < 0 or highest >= self._vocab_size:
                raise InvalidInput(
                    f"Token ids {lowest} to {highest} do not fit a vocabulary of "
                    f"{self._vocab_size}.",
                    reason=Reason.TOKEN_OUT_OF_RANGE,
                    remedy="Use the tokenizer of the reference model.",
                )


def load_reference(
    directory: Path, *, dtype: str, device: str, max_row_tokens: int, num_threads: int
) -> ReferenceModel:
    """Load the model; raise InvalidConfig or Unsupported when it cannot score packed rows."""
    torch.set_num_threads(num_threads)
    model = load_policy(directory, dtype=dtype, device=device)
    return ReferenceModel(model, max_row_tokens=max_row_tokens)
