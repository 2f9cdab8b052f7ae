"""The processes that train one model together, one per device, and how they share it (FSDP2).

    with join_ranks(rank=rank, size=size) as ranks:   # torchrun's RANK and WORLD_SIZE
        policy = shard(load_policy(directory), ranks)
        optimizer = GuardedOptimizer(policy.parameters(), settings)      # after sharding
        update(policy, optimizer, my_rows, loss, ranks=ranks)

With one process `ranks` is ALONE, nothing is sharded, and the same code runs. Every function that
takes `ranks` is collective: all ranks call it, in the same order. Which rank trains which rows is
in `dialoop_learning.parallel.step_plan`.

Ranks differ in three dimensions, the last one in neighbours: copies of the model (`dp_replicate`),
shards of a copy (`dp_shard`), parts of a sequence (`cp`). Weights are divided over the last two.
"""

from __future__ import annotations

import json
import time
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from dialoop.errors import PreconditionFailed, Unavailable, Unsupported
from dialoop.reasons import Reason
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous

from dialoop_learning.model.context_parallel import Context

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dialoop_learning.model.policy import PolicyModel


RANK_FAILED = Reason.RANK_FAILED
"""The reason of the error that the other ranks raise when one has failed."""

_FAILURE, _HERE, _LEFT = "dialoop/failure", "dialoop/here", "dialoop/left"
_LAST_WORDS_S, _POLL_S = 3.0, 0.05
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
    each other values without waiting; it is None where there is one process. num_local: how many
    of the processes are on this machine. dp_replicate, cp: two sizes of the mesh; dp_shard is what
    they leave. group: the connections over which they exchange; None: those of training.
    """

    rank: int = 0
    size: int = 1
    num_local: int = 1
    dp_replicate: int = 1
    cp: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: Store | None = field(default=None, compare=False, repr=False)
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    def apart(self) -> Ranks:
        """Return the same ranks with connections of their own, which another thread may use."""
        if self.size == 1:
            return self
        return replace(self, group=dist.new_group(backend="gloo"))

    @property
    def is_first(self) -> bool:
        """Return whether this is the process that writes files and talks to other services."""
        return self.rank == 0

    @property
    def num_row_ranks(self) -> int:
        """Return how many ranks, or groups of ranks that share a sequence, train different rows."""
        return self.size // self.cp

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
        dist.all_gather(counts, own, group=self.group)
        lengths = [int(count) for count in counts]
        if not any(lengths):
            return [values] * self.size
        padded = nn.functional.pad(values.detach().cpu(), (0, max(lengths) - len(values)))
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.group)
        return [part[:n].to(values.device) for part, n in zip(parts, lengths, strict=True)]

    def gather_once(self, value: Any) -> list[Any]:
        """Return as `gather` does, but once for each group of ranks that share sequences."""
        return self.gather(value)[:: self.cp]

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Return this rank's part of the first rank's, sent from there to this rank alone."""
        if self.size == 1:
            return parts[0]
        if not self.is_first:
            length = torch.empty(1, dtype=torch.int64)
            dist.recv(length, src=0, group=self.group)
            buffer = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(buffer, src=0, group=self.group)
            return buffer.numpy().tobytes()
        sent = []
        for rank, part in enumerate(parts[1:], 1):
            data = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            for tensor in (torch.tensor([len(part)]), data):
                work = dist.isend(tensor, dst=rank, group=self.group)
                assert work is not None
                sent.append((work, tensor))  # the tensor lives until it has arrived
        for work, _ in sent:
            work.wait()
        return parts[0]

    def broadcast(self, data: bytes) -> bytes:
        """Return the first rank's bytes on every rank; the argument of the others is ignored."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        dist.broadcast(length, src=0, group=self.group)
        if not int(length):
            return b""
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if self.is_first:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, src=0, group=self.group)
        return buffer.numpy().tobytes()


ALONE = Ranks()
"""The ranks of a single process."""


@contextmanager
def join_ranks(  # noqa: PLR0913 - who this is among whom, and where they meet
    *,
    rank: int,
    size: int,
    num_local: int | None = None,
    device: torch.device | str = "cpu",
    dp_replicate: int = 1,
    cp: int = 1,
    init_method: str = "env://",
    timeout_s: float = 600.0,
) -> Iterator[Ranks]:
    """Join the other processes, and leave them on every path; yield a single rank for size 1.

    When a rank fails, it stores its error before its connections close, and the others raise
    Unavailable (RANK_FAILED) with the cause, or with the ranks that are gone. So do all that came
    where one does not come within `timeout_s`. `init_method` is torch.distributed's: torchrun's
    environment, or a file. `device` is this rank's own, such as "cuda:3". num_local: processes on
    this machine, all by default.
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
    store = _meet(init_method, rank, size, timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        _BACKENDS[device.type], store=store, rank=rank, world_size=size, timeout=timeout
    )
    ranks = Ranks(
        rank=rank,
        size=size,
        num_local=num_local or size,
        device=device,
        dp_replicate=dp_replicate,
        cp=cp,
        store=store,
    )
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


def _meet(init_method: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the store where all ranks meet; Unavailable (RANK_FAILED) names who did not come."""
    deadline = time.monotonic() + timeout.total_seconds()
    missing = "the first, whose store the others need"
    try:
        store, _, _ = next(rendezvous(init_method, rank, size, timeout=timeout))
        keys = {other: f"{_HERE}/{other}" for other in range(size)}
        store.set(keys[rank], "")
        while not store.check(list(keys.values())):  # its own wait would write to stderr
            missing = ", ".join(str(other) for other, key in keys.items() if not store.check([key]))
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(_POLL_S)
    except (RuntimeError, TimeoutError) as error:  # torch's own errors of stores are no narrower
        raise Unavailable(
            f"Of {size} ranks these did not come within {timeout.total_seconds():g} s: {missing}.",
            reason=RANK_FAILED,
            remedy="See the logs of these, and that every machine runs its processes.",
        ) from error
    return store


def shard(policy: PolicyModel, ranks: Ranks) -> PolicyModel:
    """Shard the policy's parameters over the ranks, block by block; with one rank change nothing.

    Gradients are summed over ranks, not averaged, because each rank's loss is a share of the whole.
    Make optimisers afterwards. A policy loaded on the CPU moves to the ranks' device one block at
    a time, and parameters on the meta device stay there. Raises PreconditionFailed (RANKS_DIFFER)
    where ranks pass different policies.
    """
    if ranks.size == 1:
        return policy
    require_same({n: _checksum(p) for n, p in policy.named_parameters() if not p.is_meta}, ranks)
    mesh = _mesh_of_weights(ranks)
    for block in _blocks(policy):
        fully_shard(block, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale a sum
    policy.context = _context_of(ranks)
    return policy


def _mesh_of_weights(ranks: Ranks) -> DeviceMesh:
    """Return the mesh over which parameters are sharded, and copied where there are copies."""
    num_shards = ranks.size // ranks.dp_replicate
    names = ("dp_replicate", "dp_shard_cp")
    if ranks.dp_replicate == 1:
        return init_device_mesh(ranks.device.type, (num_shards,), mesh_dim_names=names[1:])
    shape = (ranks.dp_replicate, num_shards)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)


def _context_of(ranks: Ranks) -> Context | None:
    if ranks.cp == 1:
        return None
    mesh = init_device_mesh(
        ranks.device.type, (ranks.num_row_ranks, ranks.cp), mesh_dim_names=("dp", "cp")
    )
    return Context(rank=ranks.rank % ranks.cp, size=ranks.cp, group=mesh.get_group("cp"))


def reshard(policy: nn.Module) -> None:
    """Free the whole parameters that a forward without a backward left on this device."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def require_same(own: Mapping[str, int], ranks: Ranks) -> None:
    """Raise unless all ranks have the same numbers: nobody would notice shards of two models."""
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
                return _missing(ranks)
            own = f"Rank {ranks.rank} of {ranks.size} failed: {type(error).__name__}: {error}"
            ranks.store.set(_FAILURE, own)
        return failure
    except RuntimeError:  # the store's process is gone, which runs on the first rank's machine
        if not _is_lost_connection(error):
            return None
        return (
            f"Rank {ranks.rank} of {ranks.size} lost its connection to another one; no word from "
            "the machine of rank 0, where they meet."
        )


def _missing(ranks: Ranks) -> str:
    """Return which ranks say nothing any more, or the error that one stored.

    Each rank that notices leaves a mark, and the others wait a moment for it.
    """
    assert ranks.store is not None
    marks = {rank: f"{_LEFT}/{rank}" for rank in range(ranks.size)}
    ranks.store.set(marks[ranks.rank], "")
    deadline, absent = time.monotonic() + _LAST_WORDS_S, list(marks)
    while absent and time.monotonic() < deadline:
        failure = known_failure(ranks)
        if failure is not None:
            return failure
        absent = [rank for rank in absent if not ranks.store.check([marks[rank]])]
        time.sleep(_POLL_S)
    gone = f"; no word from rank {', '.join(map(str, absent))}" if absent else ""
    return f"Rank {ranks.rank} of {ranks.size} lost its connection to another one{gone}."


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether the error means that a process is gone; gloo's have no type of their own."""
    if isinstance(error, BaseExceptionGroup):  # the first rank's service raises groups
        return any(map(_is_lost_connection, error.exceptions))
    if error.__cause__ is not None and _is_lost_connection(error.__cause__):
        return True
    is_gloo = isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    return is_gloo or isinstance(error, dist.DistNetworkError | dist.DistBackendError)
