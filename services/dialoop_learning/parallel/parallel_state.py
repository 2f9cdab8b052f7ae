"""Weights and optimiser state of a policy that is sharded over ranks.

Gathered, they are byte for byte what one process would write. Any number of ranks can load them:

    for bucket in gather_buckets(policy_tensors(policy), ranks):    # on the first rank's host
        ...                                         # empty on the others, which iterate too
    state = gather_optimizer(optimizer, ranks)      # as GuardedOptimizer.state_dict
    load_optimizer(optimizer, torch.load(path, mmap=True, weights_only=True))

Sharded (`begin_saving`, `load_sharded`), every rank writes its own part beside the next train step.
This is for models whose optimiser state does not fit on one host. torch.distributed.checkpoint
divides the parts anew for another number of ranks.
"""

from __future__ import annotations

import re
import warnings
from concurrent.futures import Future
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor, distribute_tensor

from dialoop_learning.model.weight_files import HEAD
from dialoop_learning.parallel.ranks import Ranks, reshard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future as TorchFuture

    from dialoop_learning.model.policy import PolicyModel
    from dialoop_learning.optim import GuardedOptimizer

_OPTIMIZER, _COUNTS = "optimizer", "counts"
_ALONE = "torch.distributed is disabled"
_LAYER = re.compile(r".*?\.\d+\.")


def policy_tensors(policy: PolicyModel) -> dict[str, Tensor]:
    """Return parameters by their Hugging Face names, as they are sharded, without a tied head."""
    reshard(policy)
    model = policy.causal_lm
    return {
        name: tensor.detach()
        for name, tensor in model.state_dict().items()
        if not (policy.ties_head and name == HEAD)
    }


def gather_buckets(
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    *,
    change: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
) -> Iterator[dict[str, Tensor]]:
    """Yield whole tensors on the first rank's host, those of a layer together; {} on the others.

    It is collective: all ranks iterate to the end. `change` makes each tensor, as it is sharded,
    into what is gathered.
    """
    for _, names in groupby(tensors, key=_layer_of):
        whole = ((name, _whole(change(name, tensors[name]), ranks)) for name in names)
        yield {name: tensor for name, tensor in whole if tensor is not None}


def _layer_of(name: str) -> str:
    """Return the part of a name up to its layer's number, or all of it."""
    layer = _LAYER.match(name)
    return name if layer is None else layer[0]


def gather_optimizer(optimizer: GuardedOptimizer, ranks: Ranks) -> dict[str, Any]:
    """Return the whole `optimizer.state_dict()` on the first rank's host, {} on the others."""
    state = optimizer.state_dict()
    for part in state["optimizers"]:
        part["state"] = {
            index: {name: _whole(value, ranks) for name, value in values.items()}
            for index, values in part["state"].items()
        }
    return state if ranks.is_first else {}


def load_optimizer(optimizer: GuardedOptimizer, state: Mapping[str, Any]) -> None:
    """Continue from a whole state, of which each rank keeps its part."""
    if len(state["optimizers"]) != len(optimizer.torch_optimizers):
        optimizer.load_state_dict(dict(state))  # raises InvalidConfig
    parts = []
    for part, parameters in zip(state["optimizers"], optimizer.orders, strict=True):
        values = {
            index: {name: cut(value, parameters[index]) for name, value in of_parameter.items()}
            for index, of_parameter in part["state"].items()
        }
        parts.append({**part, "state": values})
    optimizer.load_state_dict({**state, "optimizers": parts})


def begin_saving(
    directory: Path,
    policy: PolicyModel,
    optimizers: Mapping[str, GuardedOptimizer],
    ranks: Ranks,
) -> Future[Any]:
    """Copy this rank's part to the host's memory; write it into `directory` in another thread.

    All ranks must reach the directory. `end_saving` waits for it. Until then `ranks` belong to the
    other thread: see `Ranks.apart`. Frozen weights, such as those under adapters, are left out.
    """
    _require_sizes_known(optimizers)
    states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
    # The other thread's warnings cannot be silenced for it alone; a single process says so once.
    warnings.filterwarnings("ignore", _ALONE, UserWarning)
    # The writer's own stager, which would be taken otherwise, needs twice the part.
    stager = DefaultStager(StagingOptions(*(False,) * 4))
    saving = async_save(
        _flat(policy, states),
        storage_writer=_PartWriter(directory),
        async_stager=stager,
        process_group=ranks.group,
        no_dist=ranks.size == 1,
    )
    assert isinstance(saving, Future)  # of the write: a stager that is not asynchronous has ended
    saving.add_done_callback(lambda _: stager.close())
    return saving


def end_saving(saving: Future[Any]) -> None:
    """Wait until the parts of all ranks are on the disk; raise OSError on all where one is not."""
    try:
        saving.result()
    except CheckpointException as error:  # no Exception: it would pass the caller's handlers
        causes = [cause for cause, _ in error.failures.values()]
        raise next((c for c in causes if isinstance(c, OSError)), causes[0]) from None


class _PartWriter(FileSystemWriter):
    """Writes a rank's part, and says with the system's words why it could not."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write as the base class does, whose torch.save hides the system's error in its own."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def load_sharded(
    directory: Path,
    policy: PolicyModel,
    optimizers: Mapping[str, GuardedOptimizer],
    ranks: Ranks,
) -> None:
    """Continue from what any number of ranks wrote with `save_sharded`."""
    _require_sizes_known(optimizers)
    names: dict[str, Any] = FileSystemReader(directory).read_metadata().state_dict_metadata
    states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
    for name, optimizer in optimizers.items():
        for number, parameters in enumerate(optimizer.orders):
            rooms = _rooms(names, f"{_OPTIMIZER}/{name}/{number}", parameters)
            states[name]["optimizers"][number]["state"] = rooms
    tensors = _flat(policy, states)
    sizes = {name: tuple(value.shape) for name, value in tensors.items()}
    if sizes != {name: tuple(kept.size) for name, kept in names.items()}:
        raise InvalidConfig(
            f"{directory} is a checkpoint of another model or optimiser.",
            reason=Reason.CHECKPOINT_MISMATCH,
            remedy="Resume with the model and optimiser the run was started with.",
        )
    warnings.filterwarnings("ignore", _ALONE, UserWarning)
    load(tensors, checkpoint_id=directory, no_dist=ranks.size == 1)
    for name, optimizer in optimizers.items():
        counts = (int(count) for count in tensors[f"{_OPTIMIZER}/{name}/{_COUNTS}"])
        states[name]["num_steps"], states[name]["num_refused"] = counts
        optimizer.load_state_dict(states[name])


def _require_sizes_known(optimizers: Mapping[str, GuardedOptimizer]) -> None:
    """Refuse a user's optimiser, of whose state nobody knows how its parts fit together."""
    for optimizer in optimizers.values():
        if not optimizer.is_built_in:
            raise InvalidConfig(
                f"The optimiser {optimizer.settings.name} is your own, and a sharded checkpoint "
                "holds the state of built-in ones only.",
                reason=Reason.OPTIMIZER_MISMATCH,
                remedy="Set sharded_checkpoints = false in [train], and resume with the optimiser "
                "the run was started with.",
            )


def _rooms(
    names: Mapping[str, Any], prefix: str, parameters: Iterable[Tensor]
) -> dict[int, dict[str, Tensor]]:
    """Return empty state, sharded as the parameters are, for all that the checkpoint holds."""
    rooms: dict[int, dict[str, Tensor]] = {}
    for index, parameter in enumerate(parameters):
        start = f"{prefix}/{index}/"
        for name in (key for key in names if key.startswith(start)):
            like = torch.zeros_like(parameter.detach()) if names[name].size else torch.zeros(())
            rooms.setdefault(index, {})[name.removeprefix(start)] = like
    return rooms


def _flat(policy: PolicyModel, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return all state as tensors by name, which torch.distributed.checkpoint takes."""
    frozen = {name for name, p in policy.causal_lm.named_parameters() if not p.requires_grad}
    kept = ((k, v) for k, v in policy_tensors(policy).items() if k not in frozen)
    flat: dict[str, Any] = {f"model/{name}": tensor for name, tensor in kept}
    for name, state in states.items():
        start = f"{_OPTIMIZER}/{name}"
        for number, part in enumerate(state["optimizers"]):
            for index, values in part["state"].items():
                flat |= {f"{start}/{number}/{index}/{k}": v for k, v in values.items()}
        flat[f"{start}/{_COUNTS}"] = torch.tensor([state["num_steps"], state["num_refused"]])
    return flat


def _whole(value: Any, ranks: Ranks) -> Any:
    """Return the value on the first rank's host, None on the others; do not copy host tensors."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    if not ranks.is_first:
        return None
    return full.detach().cpu().contiguous() if isinstance(full, torch.Tensor) else full


def cut(value: Any, like: Tensor | None) -> Any:
    """Return this rank's part of a whole tensor, sharded as `like` is; other values as they are."""
    if not isinstance(like, DTensor) or getattr(value, "shape", None) != like.shape:
        return value
    whole = value.to(device=like.device, dtype=value.dtype)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
