"""Packed batches: many sequences of different lengths in one row, without padding.

Two sequences of 3 and 2 tokens, of which the policy wrote the last two and the last one:

    packed_tokens   5  8  9 | 4  7
    position_ids    0  1  2 | 0  1      restart with every sequence
    sample_mask     0  0  0 | 1  1      which sequence owns the token, -1 on padding
    loss_mask       .  x  x | .  x
    cu_seqlens      0         3      5

Alignment: the log-prob of the token at p comes from the logits at p - 1 of the same sequence. So
every sampled token is trained, except the first token of a sequence, which has no predictor.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from dialoop.errors import InvalidInput, InvalidSequence
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion, Sequence
from torch import Tensor

from dialoop_learning.rl.forest import Forest, number_pairs, plant
from dialoop_learning.rl.routed_experts import NO_EXPERT

OPTIONAL = ("inference_logprobs", "proximal_logprobs", "ref_logprobs", "advantages", "staleness")
"""Names of the values that a row may hold for each of its trained tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRow:
    """One sequence as tensors, ready to be packed. An unknown value is None.

    token_ids: int64 [L]. response_mask: bool [L], of which M are true.
    inference_logprobs, proximal_logprobs, ref_logprobs, advantages, staleness (in policy versions):
    float32 [M]. routed_experts: int16 [L, layers, k], those that an engine chose, NO_EXPERT where
    the model shall choose. group_index: the sequence's group in the train step. trajectory_index:
    its trajectory in that group, None for a row that is no part of a trajectory. temperature: the
    one that its tokens were sampled with. teacher_prompt: int64 ids that a teacher reads in place
    of the tokens before the first sampled one.
    """

    token_ids: Tensor
    response_mask: Tensor
    inference_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    staleness: Tensor | None = None
    routed_experts: Tensor | None = None
    group_index: int = 0
    trajectory_index: int | None = None
    temperature: float = 1.0
    teacher_prompt: Tensor | None = None

    def __post_init__(self) -> None:
        if not len(self.token_ids) or bool(self.response_mask[0]):
            raise InvalidSequence(
                "A sequence has no token, or is to train its first, which nothing predicts.",
                reason=Reason.EMPTY_PROMPT,
                remedy="Give every sequence at least one prompt token.",
            )
        if not self.temperature > 0:
            raise InvalidSequence(
                f"A sequence was sampled at temperature {self.temperature}, where tokens have no "
                "log-probs.",
                reason=Reason.GREEDY_SAMPLING,
                remedy="Train on tokens sampled with a temperature above 0.",
            )

    @classmethod
    def from_sequence(
        cls,
        sequence: Sequence,
        *,
        group_index: int = 0,
        trajectory_index: int | None = None,
        current: PolicyVersion | None = None,
        temperature: float = 1.0,
    ) -> TokenRow:
        """Return the row of one trajectory sequence; its M tokens all get a single advantage.

        Staleness counts from `current` and is None without it. Log-probs are None unless the
        sequence has one for each of its M sampled tokens.
        """
        count = sequence.num_model_tokens
        advantages = None
        if len(sequence.token_advantages):
            advantages = torch.from_numpy(sequence.token_advantages.copy())
        elif sequence.advantage is not None:
            advantages = torch.full((count,), sequence.advantage)
        logprobs: dict[str, Any] = {
            name: torch.from_numpy(values.copy())
            for name in ("inference_logprobs", "ref_logprobs")
            if len(values := getattr(sequence, name)) == count
        }
        return cls(
            token_ids=torch.from_numpy(sequence.token_ids.astype("int64")),
            response_mask=torch.from_numpy(sequence.response_mask()),
            advantages=advantages,
            staleness=None if current is None else _staleness(sequence, current),
            group_index=group_index,
            trajectory_index=trajectory_index,
            temperature=temperature,
            **logprobs,
        )

    def behind_teacher_prompt(self) -> TokenRow:
        """Return the same sampled tokens behind the teacher's prompt, without other values."""
        prompt = self.teacher_prompt
        assert prompt is not None
        start = int(self.response_mask.int().argmax())
        no_response = torch.zeros(len(prompt), dtype=torch.bool)
        return TokenRow(
            token_ids=torch.cat([prompt, self.token_ids[start:]]),
            response_mask=torch.cat([no_response, self.response_mask[start:]]),
            temperature=self.temperature,
        )

    @classmethod
    def from_demonstration(
        cls, token_ids: Rows[int], loss_mask: Rows[bool], *, temperature: float = 1.0
    ) -> TokenRow:
        """Return a row to imitate: token ids [L] that another author wrote, and which to learn."""
        return cls(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            response_mask=torch.tensor(loss_mask, dtype=torch.bool),
            temperature=temperature,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One packed row of T tokens from N sequences. It stays in its process.

    packed_tokens, position_ids, sample_mask: int64 [T].
    response_mask: bool [T], tokens that the policy wrote. loss_mask: bool [T], those of them that
    the loss counts. lengths: N numbers. cu_seqlens: int32 [N + 1].
    inference_logprobs, proximal_logprobs, ref_logprobs, advantages, staleness: float32 [T], 0 off
    the response, None if unknown. routed_experts: int16 [T, layers, k], NO_EXPERT where the model
    chooses, None if it chooses everywhere. group_indices, trajectory_indices, temperatures: N
    values, those of each sequence's TokenRow.
    """

    packed_tokens: Tensor
    position_ids: Tensor
    sample_mask: Tensor
    response_mask: Tensor
    loss_mask: Tensor
    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    inference_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    staleness: Tensor | None = None
    routed_experts: Tensor | None = None
    group_indices: tuple[int, ...] = ()
    trajectory_indices: tuple[int | None, ...] = ()
    temperatures: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        # With RoPE no log-prob test notices positions that do not restart, so check them here.
        expected = _positions(self.attention_lengths).to(self.position_ids.device)
        if not torch.equal(self.position_ids, expected):
            raise InvalidInput(
                "position_ids do not restart at 0 with every sequence.",
                reason=Reason.POSITIONS_NOT_RESTARTED,
                remedy="Build batches with pack_rows or pack.",
            )
        if bool((self.loss_mask & ((self.position_ids == 0) | (self.sample_mask < 0))).any()):
            raise InvalidInput(
                "loss_mask is true for a first token or for padding.",
                reason=Reason.TOKEN_WITHOUT_PREDICTOR,
                remedy="Leave out the first token of every sequence and padding.",
            )

    @property
    def num_tokens(self) -> int:
        """Return T: all tokens of the row, with padding."""
        return len(self.packed_tokens)

    @property
    def num_sequences(self) -> int:
        """Return N: how many sequences the row holds."""
        return len(self.lengths)

    @property
    def num_loss_tokens(self) -> int:
        """Return M: how many tokens the loss counts."""
        return int(self.loss_mask.sum())

    @property
    def attention_lengths(self) -> tuple[int, ...]:
        """Return the lengths for attention: padding attends to itself, as one more sequence."""
        padding = len(self.packed_tokens) - sum(self.lengths)
        return (*self.lengths, padding) if padding else self.lengths

    @property
    def trained_positions(self) -> Tensor:
        """Return the positions int64 [M] of the trained tokens; each predictor is one earlier."""
        return self.loss_mask.nonzero().squeeze(-1)

    @property
    def temperature(self) -> float | Tensor:
        """Return the sampling temperature: one number, or float32 [M] if sequences differ."""
        if len(set(self.temperatures)) <= 1:
            return next(iter(self.temperatures), 1.0)
        owners = self.gather(self.sample_mask)
        return torch.tensor(self.temperatures, device=owners.device)[owners]

    def gather(self, values: Tensor) -> Tensor:
        """Return values [T] at the trained positions, [M]."""
        return values[self.loss_mask]

    def scatter(self, values: Tensor) -> Tensor:
        """Return values [M] of the trained tokens at their positions in the row, [T], else 0."""
        row = torch.zeros(self.num_tokens, dtype=values.dtype, device=values.device)
        return row.masked_scatter(self.loss_mask, values)

    def split(self, values: Tensor) -> list[Tensor]:
        """Return values [M] of the trained tokens as one tensor per sequence, in order."""
        owners = self.gather(self.sample_mask)
        counts = torch.bincount(owners, minlength=self.num_sequences).tolist()
        return list(torch.split(values, counts))

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return the same batch on another device."""
        names = ("packed_tokens", "position_ids", "sample_mask", "response_mask", "loss_mask")
        others = ("cu_seqlens", "routed_experts", *OPTIONAL)
        values = {name: getattr(self, name) for name in (*names, *others)}
        moved: dict[str, Any] = {k: v if v is None else v.to(device) for k, v in values.items()}
        return replace(self, **moved)


def pack(sequences: Rows[Sequence], *, pad_to: int | None = None) -> PackedBatch:
    """Pack trajectory sequences into one row, with their log-probs and advantages."""
    return pack_rows([TokenRow.from_sequence(s) for s in sequences], pad_to=pad_to)


def pack_rows(
    rows: Rows[TokenRow],
    *,
    pad_to: int | None = None,
    pad_id: int = 0,
    names: Rows[str] | None = None,
) -> PackedBatch:
    """Pack rows into one; `pad_to` pads it to a fixed length, which only compiled graphs need.

    Errors name a sequence by `names`, or else by its index.
    """
    lengths = tuple(len(row.token_ids) for row in rows)
    padding = 0 if pad_to is None else pad_to - sum(lengths)
    if not rows or padding < 0:
        raise InvalidInput(
            f"{len(rows)} sequences of {sum(lengths)} tokens do not fit a row of {pad_to}.",
            reason=Reason.ROW_DOES_NOT_FIT,
            remedy="Plan rows with dialoop_learning.rl.packing_plan.plan_rows.",
        )
    response = _pad(torch.cat([row.response_mask for row in rows]), padding, 0)
    owners = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    return PackedBatch(
        packed_tokens=_pad(torch.cat([row.token_ids for row in rows]), padding, pad_id),
        position_ids=_positions((*lengths, padding) if padding else lengths),
        sample_mask=_pad(owners, padding, -1),
        response_mask=response,
        loss_mask=response,
        lengths=lengths,
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        group_indices=tuple(row.group_index for row in rows),
        trajectory_indices=tuple(row.trajectory_index for row in rows),
        temperatures=tuple(row.temperature for row in rows),
        routed_experts=_join_experts(rows, padding),
        **{name: _scatter_optional(rows, name, response, names) for name in OPTIONAL},
    )


def plant_rows(rows: Rows[TokenRow]) -> Forest:
    """Return the forest of rows, in which they have in common what a packed row computes once."""
    ids = [row.token_ids.numpy() for row in rows]
    experts = _join_experts(rows, 0)
    if experts is not None:
        numbers = number_pairs(np.concatenate(ids), experts.numpy())
        ids = np.split(numbers, [*accumulate(map(len, ids))][:-1])
    return plant(ids)


def _join_experts(rows: Rows[TokenRow], padding: int) -> Tensor | None:
    """Return the recorded experts [T, layers, k]; None where no row has any."""
    recorded = [row.routed_experts for row in rows]
    form = next((experts for experts in recorded if experts is not None), None)
    if form is None:
        return None
    lengths = [len(row.token_ids) for row in rows]
    pairs = zip([*recorded, None], [*lengths, padding], strict=True)
    return torch.cat(
        [
            form.new_full((length, *form.shape[1:]), NO_EXPERT) if experts is None else experts
            for experts, length in pairs
        ]
    )


def _staleness(sequence: Sequence, current: PolicyVersion) -> Tensor:
    """Return how many policy versions ago each trained token was sampled, float32 [M]."""
    ages = {version: current.staleness_of(version) for version in sequence.policy_versions}
    return torch.tensor([float(ages[v]) for v in sequence.token_versions()])


def _pad(values: Tensor, padding: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, padding), value=fill) if padding else values


def _positions(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def _scatter_optional(
    rows: Rows[TokenRow], name: str, response_mask: Tensor, names: Rows[str] | None
) -> Tensor | None:
    """Return optional values at the response positions, [T]; all sequences have them or none."""
    with_response = [i for i, row in enumerate(rows) if bool(row.response_mask.any())]
    values = [value for i in with_response if (value := getattr(rows[i], name)) is not None]
    if not values:
        return None
    if len(values) != len(with_response):
        lacking = next(i for i in with_response if getattr(rows[i], name) is None)
        raise InvalidInput(
            f"Sequence {lacking if names is None else repr(names[lacking])} has no {name}, and "
            f"{len(values)} of {len(rows)} sequences have them.",
            reason=Reason.RAGGED,
            remedy=f"Give {name} for every sequence of a batch or for none.",
        )
    row = torch.zeros(len(response_mask), dtype=torch.float32)
    return row.masked_scatter(response_mask, torch.cat(values).float())
