"""The state that training changes: the policy, its optimisers and the random orders.

Every method that touches a file is collective: all ranks call it. The first rank writes, except
that each rank writes its own part of a sharded checkpoint. Every rank reads by itself.

Weights on their way to a file are captured at one moment. `CapturedWeights.write` may run in
another thread, beside the next train step.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from dialoop.clients.weights import WeightsKind
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop_learning.lora.base_weights import BASE_DIGEST, BaseWeights, require_base
from dialoop_learning.lora.layers import (
    ADAPTER,
    adapter_tensors,
    has_lora,
    load_adapter,
    merged_tensors,
    save_adapter_config,
)
from dialoop_learning.model.checkpoint_names import to_checkpoint
from dialoop_learning.model.weight_delta import write_delta
from dialoop_learning.model.weight_files import HEAD
from dialoop_learning.parallel.loading import fill_weights
from dialoop_learning.parallel.parallel_state import (
    cut,
    gather_optimizer,
    gather_weights,
    gather_whole,
    load_optimizer,
    load_sharded,
    save_sharded,
)
from dialoop_learning.parallel.ranks import ALONE, Ranks, reshard
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dialoop_services.runtime.durable import (
    named_failures,
    read_failed,
    sync_tree,
    whole_file,
    why_unread,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedWeights:
    """The weights of one moment on the first rank's host; other ranks have no tensors.

    tensors: by the names of the file. metadata: the file's own, at most one entry, since more come
    in no fixed order.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    kind: WeightsKind = WeightsKind.WHOLE
    adapter: Mapping[str, Any] = field(default_factory=dict)

    def write(self, first: Path | None = None) -> ExportedWeights:
        """Write the file at its path, or at `first`; it appears whole or not at all.

        `ExportedWeights.keep` brings it to its path and to the disk, where something relies on
        that. Raise PreconditionFailed (WRITE_FAILED) if it cannot be written.
        """
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}
        with whole_file(first or self.path, sync=False, errors=(SafetensorError,)) as file:
            file.touch()
            mode = file.stat().st_mode  # safetensors makes its files with mode 600
            save_file(tensors, file, dict(self.metadata))
            file.chmod(mode)
            sha256, num_bytes = _sha256(file), file.stat().st_size
        return ExportedWeights(
            path=self.path,
            first=first,
            sha256=sha256,
            num_bytes=num_bytes,
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
        # The names of the weights in the model's directory, once they have been read.
        self._names: frozenset[str] = frozenset()

    def write_weights(self, path: Path, first: Path | None = None) -> ExportedWeights:
        """Write the weights as they are now for `path`, as `CapturedWeights.write` does.

        With LoRA, a path with PEFT's file name gets the adapter alone, in a directory for PEFT.
        """
        captured = self.capture(path, copy=False)
        facts = b""
        if self._ranks.is_first:
            exported = captured.write(first)
            facts = json.dumps([exported.sha256, exported.num_bytes]).encode()
        sha256, num_bytes = json.loads(self._ranks.broadcast(facts))
        return ExportedWeights(
            path=path,
            first=first,
            sha256=sha256,
            num_bytes=num_bytes,
            kind=captured.kind,
            **captured.adapter,
        )

    def capture(self, path: Path, *, copy: bool = True) -> CapturedWeights:
        """Return the weights as they are now, on the first rank's host, to be written to `path`.

        With `copy` no later train step changes them. Of an adapter the config is written here.
        """
        is_adapter = path.name == ADAPTER
        tensors = self._adapter() if is_adapter else self._published_weights()
        if copy:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        if not is_adapter:
            return CapturedWeights(path=path, tensors=tensors, metadata={"format": "pt"})
        adapter = b""
        if self._ranks.is_first:
            with named_failures(path):
                config = save_adapter_config(
                    self.policy.causal_lm, path.parent, base=self._model_dir
                )
            own = {"adapter_config_json": config, "base_digest": self._digest_of_base()}
            adapter = json.dumps(own).encode()
        facts = json.loads(self._ranks.broadcast(adapter))
        return CapturedWeights(
            path=path,
            tensors=tensors,
            metadata={BASE_DIGEST: facts["base_digest"]},
            kind=WeightsKind.ADAPTER,
            adapter=facts,
        )

    def read_weights(self, path: Path) -> None:
        """Load weights that `write_weights` wrote; raise InvalidConfig for another model's."""
        complaint = f"{path.parent.name} is not of the model in {self._model_dir}"
        fill_weights(self.policy, [path], complaint=complaint)

    def write(self, directory: Path) -> None:
        """Write a checkpoint: weights (with LoRA the adapters), optimisers, random states."""
        if self._is_sharded:
            save_sharded(directory / _PARTS, self.policy, self.optimizers, self._ranks)
            state: dict[str, Any] = {}
        else:
            is_adapter = has_lora(self.policy.causal_lm)  # then it is a PEFT directory
            self.write_weights(directory / (ADAPTER if is_adapter else WEIGHTS))
            state = {n: gather_optimizer(o, self._ranks) for n, o in self.optimizers.items()}
        if self._ranks.is_first:
            facts = {
                "torch_random": torch.get_rng_state(),
                "python_random": repr(self.orders.getstate()),
            }
            if has_lora(self.policy.causal_lm):
                facts[BASE_DIGEST] = self._digest_of_base()
            with (
                whole_file(directory / _STATE, sync=False, errors=(RuntimeError,)) as temporary,
                temporary.open("wb") as file,  # by its path, the file would hold the path's name
            ):
                torch.save({**state, **facts}, file)
        self._ranks.gather(None)  # wait: afterwards every rank may rely on the files
        self._write_digests(directory)

    def _write_digests(self, directory: Path) -> None:
        """Write the digest of every file so far; each rank reads its share of them."""
        files = (path for path in sorted(directory.rglob("*")) if path.is_file())
        listed = json.dumps([str(path.relative_to(directory)) for path in files]).encode()
        # One rank's list for all: a shared disk may show each of them another one.
        names: list[str] = json.loads(self._ranks.broadcast(listed))
        own = {
            name: _sha256(directory / name) for name in names[self._ranks.rank :: self._ranks.size]
        }
        digests = {n: digest for part in self._ranks.gather(own) for n, digest in part.items()}
        if self._ranks.is_first:
            with whole_file(directory / _DIGESTS, sync=False) as temporary:
                temporary.write_text(json.dumps(digests, indent=2, sort_keys=True), "utf-8")

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

    def _adapter(self) -> dict[str, torch.Tensor]:
        """Return the adapters by PEFT's names; {} on later ranks."""
        reshard(self.policy)
        return gather_whole(adapter_tensors(self.policy.causal_lm), self._ranks)

    def _published_weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters by the names of the checkpoint's files; {} on later ranks."""
        tensors = self._whole_weights()
        if not self._names:
            self._names = frozenset(BaseWeights.of(self._model_dir).shapes())
        return to_checkpoint(self.policy.causal_lm, tensors, self._names)

    def _whole_weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters by the model's names, with adapters merged; {} on later ranks.

        A tied head is left out.
        """
        model = self.policy.causal_lm
        if not has_lora(model):
            return gather_weights(self.policy, self._ranks)
        reshard(self.policy)
        merged = merged_tensors(model)
        if self.policy.ties_head:
            merged.pop(HEAD, None)
        return gather_whole(merged, self._ranks)


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
