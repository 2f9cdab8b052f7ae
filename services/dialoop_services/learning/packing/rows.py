"""Packed batches: many sequences of different lengths in one row, without padding.

Two sequences of 3 and 2 tokens, of which the policy wrote the last two and the last one:

    packed_tokens   5  8  9 | 4  7
    position_ids    0  1  2 | 0  1      restart with every sequence
    sample_mask     0  0  0 | 1  1      which sequence owns the token, -1 on padding
    loss_mask       .  x  x | .  x
    cu_seqlens      0         3      5

Alignment law: the log-prob of the token at p comes from the logits at p - 1 of the same sequence,
so every sampled token is trained, and the first token of a sequence (which has no predictor) never.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from dialoop.errors import InvalidInput, InvalidSequence
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence as Rows

    from dialoop.sequences import PolicyVersion, Sequence
    from torch import Tensor

OPTIONAL = ("inference_logprobs", "proximal_logprobs", "ref_logprobs", "advantages", "staleness")
"""What a row may know of each of its trained tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRow:
    """One sequence as tensors: what is packed. Absent values are None, never a made-up number.

    token_ids int64 [L]; response_mask bool [L] with M true; inference_logprobs, proximal_logprobs,
    ref_logprobs, advantages and staleness (in policy versions) float32 [M]. prompt: which group of
    the train step the sequence is of; temperature: what its tokens were sampled with.
    """

    token_ids: Tensor
    response_mask: Tensor
    inference_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    staleness: Tensor | None = None
    prompt: int = 0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not len(self.token_ids) or bool(self.response_mask[0]):
            raise InvalidSequence(
                "A sequence must begin with a token that nobody trains.",
                reason=Reason.EMPTY_PROMPT,
                remedy="Give every sequence at least one prompt token.",
            )
        if not self.temperature > 0:
            raise InvalidSequence(
                f"A sequence was sampled at temperature {self.temperature}, where tokens have no "
                "probability.",
                reason=Reason.GREEDY_SAMPLING,
                remedy="Train on tokens sampled with a temperature above 0.",
            )

    @classmethod
    def from_sequence(
        cls,
        sequence: Sequence,
        *,
        prompt: int = 0,
        current: PolicyVersion | None = None,
        temperature: float = 1.0,
    ) -> TokenRow:
        """The row of one trajectory sequence; a single advantage is spread over its tokens.

        Staleness is counted from `current`; without it, it is unknown. So are log-probs that the
        sequence does not have for each of its sampled tokens.
        """
        count = sequence.num_model_tokens
        advantages = None
        if len(sequence.token_advantages):
            advantages = torch.from_numpy(sequence.token_advantages.copy())
        elif sequence.advantage is not None:
            advantages = torch.full((count,), sequence.advantage)
        known: dict[str, Any] = {
            name: torch.from_numpy(values.copy())
            for name in ("inference_logprobs", "ref_logprobs")
            if len(values := getattr(sequence, name)) == count
        }
        return cls(
            token_ids=torch.from_numpy(sequence.token_ids.astype("int64")),
            response_mask=torch.from_numpy(sequence.response_mask()),
            advantages=advantages,
            staleness=None if current is None else _staleness(sequence, current),
            prompt=prompt,
            temperature=temperature,
            **known,
        )

    @classmethod
    def from_demonstration(
        cls, token_ids: Rows[int], loss_mask: Rows[bool], *, temperature: float = 1.0
    ) -> TokenRow:
        """A row to imitate: tokens somebody else wrote, and which of them to learn."""
        return cls(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            response_mask=torch.tensor(loss_mask, dtype=torch.bool),
            temperature=temperature,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One packed row of T tokens from N sequences; local to a process, never sent.

    packed_tokens, position_ids, sample_mask int64 [T]; response_mask (the policy wrote it) and
    loss_mask (the loss counts it, a subset) bool [T]; lengths N numbers; cu_seqlens int32 [N + 1].
    inference_logprobs, proximal_logprobs, ref_logprobs, advantages and staleness float32 [T], 0 off
    the response, None if unknown. prompts and temperatures: N numbers, which group each sequence is
    of and what it was sampled with.
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
    prompts: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        # RoPE hides positions that do not restart from every log-prob test, so look at them here.
        expected = _positions(self.attention_lengths).to(self.position_ids.device)
        if not torch.equal(self.position_ids, expected):
            raise InvalidInput(
                "position_ids do not restart at 0 with every sequence.",
                reason=Reason.POSITIONS_NOT_RESTARTED,
                remedy="Build batches with pack_rows or pack.",
            )
        if bool((self.loss_mask & ((self.position_ids == 0) | (self.sample_mask < 0))).any()):
            raise InvalidInput(
                "loss_mask counts a first token or padding.",
                reason=Reason.TOKEN_WITHOUT_PREDICTOR,
                remedy="Leave out the first token of every sequence and padding.",
            )

    @property
    def num_tokens(self) -> int:
        """T: all tokens of the row, padding included."""
        return len(self.packed_tokens)

    @property
    def num_sequences(self) -> int:
        """N: how many sequences the row holds."""
        return len(self.lengths)

    @property
    def num_loss_tokens(self) -> int:
        """M: how many tokens the loss counts."""
        return int(self.loss_mask.sum())

    @property
    def attention_lengths(self) -> tuple[int, ...]:
        """The lengths attention sees: padding attends to itself, as one more sequence."""
        padding = len(self.packed_tokens) - sum(self.lengths)
        return (*self.lengths, padding) if padding else self.lengths

    @property
    def trained_positions(self) -> Tensor:
        """int64 [M]: where the trained tokens stand; their predictors stand one earlier."""
        return self.loss_mask.nonzero().squeeze(-1)

    @property
    def temperature(self) -> float | Tensor:
        """What the trained tokens were sampled with: one number, or float32 [M] if that differs."""
        if len(set(self.temperatures)) <= 1:
            return next(iter(self.temperatures), 1.0)
        owners = self.gather(self.sample_mask)
        return torch.tensor(self.temperatures, device=owners.device)[owners]

    def gather(self, values: Tensor) -> Tensor:
        """Values [T] at the trained positions, [M]."""
        return values[self.loss_mask]

    def scatter(self, values: Tensor) -> Tensor:
        """Values [M] of the trained tokens at their places in the row, [T], 0 elsewhere."""
        row = torch.zeros(self.num_tokens, dtype=values.dtype, device=values.device)
        return row.masked_scatter(self.loss_mask, values)

    def split(self, values: Tensor) -> list[Tensor]:
        """Values [M] of the trained tokens as one tensor per sequence, in order."""
        owners = self.gather(self.sample_mask)
        counts = torch.bincount(owners, minlength=self.num_sequences).tolist()
        return list(torch.split(values, counts))

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch on another device."""
        names = ("packed_tokens", "position_ids", "sample_mask", "response_mask", "loss_mask")
        values = {name: getattr(self, name) for name in (*names, "cu_seqlens", *OPTIONAL)}
        moved: dict[str, Any] = {k: v if v is None else v.to(device) for k, v in values.items()}
        return replace(self, **moved)


def pack(sequences: Rows[Sequence], *, pad_to: int | None = None) -> PackedBatch:
    """One packed row of trajectory sequences; log-probs, references and advantages come along."""
    return pack_rows([TokenRow.from_sequence(s) for s in sequences], pad_to=pad_to)


def pack_rows(
    rows: Rows[TokenRow],
    *,
    pad_to: int | None = None,
    pad_id: int = 0,
    names: Rows[str] | None = None,
) -> PackedBatch:
    """One packed row; `pad_to` fills it up to a fixed length, for compiled graphs only.

    Errors name a sequence by `names`, or else by its index.
    """
    lengths = tuple(len(row.token_ids) for row in rows)
    padding = 0 if pad_to is None else pad_to - sum(lengths)
    if not rows or padding < 0:
        raise InvalidInput(
            f"{len(rows)} sequences of {sum(lengths)} tokens do not make a row of {pad_to}.",
            reason=Reason.ROW_DOES_NOT_FIT,
            remedy="Plan rows with dialoop_services.rl.packing_plan.plan_rows.",
        )
    response = _padded(torch.cat([row.response_mask for row in rows]), padding, 0)
    owners = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    return PackedBatch(
        packed_tokens=_padded(torch.cat([row.token_ids for row in rows]), padding, pad_id),
        position_ids=_positions((*lengths, padding) if padding else lengths),
        sample_mask=_padded(owners, padding, -1),
        response_mask=response,
        loss_mask=response,
        lengths=lengths,
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        prompts=tuple(row.prompt for row in rows),
        temperatures=tuple(row.temperature for row in rows),
        **{name: _scattered(rows, name, response, names) for name in OPTIONAL},
    )


def _staleness(sequence: Sequence, current: PolicyVersion) -> Tensor:
    """float32 [M]: how many policy versions ago each trained token was sampled."""
    ages = {version: current.staleness_of(version) for version in sequence.policy_versions}
    return torch.tensor([float(ages[v]) for v in sequence.token_versions()])


def _padded(values: Tensor, padding: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, padding), value=fill) if padding else values


def _positions(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def _scattered(
    rows: Rows[TokenRow], name: str, response_mask: Tensor, names: Rows[str] | None
) -> Tensor | None:
    """Optional per-token values at the response positions, [T]; all sequences have them or none."""
    speaking = [i for i, row in enumerate(rows) if bool(row.response_mask.any())]
    values = [value for i in speaking if (value := getattr(rows[i], name)) is not None]
    if not values:
        return None
    if len(values) != len(speaking):
        lacking = next(i for i in speaking if getattr(rows[i], name) is None)
        raise InvalidInput(
            f"Sequence {lacking if names is None else repr(names[lacking])} has no {name}, which "
            f"{len(values)} of {len(rows)} have.",
            reason=Reason.RAGGED,
            remedy=f"Give {name} for every sequence of a batch or for none.",
        )
    row = torch.zeros(len(response_mask), dtype=torch.float32)
    return row.masked_scatter(response_mask, torch.cat(values).float())
