"""The state that training changes: the policy, its optimisers and the random orders.

Every method that touches a file is collective: all ranks call it. The first rank writes, except
that each rank writes its own part of a sharded checkpoint. Every rank reads by itself.

Weights are captured at one moment, in a file. What else becomes of it (`CapturedWeights.measured`,
`ExportedWeights.since` and `keep`) may run in another thread, beside the next train step. So does
the rest of a checkpoint, once the state has been copied: whole files into the system's cache, parts
into this process's memory.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from dialoop.clients.weights import WeightsKind
from dialoop.errors import InvalidConfig, PreconditionFailed
from dialoop.reasons import Reason
from dialoop_learning.lora.base_weights import BASE_DIGEST, BaseWeights, require_base
from dialoop_learning.lora.layers import (
    ADAPTER,
    adapter_tensors,
    base_tensors,
    has_lora,
    load_adapter,
    merging,
    save_adapter_config,
)
from dialoop_learning.model.checkpoint_names import to_checkpoint
from dialoop_learning.model.weight_delta import write_delta
from dialoop_learning.model.weight_files import HEAD
from dialoop_learning.model.weight_writer import WeightsWriter
from dialoop_learning.parallel.loading import fill_weights
from dialoop_learning.parallel.parallel_state import (
    begin_saving,
    cut,
    end_saving,
    gather_buckets,
    gather_optimizer,
    load_optimizer,
    load_sharded,
    policy_tensors,
)
from dialoop_learning.parallel.ranks import ALONE, Ranks, reshard
from safetensors.torch import load_file

from dialoop_services.runtime.durable import (
    MAKE_ROOM,
    named_failures,
    read_failed,
    sync_tree,
    whole_file,
    why_unread,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from dialoop_learning.model.policy import PolicyModel
    from dialoop_learning.optim import GuardedOptimizer
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A file of what changed since the whole weights whose SHA-256 is `base`."""

    path: Path
    sha256: str
    num_bytes: int
    base: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """A safetensors file of the whole policy, or of the adapter to add to the base.

    first: where it was written, until `keep` brings it to `path`; None: to `path` at once. delta:
    what replicas get in its place that have the policy before.
    """

    path: Path
    sha256: str
    num_bytes: int
    kind: WeightsKind = WeightsKind.WHOLE
    adapter_config_json: str = ""
    base_digest: str = ""
    first: Path | None = None
    delta: Delta | None = None

    def since(self, base: ExportedWeights) -> ExportedWeights:
        """Return these weights with a delta to the ones before, if that is worth it.

        Raise PreconditionFailed (WRITE_FAILED) if it cannot be written.
        """
        ours, theirs = self.first or self.path, base.first or base.path
        theirs = theirs if theirs.is_file() else base.path  # memory has only the newest ones
        facts = {"base": base.sha256, "sha256": self.sha256, "num_bytes": str(self.num_bytes)}
        path = ours.with_name(_DELTA)
        with whole_file(path, sync=False) as temporary:
            is_worth_it = write_delta(theirs, ours, temporary, facts)
            sha256, num_bytes = _sha256(temporary), temporary.stat().st_size
        if not is_worth_it:
            path.unlink()
            return self
        return replace(
            self, delta=Delta(path=path, sha256=sha256, num_bytes=num_bytes, base=base.sha256)
        )

    def keep(self) -> None:
        """Bring the file to its path, where it appears whole, and to the disk.

        Raise PreconditionFailed (WRITE_FAILED) if it cannot be written.
        """
        if self.first is not None:
            with whole_file(self.path, sync=False) as temporary:
                shutil.copy(self.first, temporary)
        with named_failures(self.path):
            sync_tree(self.path.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedWeights:
    """The weights of one moment, in a file that is there on the first rank alone.

    It lies at `first`, until `ExportedWeights.keep` brings it to `path`, or at `path` at once.
    """

    path: Path
    first: Path | None = None
    kind: WeightsKind = WeightsKind.WHOLE
    adapter: Mapping[str, Any] = field(default_factory=dict)

    def measured(self) -> ExportedWeights:
        """Return them with the size and the SHA-256 of the file."""
        file = self.first or self.path
        return ExportedWeights(
            path=self.path,
            first=self.first,
            sha256=_sha256(file),
            num_bytes=file.stat().st_size,
            kind=self.kind,
            **self.adapter,
        )


WEIGHTS, _STATE, _PARTS = "model.safetensors", "learner.pt", "parts"
_DELTA = "delta.safetensors"
_DIGESTS = "digests.json"
"""The file of a checkpoint that has the SHA-256 of each other one."""


class LearnerState:
    """A policy, its optimisers by name, and the generator of random orders."""

    def __init__(
        self,
        policy: PolicyModel,
        optimizers: Mapping[str, GuardedOptimizer],
        orders: random.Random,
        *,
        model_dir: Path,
        is_sharded: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self.policy = policy
        self.optimizers = dict(optimizers)
        self.orders = orders
        self._model_dir = model_dir
        self._is_sharded = is_sharded
        self._ranks = ranks
        self._base_digest = ""
        # What the rest of a checkpoint uses beside training: connections, and a thread.
        self._apart: Ranks | None = None
        self._behind = ThreadPoolExecutor(1, "dialoop-checkpoint")
        # The names of the weights in the model's directory, once they have been read.
        self._names: frozenset[str] = frozenset()

    def capture(
        self, path: Path, first: Path | None = None, *, dtype: torch.dtype | None = None
    ) -> CapturedWeights:
        """Write the weights as they are now for `path`, at `first` if there is one.

        The file appears whole or not at all. A layer is gathered at a time, and written while the
        next one is, so no host ever holds the whole. Matrices of whole weights are cast to `dtype`;
        vectors cost little, and engines keep some in float32. With LoRA, a path with PEFT's file
        name gets the adapter alone, in a directory for PEFT. Raise PreconditionFailed
        (WRITE_FAILED) on the first rank if it cannot be written.
        """
        model = self.policy.causal_lm
        reshard(self.policy)
        if path.name == ADAPTER:
            return self._capture_adapter(path, first)
        tensors, merge = policy_tensors(self.policy), None
        if has_lora(model):
            tensors, merge = base_tensors(model), merging(model)
            if self.policy.ties_head:
                tensors.pop(HEAD, None)
        if not self._names:
            self._names = frozenset(BaseWeights.of(self._model_dir).shapes())

        def change(name: str, tensor: Tensor) -> Tensor:
            merged = tensor if merge is None else merge(name, tensor)
            return merged.to(_kind(merged, dtype))

        def named(bucket: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return to_checkpoint(model, bucket, self._names)

        like = {name: _like(tensor, dtype) for name, tensor in tensors.items()}
        buckets = gather_buckets(tensors, self._ranks, change=change)
        self._write(first or path, named(like), map(named, buckets), {"format": "pt"})
        return CapturedWeights(path=path, first=first)

    def _capture_adapter(self, path: Path, first: Path | None) -> CapturedWeights:
        tensors = adapter_tensors(self.policy.causal_lm)
        like = {name: _like(tensor, None) for name, tensor in tensors.items()}
        buckets = gather_buckets(tensors, self._ranks)
        facts = {"base_digest": self._digest_of_base() if self._ranks.is_first else ""}
        self._write(first or path, like, buckets, {BASE_DIGEST: facts["base_digest"]})
        if self._ranks.is_first:
            with named_failures(path):
                facts["adapter_config_json"] = save_adapter_config(
                    self.policy.causal_lm, path.parent, base=self._model_dir
                )
        return CapturedWeights(path=path, first=first, kind=WeightsKind.ADAPTER, adapter=facts)

    def _write(
        self,
        path: Path,
        like: Mapping[str, Tensor],
        buckets: Iterable[Mapping[str, Tensor]],
        metadata: Mapping[str, str],
    ) -> None:
        """Write the file on the first rank; of `metadata` there is one entry, in a fixed order."""
        rest = iter(buckets)
        try:
            if self._ranks.is_first:
                with (
                    whole_file(path, sync=False) as temporary,
                    WeightsWriter(temporary, like, metadata) as writer,
                ):
                    for bucket in rest:
                        writer.put(bucket)
        finally:
            for _ in rest:  # all ranks gather to the end, whatever the first one's disk says
                pass

    def read_weights(self, path: Path) -> None:
        """Load weights that `capture` wrote; raise InvalidConfig for another model's."""
        complaint = f"{path.parent.name} is not of the model in {self._model_dir}"
        fill_weights(self.policy, [path], complaint=complaint)

    def write(self, directory: Path) -> Callable[[], None]:
        """Copy what a checkpoint keeps: weights or adapters, optimisers and random states.

        Return what waits until every rank's files are there, each with its digest. Training may go
        on meanwhile, and the next checkpoint may not begin. On every rank it raises
        PreconditionFailed (WRITE_FAILED) where a rank could not write its own.
        """
        facts: dict[str, Any] = {
            "torch_random": torch.get_rng_state(),
            "python_random": repr(self.orders.getstate()),
        }
        if self._ranks.is_first and has_lora(self.policy.causal_lm):
            facts[BASE_DIGEST] = self._digest_of_base()
        if self._is_sharded:
            self._apart = self._apart or self._ranks.apart()
            parts = directory / _PARTS
            saving = begin_saving(parts, self.policy, self.optimizers, self._apart)
            rest = partial(self._end_parts, directory, saving, facts, self._apart)
        else:
            is_adapter = has_lora(self.policy.causal_lm)  # then it is a PEFT directory
            self.capture(directory / (ADAPTER if is_adapter else WEIGHTS))
            state = {n: gather_optimizer(o, self._ranks) for n, o in self.optimizers.items()}
            if not self._ranks.is_first:
                return lambda: None
            _write_state(directory, {**state, **facts})
            files = [path for path in directory.rglob("*") if path.is_file()]
            return lambda: _write_digests(directory, _digests(directory, files))
        if self._ranks.size == 1:
            return rest
        return self._behind.submit(rest).result  # the other ranks take part by themselves

    def _end_parts(
        self, directory: Path, saving: Future[Any], facts: Mapping[str, Any], ranks: Ranks
    ) -> None:
        """Wait for all parts; each rank reads its own for their digests, the first writes them."""
        parts, digests, failure = directory / _PARTS, {}, ""
        try:
            with named_failures(parts):
                end_saving(saving)
                own = list(parts.glob(f"__{ranks.rank}_*"))
                if ranks.is_first:
                    _write_state(directory, facts)
                    own += [*parts.glob(".*"), directory / _STATE]  # these are the first one's
                digests = _digests(directory, own)
        except PreconditionFailed as error:
            failure = error.message
        found = ranks.gather([digests, failure])
        if failures := [failure for _, failure in found if failure]:
            raise PreconditionFailed(failures[0], reason=Reason.WRITE_FAILED, remedy=MAKE_ROOM)
        if ranks.is_first:
            _write_digests(directory, {n: d for own, _ in found for n, d in own.items()})

    def find_damage(self, directory: Path) -> str:
        """Return how a checkpoint is damaged, as the first rank that sees it so says; "" if not.

        Every rank calls it and has the same answer. Raises PreconditionFailed (READ_FAILED) on all
        of them where a rank could not read the files to the end.
        """
        damage, failure = "", ""
        try:
            damage = self._own_damage_in(directory)
        except OSError as error:
            failure = why_unread(error)
        verdicts = self._ranks.gather([damage, failure])
        if failures := [failure for _, failure in verdicts if failure]:
            raise read_failed(directory, failures[0])
        return next((damage for damage, _ in verdicts if damage), "")

    def _own_damage_in(self, directory: Path) -> str:
        """Compare the files that this rank will read with their digests, and its share of parts."""
        if not (directory / _STATE).is_file():
            return f"{_STATE} is missing"
        try:
            digests: dict[str, str] = json.loads((directory / _DIGESTS).read_bytes())
        except FileNotFoundError:
            return f"{_DIGESTS} is missing"
        except ValueError:
            return f"{_DIGESTS} cannot be parsed"
        for number, (name, digest) in enumerate(sorted(digests.items())):
            if name.startswith(_PARTS) and number % self._ranks.size != self._ranks.rank:
                continue
            try:
                if _sha256(directory / name) != digest:
                    return f"{name} has other bytes than were written"
            except FileNotFoundError:
                return f"{name} is missing"
        return ""

    def read(self, directory: Path) -> None:
        """Continue from a checkpoint that any number of ranks saved, whole or in parts.

        Raises InvalidConfig when it is another model's.
        """
        self.require_readable(directory)
        state: dict[str, Any] = torch.load(
            directory / _STATE, map_location="cpu", weights_only=True, mmap=True
        )
        if has_lora(self.policy.causal_lm):
            require_base(self._digest_of_base(), state[BASE_DIGEST])
        if (directory / _PARTS).is_dir():
            load_sharded(directory / _PARTS, self.policy, self.optimizers, self._ranks)
        else:
            self._restore_weights(directory)
            for name, optimizer in self.optimizers.items():
                load_optimizer(optimizer, state[name])
        torch.set_rng_state(state["torch_random"].clone())
        self.orders.setstate(ast.literal_eval(state["python_random"]))

    def require_readable(self, directory: Path) -> None:
        """Raise InvalidConfig when this rank finds no checkpoint, or one of another kind."""
        if not (directory / _STATE).is_file():
            raise InvalidConfig(
                f"This rank finds no checkpoint in {directory.name}.",
                reason=Reason.NO_CHECKPOINT,
                remedy="Put the run's directory where every rank of the trainer reads it.",
            )
        is_adapter = (directory / ADAPTER).is_file()
        is_whole = (directory / WEIGHTS).is_file()
        if (is_adapter or is_whole) and is_adapter != has_lora(self.policy.causal_lm):
            content = "a LoRA adapter" if is_adapter else "whole weights"
            raise InvalidConfig(
                f"The checkpoint {directory.name} holds {content}, unlike what the settings train.",
                reason=Reason.WEIGHTS_MISMATCH,
                remedy="Resume with the lora_rank the run was started with.",
            )

    def _restore_weights(self, directory: Path) -> None:
        model = self.policy.causal_lm
        if not has_lora(model):
            self.read_weights(directory / WEIGHTS)
            return
        own = adapter_tensors(model)
        tensors = load_file(directory / ADAPTER)
        load_adapter(model, {name: cut(tensor, own.get(name)) for name, tensor in tensors.items()})

    def _digest_of_base(self) -> str:
        if not self._base_digest:
            self._base_digest = BaseWeights.of(self._model_dir).digest()
        return self._base_digest


def _write_state(directory: Path, state: Mapping[str, Any]) -> None:
    with (
        whole_file(directory / _STATE, sync=False, errors=(RuntimeError,)) as temporary,
        temporary.open("wb") as file,  # by its path, the file would hold the path's name
    ):
        torch.save(dict(state), file)


def _digests(directory: Path, files: Iterable[Path]) -> dict[str, str]:
    return {str(path.relative_to(directory)): _sha256(path) for path in files}


def _write_digests(directory: Path, digests: Mapping[str, str]) -> None:
    with whole_file(directory / _DIGESTS, sync=False) as temporary:
        temporary.write_text(json.dumps(digests, indent=2, sort_keys=True), "utf-8")


def _like(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return what is written of a tensor, without numbers."""
    return torch.empty(tensor.shape, dtype=_kind(tensor, dtype), device="meta")


def _kind(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype and tensor.ndim > 1 and tensor.is_floating_point() else tensor.dtype


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def move_training(
    model: nn.Module, optimizers: Iterable[GuardedOptimizer], device: torch.device | str
) -> None:
    """Move parameters, buffers and optimiser state; leave nothing on the old device.

    Parameters stay the same objects, so optimisers and tied weights keep working.
    """
    target, left = torch.device(device), next(model.parameters()).device
    if target.type == left.type:
        return
    for parameter in model.parameters():  # this yields tied ones once
        parameter.data = place(parameter.data, target)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, place(buffer, target))
    for guarded in optimizers:
        for optimizer in guarded.torch_optimizers:
            # By torch's rules moments follow their parameter and AdamW's step count stays on host.
            optimizer.load_state_dict(optimizer.state_dict())
    if left.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(left)
        torch.cuda.empty_cache()


def place(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device."""
    return tensor.to(device)
