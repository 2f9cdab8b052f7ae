"""Weights from files into a policy: each rank reads its own part, and none the whole model.

policy = spread(blank_policy(directory), directory, ranks)
fill_weights(policy, [checkpoint / "model.safetensors"], complaint="The checkpoint")
"""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from dialoop_learning.memory import return_free_memory
from dialoop_learning.model.checkpoint_names import rows_in_checkpoint
from dialoop_learning.model.policy import require_packable
from dialoop_learning.model.weight_files import HEAD, weight_files
from dialoop_learning.parallel.ranks import Ranks, require_same, reshard, shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from dialoop_learning.model.policy import PolicyModel

_COMPARED_BYTES = 1 << 20
_ADAPTED, _OF_ADAPTER = ".base_layer.", ".lora_"


def spread(policy: PolicyModel, directory: Path, ranks: Ranks) -> PolicyModel:
    """Shard a `blank_policy` and fill it from the files of `directory`; then check its scores.

    Adapters that were added to it are real already, and equal on all ranks. Raises
    PreconditionFailed (RANKS_DIFFER) where the ranks' files or adapters differ; files are compared
    by their sizes and their first and last MiB.
    """
    files = weight_files(directory)
    require_same({path.name: _mark(path) for path in files}, ranks)
    policy = shard(policy, ranks)
    _make_room(policy, ranks.device)
    fill_weights(policy, files, complaint=f"The model in {directory}", is_exact=False)
    context, policy.context = policy.context, None  # the check packs several sequences into a row
    require_packable(policy)
    reshard(policy)
    return_free_memory()  # the check gathered each layer once
    policy.context = context
    return policy


@torch.no_grad()
def _make_room(policy: PolicyModel, device: torch.device) -> None:
    """Give parameters on the meta device memory; keep the values of others and of buffers."""
    named = [*policy.named_parameters(), *policy.named_buffers()]
    kept = {name: tensor.detach().clone() for name, tensor in named if not tensor.is_meta}
    policy.to_empty(device=device)
    if policy.ties_head:
        policy.causal_lm.tie_weights()
    for name, tensor in [*policy.named_parameters(), *policy.named_buffers()]:
        if name in kept:
            tensor.copy_(kept[name])


@torch.no_grad()
def fill_weights(
    policy: PolicyModel, files: Sequence[Path], *, complaint: str, is_exact: bool = True
) -> None:
    """Copy the files' tensors into the policy, of each only the rows that this rank holds.

    Raises InvalidConfig (WEIGHTS_MISMATCH) where they lack one or have another shape, and with
    `is_exact` where they hold one that the model has not. `complaint` begins its text.
    """
    reshard(policy)
    with ExitStack() as exits:
        opened = [exits.enter_context(safe_open(path, "pt")) for path in files]
        sources = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        used = set()
        for name, target in policy.causal_lm.state_dict().items():
            if _OF_ADAPTER in name or (policy.ties_head and name == HEAD):
                continue
            used |= _fill(policy.causal_lm, name.replace(_ADAPTED, "."), target, sources, complaint)
        unknown = sorted(sources.keys() - used - ({HEAD} if policy.ties_head else set()))
    if unknown and is_exact:
        raise _mismatch(complaint, f"{unknown[0]} is in it and not in the model")


def _fill(
    causal_lm: nn.Module,
    name: str,
    target: Tensor,
    sources: Mapping[str, Any],
    complaint: str,
) -> set[str]:
    """Fill one tensor, and return the names of the files' tensors that it is made of."""
    own, start = _own_part(target)
    if name in sources:
        part = sources[name].get_slice(name)
        _require_shape(part.get_shape(), target.shape, name, complaint)
        if own.numel():
            own.copy_(part[start : start + len(own)] if own.ndim else part[...])
        return {name}
    parts = rows_in_checkpoint(causal_lm, name, target.shape) if target.ndim > 1 else {}
    if not parts or not parts.keys() <= sources.keys():
        raise _mismatch(complaint, f"it lacks {name}")
    rows = own.view(-1, own.shape[-1])
    before = start * (target[0].numel() // target.shape[-1])
    for other, numbers in parts.items():
        places = numbers.flatten() - before
        is_own = (places >= 0) & (places < len(rows))
        if bool(is_own.any()):
            values = sources[other].get_tensor(other)
            _require_shape(values.shape[:-1], numbers.shape, other, complaint)
            whole = values.reshape(-1, own.shape[-1]).to(rows)
            rows[places[is_own]] = whole[is_own]
    return set(parts)


def _own_part(target: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor along its first dimension, and which is the first."""
    if not isinstance(target, DTensor):
        return target, 0
    own = target.to_local()
    for dimension, placement in enumerate(target.placements):
        if isinstance(placement, Shard):
            size = target.device_mesh.size(dimension)
            each = -(-target.shape[0] // size)
            rank = target.device_mesh.get_local_rank(dimension)
            return own, min(rank * each, target.shape[0])
    return own, 0


def _require_shape(theirs: Sequence[int], ours: Sequence[int], name: str, complaint: str) -> None:
    if tuple(theirs) != tuple(ours):
        raise _mismatch(complaint, f"its {name} is {tuple(theirs)}, and the model's {tuple(ours)}")


def _mismatch(complaint: str, what: str) -> InvalidConfig:
    return InvalidConfig(
        f"{complaint} holds other weights than the model: {what}.",
        reason=Reason.WEIGHTS_MISMATCH,
        remedy="Use the model directory that the run was started with, written by save_pretrained "
        "of the installed transformers.",
    )


def _mark(path: Path) -> int:
    """Return a checksum of a file's size and of its first and last bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        mark = zlib.crc32(file.read(_COMPARED_BYTES), size & 0xFFFFFFFF)
        file.seek(max(0, size - _COMPARED_BYTES))
        return zlib.crc32(file.read(_COMPARED_BYTES), mark)
