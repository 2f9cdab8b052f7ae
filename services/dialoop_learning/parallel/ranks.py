"""The processes that train one model together, one per device, and how they share it (FSDP2).

    with join_ranks(rank=rank, size=size) as ranks:   # torchrun's RANK and WORLD_SIZE
        policy = shard(load_policy(directory), ranks)
        optimizer = GuardedOptimizer(policy.parameters(), settings)      # after sharding
        update(policy, optimizer, my_rows, loss, ranks=ranks)

With one process `ranks` is ALONE, nothing is sharded, and the same code runs. Every function that
takes `ranks` is collective: all ranks call it, in the same order. Which rank packs which rows, idle
passes and log-probs from all ranks are at the end.
"""

from __future__ import annotations

import json
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from dialoop.errors import PreconditionFailed, Unavailable, Unsupported
from dialoop.reasons import Reason
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous

from dialoop_learning.model.forest_attention import copies_keys
from dialoop_learning.packing.rows import PackedBatch, TokenRow, pack_rows, plant_rows
from dialoop_learning.rl.packing_plan import RankPlan, plan_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dialoop_learning.model.policy import PolicyModel
    from dialoop_learning.rl.forest import Forest


RANK_FAILED = Reason.RANK_FAILED
"""The reason of the error that the other ranks raise when one has failed."""

_FAILURE = "dialoop/failure"
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class Store(Protocol):
    """A place for small values by name, which all processes reach: torch.distributed's store."""

    def check(self, keys: list[str]) -> bool:
        """Return at once whether all the keys are there."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's number among `size` processes, and how they exchange small values.

    They exchange JSON and numbers, never pickles, over the CPU's backend. In `store` they leave
    each other values without waiting; it is None where there is one process.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: Store | None = field(default=None, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        """Return whether this is the process that writes files and talks to other services."""
        return self.rank == 0

    @property
    def loading_device(self) -> torch.device:
        """Return where to load a policy: on the CPU if `shard` will move it in parts."""
        return self.device if self.size == 1 else torch.device("cpu")

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's plain JSON value, in the order of ranks, on every rank."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(part.numpy().tobytes()) for part in self.gather_tensors(data)]

    def gather_tensors(self, values: Tensor) -> list[Tensor]:
        """Return every rank's values [n] on every rank; n may differ, the dtype may not."""
        if self.size == 1:
            return [values]
        own = torch.tensor([len(values)])
        counts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(counts, own)
        lengths = [int(count) for count in counts]
        if not any(lengths):
            return [values] * self.size
        padded = nn.functional.pad(values.detach().cpu(), (0, max(lengths) - len(values)))
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [part[:n].to(values.device) for part, n in zip(parts, lengths, strict=True)]

    def broadcast(self, data: bytes) -> bytes:
        """Return the first rank's bytes on every rank; the argument of the others is ignored."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        dist.broadcast(length, src=0)
        if not int(length):
            return b""
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if self.is_first:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, src=0)
        return buffer.numpy().tobytes()


ALONE = Ranks()
"""The ranks of a single process."""


@contextmanager
def join_ranks(
    *,
    rank: int,
    size: int,
    device: torch.device | str = "cpu",
    init_method: str = "env://",
    timeout_s: float = 600.0,
) -> Iterator[Ranks]:
    """Join the other processes, and leave them on every path; yield a single rank for size 1.

    When a rank fails, it stores its error before its connections close, and the others raise
    Unavailable (RANK_FAILED) with the cause. `init_method` is torch.distributed's: torchrun's
    environment, or a file. `device` is this rank's own, such as "cuda:3".
    """
    device = torch.device(device)
    if size == 1:
        yield Ranks(device=device)
        return
    if device.type not in _BACKENDS:
        raise Unsupported(
            f"Ranks cannot train on {device}.", remedy=f"Use one of {', '.join(_BACKENDS)}."
        )
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(rendezvous(init_method, rank, size, timeout=timeout))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        _BACKENDS[device.type], store=store, rank=rank, world_size=size, timeout=timeout
    )
    ranks = Ranks(rank=rank, size=size, device=device, store=store)
    try:
        yield ranks
        ranks.gather(None)  # wait: the process that leaves first may close the others' store
    except Exception as error:
        cause = _cause(ranks, error)
        if cause is None:
            raise
        raise Unavailable(
            cause, reason=RANK_FAILED, remedy="Fix that rank's error and resume all ranks."
        ) from error
    finally:
        dist.destroy_process_group()


def shard(policy: PolicyModel, ranks: Ranks) -> PolicyModel:
    """Shard the policy's parameters over the ranks, block by block; with one rank change nothing.

    Gradients are summed over ranks, not averaged, because each rank's loss is a share of the whole.
    Make optimisers afterwards. A policy loaded on the CPU moves to the ranks' device one block at
    a time. Raises PreconditionFailed (RANKS_DIFFER) where ranks pass different policies.
    """
    if ranks.size == 1:
        return policy
    _require_same(policy, ranks)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for block in _blocks(policy):
        fully_shard(block, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale a sum
    return policy


def reshard(policy: nn.Module) -> None:
    """Free the whole parameters that a forward without a backward left on this device."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _require_same(policy: nn.Module, ranks: Ranks) -> None:
    """Raise unless all ranks have the same policy: sharding would mix different ones unnoticed."""
    own = {name: _checksum(tensor) for name, tensor in policy.named_parameters()}
    for rank, other in enumerate(ranks.gather(own)):
        names = sorted(name for name in {*own, *other} if own.get(name) != other.get(name))
        if names:
            raise PreconditionFailed(
                f"The policies of ranks {ranks.rank} and {rank} differ in {names[0]}.",
                reason=Reason.RANKS_DIFFER,
                remedy="Give all ranks the same model directory, settings and seed.",
            )


def _checksum(tensor: Tensor) -> int:
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(values.numpy().data)


def _blocks(policy: PolicyModel) -> list[nn.Module]:
    """Return the decoder's layers: the largest list of modules."""
    lists = [list(module) for module in policy.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise Unsupported(
            "This model has no list of layers to shard.",
            reason=Reason.MODEL_NOT_SHARDABLE,
            remedy="Train it with one process.",
        )
    return max(lists, key=lambda modules: sum(p.numel() for m in modules for p in m.parameters()))


def known_failure(ranks: Ranks) -> str | None:
    """Return the error that a failed rank stored before it left; None without one."""
    if ranks.store is None or not ranks.store.check([_FAILURE]):
        return None
    return str(ranks.store.get(_FAILURE).decode())


def _cause(ranks: Ranks, error: Exception) -> str | None:
    """Return another rank's stored error; without one, store and return this rank's."""
    if isinstance(error, Unavailable) and error.reason == RANK_FAILED:
        return None
    try:
        failure = known_failure(ranks)
        if failure is None and ranks.store is not None:
            if _is_lost_connection(error):
                return f"Rank {ranks.rank} of {ranks.size} lost its connection to another one."
            own = f"Rank {ranks.rank} of {ranks.size} failed: {type(error).__name__}: {error}"
            ranks.store.set(_FAILURE, own)
        return failure
    except RuntimeError:  # the store's own process is gone, so this rank raises its own error
        return None


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether the error means that a process is gone; gloo's have no type of their own."""
    if isinstance(error, BaseExceptionGroup):  # the first rank's service raises groups
        return any(map(_is_lost_connection, error.exceptions))
    if error.__cause__ is not None and _is_lost_connection(error.__cause__):
        return True
    is_gloo = isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    return is_gloo or isinstance(error, dist.DistNetworkError | dist.DistBackendError)


def own_rows(rows: Sequence[TokenRow], ranks: Ranks, *, max_tokens: int) -> list[PackedBatch]:
    """Return this rank's share of `rows`, packed, on its device; all ranks pass the same rows."""
    return pack_own(rows, own_packing(rows, plant_rows(rows), ranks, max_tokens=max_tokens), ranks)


def own_packing(
    rows: Sequence[TokenRow], forest: Forest, ranks: Ranks, *, max_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Return which of `rows` share each packed row of this rank, as indices."""
    return _plan(rows, forest, ranks, max_tokens).rows_of(ranks.rank)


def _plan(rows: Sequence[TokenRow], forest: Forest, ranks: Ranks, max_tokens: int) -> RankPlan:
    return plan_ranks(
        [len(r.token_ids) for r in rows],
        max_tokens=max_tokens,
        num_ranks=ranks.size,
        forest=forest,
        whole=copies_keys(ranks.device),
    )


def pack_own(
    rows: Sequence[TokenRow], packing: Sequence[Sequence[int]], ranks: Ranks
) -> list[PackedBatch]:
    """Return the rows packed as `own_packing` says, on this rank's device."""
    return [pack_rows([rows[i] for i in indices]).to(ranks.device) for indices in packing]


def rows_behind(num_rows: int, ranks: Ranks) -> int:
    """Return how many rows fewer than the busiest rank this one has."""
    most: int = max(ranks.gather(num_rows))
    return most - num_rows


def keep_pace(policy: PolicyModel, num_rows: int, ranks: Ranks) -> None:
    """Run `num_rows` forward and backward passes that train nothing.

    All ranks together gather a sharded layer, so each rank must run it as often as the busiest
    does. Call `rows_behind` before the first row, because that is a collective too.
    """
    for _ in range(num_rows):
        logprobs = policy(_idle_row().to(ranks.device)).logprobs
        if logprobs.requires_grad:
            logprobs.sum().backward()


@torch.no_grad()
def score_rows(
    policy: PolicyModel, rows: Sequence[TokenRow], ranks: Ranks, *, max_tokens: int
) -> list[Tensor]:
    """Return log-probs float32 [M] of each row's tokens at its own temperature, on every rank.

    Each row is scored by one rank.
    """
    plan = _plan(rows, plant_rows(rows), ranks, max_tokens)
    own = plan.rows_of(ranks.rank)
    packed = [pack_rows([rows[i] for i in indices]).to(ranks.device) for indices in own]
    scores = [policy(row, temperature=row.temperature) for row in packed]
    keep_pace(policy, len(plan.ranks[ranks.rank]) - len(own), ranks)
    reshard(policy)
    values = torch.cat([torch.empty(0), *(score.logprobs.float().cpu() for score in scores)])
    by_row: dict[int, Tensor] = {}
    for rank, part in enumerate(ranks.gather_tensors(values)):
        order = [i for indices in plan.rows_of(rank) for i in indices]
        ends = [0, *accumulate(int(rows[i].response_mask.sum()) for i in order)]
        by_row |= {i: part[ends[k] : ends[k + 1]] for k, i in enumerate(order)}
    return [by_row[i] for i in range(len(rows))]


def _idle_row() -> PackedBatch:
    nothing = torch.zeros(2, dtype=torch.bool)
    return pack_rows([TokenRow(token_ids=torch.zeros(2).long(), response_mask=nothing)])
