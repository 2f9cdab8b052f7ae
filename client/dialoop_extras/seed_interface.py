"""The seed's packing interface: single-turn sequences in, one padded PackedTrajectory out.

    data = TrajectoryData(prompt_tokens=prompt, response_tokens=response, logprobs=logprobs)
    pack = pack_sequences([data], max_seq_len=512, device="cpu", pad_token_id=0)
    # scores: float [512], log-probs of the pack's tokens
    extract_response_logprobs_from_pack(scores, pack.sample_mask, pack.response_mask, 1)

`dialoop_learning.packing.rows` packs multi-turn sequences, and this module calls it. A
packed row is never stored or sent: each process packs the rows that it uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from dialoop.errors import InvalidInput, InvalidSequence
from dialoop.reasons import Reason
from dialoop_learning.packing.rows import PackedBatch, TokenRow, pack_rows

if TYPE_CHECKING:
    from torch import Tensor


def _nothing() -> Tensor:
    return torch.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutOutput:
    """An engine's answers to a batch: one entry per sequence, unpadded.

    prompts, responses: int64 [P_i], [R_i]. logprobs: float [R_i], the engine's own.
    """

    prompts: Sequence[Tensor]
    responses: Sequence[Tensor]
    logprobs: Sequence[Tensor]
    answers: Sequence[str] = ()
    sequence_ids: Sequence[str] = ()
    group_ids: Sequence[int] = ()
    policy_version: int = 0

    def sequences(self) -> list[TrajectoryData]:
        """Return one object per sequence; raise InvalidInput (RAGGED) where counts differ."""
        count = len(self.prompts)
        for name in ("responses", "logprobs"):
            _require_count(name, len(getattr(self, name)), count)
        for name in ("answers", "sequence_ids", "group_ids"):
            if entries := getattr(self, name):
                _require_count(name, len(entries), count)
        return [
            TrajectoryData(
                prompt_tokens=self.prompts[i],
                response_tokens=self.responses[i],
                logprobs=self.logprobs[i],
                answer=self.answers[i] if self.answers else "",
                sequence_id=self.sequence_ids[i] if self.sequence_ids else str(i),
                group_id=self.group_ids[i] if self.group_ids else 0,
                policy_version=self.policy_version,
            )
            for i in range(count)
        ]


VLLMOutput = RolloutOutput
"""The seed's name of RolloutOutput."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryData:
    """One sequence, unpadded: prompt_tokens [P], response_tokens, logprobs, ref_logprobs [R].

    rewards and successes: [num_funcs]. advantages: [1]. An empty tensor means unknown.
    """

    prompt_tokens: Tensor
    response_tokens: Tensor
    logprobs: Tensor = field(default_factory=_nothing)
    ref_logprobs: Tensor = field(default_factory=_nothing)
    rewards: Tensor = field(default_factory=_nothing)
    advantages: Tensor = field(default_factory=_nothing)
    successes: Tensor = field(default_factory=_nothing)
    answer: str = ""
    sequence_id: str = ""
    group_id: int = 0
    reward_metadata: dict[str, Any] = field(default_factory=dict)
    policy_version: int = 0

    def sequences(self) -> list[TrajectoryData]:
        """Return each sequence: itself, or those of fields that hold one entry for each."""
        if getattr(self.prompt_tokens, "ndim", 2) == 1:
            return [self]
        count = len(self.prompt_tokens)
        _require_count("response_tokens", len(self.response_tokens), count)
        stacked = {
            f.name: values
            for f in fields(self)
            if (values := getattr(self, f.name)) is not None
            and isinstance(values, (torch.Tensor, list, tuple))
            and len(values)
        }
        for name, values in stacked.items():
            _require_count(name, len(values), count)
        return [
            replace(self, **{name: _entry(name, values[i]) for name, values in stacked.items()})
            for i in range(count)
        ]

    def row(self) -> TokenRow:
        """Return the row to pack; raise InvalidInput where shapes disagree or without a prompt."""
        if not len(self.prompt_tokens):
            raise InvalidSequence(
                f"Sequence {self.sequence_id!r} has an empty prompt: nothing predicts its first "
                "response token.",
                reason=Reason.EMPTY_PROMPT,
                remedy="Give every sequence at least one prompt token.",
            )
        count = len(self.response_tokens)
        advantages = self.advantages.expand(count) if len(self.advantages) == 1 else self.advantages
        per_token = {
            "inference_logprobs": self.logprobs,
            "ref_logprobs": self.ref_logprobs,
            "advantages": advantages,
        }
        for name, values in per_token.items():
            if len(values) not in (0, count):
                raise InvalidInput(
                    f"Sequence {self.sequence_id!r} has {len(values)} {name} for {count} response "
                    "tokens.",
                    reason=Reason.RAGGED,
                    remedy="Give one value per response token, or none.",
                )
        mask = torch.zeros(len(self.prompt_tokens) + count, dtype=torch.bool)
        mask[len(self.prompt_tokens) :] = True
        present: dict[str, Any] = {n: v for n, v in per_token.items() if len(v) == count and count}
        return TokenRow(
            token_ids=torch.cat([self.prompt_tokens, self.response_tokens]).long(),
            response_mask=mask,
            group_index=self.group_id,
            **present,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTrajectory:
    """N sequences packed and padded to L = max_seq_len.

    packed_tokens, position_ids, sample_mask: int64 [L], sample_mask -1 on padding.
    response_mask: bool [L]. prompt_lens, response_lens: int64 [N].
    With populate_for_loss also packed_ref_logprobs, packed_logprobs, packed_advantages: float32
    [L], 0 off the response, None where unknown; and targets: int64 [L], targets[p] =
    packed_tokens[p] on the response, else ignore_index. The logits at p - 1 predict targets[p], so
    every response token is trained and nothing crosses sequences.
    """

    packed_tokens: Tensor
    position_ids: Tensor
    sample_mask: Tensor
    response_mask: Tensor
    prompt_lens: Tensor
    response_lens: Tensor
    batch: PackedBatch
    answers: list[str]
    sequence_ids: list[str]
    group_ids: list[int]
    policy_versions: list[int]
    reward_metadata: list[dict[str, Any]]
    packed_logprobs: Tensor | None = None
    packed_ref_logprobs: Tensor | None = None
    packed_advantages: Tensor | None = None
    targets: Tensor | None = None

    @property
    def attention_mask(self) -> Tensor:
        """Return the mask bool [L, L]: token q attends to tokens k <= q of its own sequence.

        It is computed at each access. Padding counts as one more sequence, because a row without
        any token to attend to makes NaN.
        """
        same = self.sample_mask[:, None] == self.sample_mask[None, :]
        return same.tril()


def pack_sequences(
    sequences: Sequence[TrajectoryData | RolloutOutput] | TrajectoryData | RolloutOutput,
    max_seq_len: int,
    device: torch.device | str,
    pad_token_id: int,
    ignore_index: int = -100,
    populate_for_loss: bool = False,
) -> PackedTrajectory:
    """Pack sequences into one row of `max_seq_len` tokens.

    A single TrajectoryData is one sequence, or as many as its fields have entries.
    Raises InvalidInput (a ValueError) when there are no sequences, when one is longer than
    max_seq_len (it names that one), when all together are longer, and for an empty prompt, because
    nothing predicts its first response token. A response may be empty.
    """
    items = _flat(sequences)
    _require_fit(items, max_seq_len)
    rows = [item.row() for item in items]
    names = [item.sequence_id for item in items]
    batch = pack_rows(rows, pad_to=max_seq_len, pad_id=pad_token_id, names=names).to(device)
    packed = PackedTrajectory(
        packed_tokens=batch.packed_tokens,
        position_ids=batch.position_ids,
        sample_mask=batch.sample_mask,
        response_mask=batch.response_mask,
        prompt_lens=torch.tensor([len(item.prompt_tokens) for item in items], device=device),
        response_lens=torch.tensor([len(item.response_tokens) for item in items], device=device),
        batch=batch,
        answers=[item.answer for item in items],
        sequence_ids=names,
        group_ids=[item.group_id for item in items],
        policy_versions=[item.policy_version for item in items],
        reward_metadata=[item.reward_metadata for item in items],
    )
    if not populate_for_loss:
        return packed
    return replace(
        packed,
        packed_logprobs=batch.inference_logprobs,
        packed_ref_logprobs=batch.ref_logprobs,
        packed_advantages=batch.advantages,
        targets=torch.where(batch.response_mask, batch.packed_tokens, ignore_index),
    )


def create_response_mask(
    prompt_lens: Tensor, response_lens: Tensor, max_seq_len: int, device: torch.device | str
) -> Tensor:
    """Return bool [max_seq_len]: true on response tokens, false on prompts and padding."""
    pairs = zip(prompt_lens.tolist(), response_lens.tolist(), strict=True)
    parts = [torch.arange(p + r) >= p for p, r in pairs]
    return _fill(torch.cat(parts), max_seq_len, 0).to(device)


def create_sample_mask(
    prompt_lens: Tensor, response_lens: Tensor, max_seq_len: int, device: torch.device | str
) -> Tensor:
    """Return int64 [max_seq_len]: the index of each token's sequence, -1 on padding."""
    owners = torch.arange(len(prompt_lens)).repeat_interleave((prompt_lens + response_lens).cpu())
    return _fill(owners, max_seq_len, -1).to(device)


def extract_response_logprobs_from_pack(
    packed_logprobs: Tensor, sample_mask: Tensor, response_mask: Tensor, num_sequences: int
) -> list[Tensor]:
    """Return the response tokens' values [L] as one unpadded tensor per sequence, in order."""
    owners = sample_mask[response_mask]
    counts = torch.bincount(owners, minlength=num_sequences).tolist()
    return list(torch.split(packed_logprobs[response_mask], counts))


def debug_table(
    packed: PackedTrajectory, policy_logprobs: Tensor, items: Iterable[TrajectoryData]
) -> list[dict[str, Any]]:
    """Return one row per sequence: ids, lengths, rewards, advantage, and its part of the log-probs.

    policy_logprobs: [L], valid on response positions.
    """
    own = extract_response_logprobs_from_pack(
        policy_logprobs, packed.sample_mask, packed.response_mask, len(packed.sequence_ids)
    )
    rows = []
    for item, logprobs in zip(items, own, strict=True):
        rows.append(
            {
                "sequence_id": item.sequence_id,
                "group_id": item.group_id,
                "policy_version": item.policy_version,
                "num_prompt_tokens": len(item.prompt_tokens),
                "num_response_tokens": len(item.response_tokens),
                "response_tokens": item.response_tokens.tolist(),
                "policy_logprobs": logprobs.tolist(),
                "inference_logprobs": item.logprobs.tolist(),
                "ref_logprobs": item.ref_logprobs.tolist(),
                "rewards": item.rewards.tolist(),
                "advantage": item.advantages.tolist(),
                "answer": item.answer,
            }
        )
    return rows


def _flat(
    sequences: Sequence[TrajectoryData | RolloutOutput] | TrajectoryData | RolloutOutput,
) -> list[TrajectoryData]:
    is_one = isinstance(sequences, (TrajectoryData, RolloutOutput))
    entries: Iterable[Any] = [sequences] if is_one else iter(sequences)  # type: ignore[arg-type]
    items = [item for entry in entries for item in entry.sequences()]
    if not items:
        raise InvalidInput(
            "There is no sequence to pack.", reason=Reason.EMPTY_BATCH, remedy="Give at least one."
        )
    return items


def _require_fit(items: Sequence[TrajectoryData], max_seq_len: int) -> None:
    total = 0
    for item in items:
        length = len(item.prompt_tokens) + len(item.response_tokens)
        total += length
        if length > max_seq_len:
            raise InvalidInput(
                f"Sequence {item.sequence_id!r} has {length} tokens, more than {max_seq_len}.",
                reason=Reason.SEQUENCE_TOO_LONG,
                remedy="Raise max_seq_len, or leave the sequence out.",
            )
    if total > max_seq_len:
        raise InvalidInput(
            f"{len(items)} sequences have {total} tokens in all, more than {max_seq_len}.",
            reason=Reason.ROW_DOES_NOT_FIT,
            remedy="Plan rows with dialoop_learning.rl.packing_plan.plan_rows.",
        )


def _entry(name: str, value: Any) -> Any:
    """Return one sequence's entry of a stacked field: an advantage as [1], a number as such."""
    if not isinstance(value, torch.Tensor) or value.ndim:
        return value
    return value.reshape(1) if name in ("advantages", "rewards", "successes") else value.item()


def _require_count(name: str, count: int, expected: int) -> None:
    if count != expected:
        raise InvalidInput(
            f"{name} has {count} entries for {expected} prompts.",
            reason=Reason.RAGGED,
            remedy="Give one entry per sequence.",
        )


def _fill(values: Tensor, length: int, fill: int) -> Tensor:
    if len(values) > length:
        raise InvalidInput(
            f"{len(values)} tokens do not fit in {length}.",
            reason=Reason.ROW_DOES_NOT_FIT,
            remedy="Raise max_seq_len.",
        )
    return torch.nn.functional.pad(values, (0, length - len(values)), value=fill)
