"""An engine under check, its model, and what transformers says of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from dialoop.errors import DialoopError
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import SamplingParams, StopReason
from dialoop_learning.model.experts import chosen_experts, routers_of, watch_routers
from dialoop_learning.model.weight_files import is_tied
from dialoop_services.inference.engine import Engine, EngineOptions, Sampled, StopTokens
from dialoop_services.runtime.device_lock import DeviceLock
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from dialoop_ops.conformance.environment.play import Broken

TOLERANCES: Mapping[str, float] = MappingProxyType({"float32": 1e-4, "bfloat16": 0.3})
"""Nats by which an engine of a dtype may differ from transformers in float32."""
ON_DEVICE_MIB = 64
"""What an engine that computes on a GPU holds of it at least."""
NUM_TOKENS = 12
"""Tokens of a sample."""
RANK, SCALING = 4, 2.0
NO_STOP = StopTokens()
PROMPTS = ([5, 9, 17, 30], [7, 6, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50])


@dataclass(slots=True, kw_only=True)
class EngineBench:
    """An engine under check, its model, and what transformers says of each policy it loads."""

    engine: Engine
    model_dir: Path
    folder: Path
    options: EngineOptions
    seed: int = 0
    number: int = 0
    adapter: Mapping[str, torch.Tensor] = field(default_factory=dict)
    held_mib: int = 0
    """What the engine took of the GPUs' memory when it started."""

    def reference_logprobs(self, ids: Sequence[int], *, temperature: float = 1.0) -> np.ndarray:
        """Return transformers' log-probs [len - 1] of `ids` under the weights loaded last."""
        model = reference(self.model_dir, self.seed)
        with torch.inference_mode(), _merge_adapter(model, self.adapter):
            logits = model(torch.tensor([list(ids)])).logits[0, :-1].float()
        rows = torch.log_softmax(logits / temperature, dim=-1)
        return np.asarray(rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0])

    def file_of(self, seed: int) -> Path:
        """Write the weights of a seed as a publish does, under the checkpoint's names."""
        path = self.folder / f"weights-{seed}.safetensors"
        model, tied = reference(self.model_dir, seed), is_tied(self.model_dir)
        save_file({n: t.contiguous() for n, t in parameters(model, tied=tied).items()}, path)
        return path

    def next_version(self) -> PolicyVersion:
        """Return a version that is newer than those before."""
        self.number += 1
        return PolicyVersion(lineage="conformance", number=self.number)

    async def load(self) -> PolicyVersion:
        """Load new weights and return their version."""
        version, seed = self.next_version(), self.seed + 1
        await self.engine.load_weights(self.file_of(seed), version)
        self.seed = seed
        return version

    async def require_scores(self, what: str) -> None:
        """Break unless the engine scores ids as the weights loaded last do."""
        for ids in PROMPTS:
            scored = await self.engine.logprobs(ids)
            self.require_equal(scored.logprobs, self.reference_logprobs(ids), what)
            require(
                scored.policy_version == self.engine.policy_version,
                f"{what}: the scores are labelled {scored.policy_version}, and the engine has "
                f"{self.engine.policy_version}.",
            )

    async def sample(self, ids: Sequence[int], **fields: Any) -> Sampled:
        """Sample once, up to 12 tokens."""
        (sampled,) = await self.engine.sample(ids, sampling(**fields), stop=NO_STOP)
        return sampled

    def require_own(self, ids: Sequence[int], sampled: Sampled, *, temperature: float) -> None:
        """Break unless tokens, log-probs and versions of a sample agree with the weights."""
        length = len(sampled.token_ids)
        require(length == NUM_TOKENS, f"A sample of {NUM_TOKENS} tokens has {length}.")
        require(len(sampled.logprobs) == length, "A sample lacks log-probs.")
        require(
            sampled.stop_reason is StopReason.LENGTH,
            f"A sample that reached its length ended with {sampled.stop_reason}.",
        )
        labels = [(s.start, s.length, s.policy_version) for s in sampled.versions]
        require(
            labels == [(0, length, self.engine.policy_version)],
            f"The tokens' versions are {labels}; all are of {self.engine.policy_version}.",
        )
        expected = self.reference_logprobs([*ids, *sampled.token_ids], temperature=temperature)
        what = f"Log-probs of tokens sampled at temperature {temperature}"
        self.require_equal(sampled.logprobs, expected[len(ids) - 1 :], what)

    @property
    def tolerance(self) -> float:
        """Return by how many nats the engine's dtype may round."""
        return TOLERANCES[self.options.dtype]

    def require_equal(self, values: Any, expected: Any, what: str) -> None:
        """Raise Broken unless both rows of nats have one shape and agree up to rounding."""
        values, expected = np.asarray(values), np.asarray(expected)
        require(
            values.shape == expected.shape,
            f"{what} have the shape {values.shape}, not {expected.shape}.",
        )
        gap = float(np.abs(values - expected).max())
        require(gap < self.tolerance, f"{what} differ by {gap:.2g} nats from a full forward pass.")

    def require_freed(self, mib_before: int) -> int:
        """Break unless a sleeping engine left its device to the trainer; return the MiB it freed.

        They are 0 where it computes on no GPU.
        """
        lock = self.options.device_lock
        assert lock is not None
        alone = DeviceLock(lock)
        require(alone.try_own(), "A sleeping engine holds the device: its lock is taken.")
        alone.release()
        if self.held_mib < ON_DEVICE_MIB:
            return 0
        freed = mib_before - used_mib()
        require(freed > 0, f"A sleeping engine frees nothing of the {self.held_mib} MiB it took.")
        return freed


def used_mib() -> int:
    """Return how much of the GPUs' memory is taken, by anybody; 0 without an NVIDIA GPU."""
    if shutil.which("nvidia-smi") is None:
        return 0
    command = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return sum(int(line) for line in done.stdout.split() if line.isdecimal())


def chosen_by_model(model_dir: Path, ids: Sequence[int]) -> np.ndarray:
    """Return the experts [L, layers, k] of a full forward pass, sorted."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode(), watch_routers(routers_of(model)) as routed:
        model(torch.tensor([list(ids)]))
    return np.asarray(chosen_experts(routed).sort(-1).values)


def sampling(**fields: Any) -> SamplingParams:
    """Return sampling of 12 tokens at temperature 1, with other fields as given."""
    return SamplingParams(**{"max_new_tokens": NUM_TOKENS, "temperature": 1.0} | fields)


def require(is_true: bool, problem: str) -> None:
    """Raise Broken with the problem unless it holds."""
    if not is_true:
        raise Broken(problem, "See Engine in dialoop_services.inference.engine.")


async def require_error(
    call: Callable[[], Awaitable[Any]],
    kind: type[DialoopError],
    what: str,
    *,
    reason: Reason | None = None,
) -> None:
    """Raise Broken unless the call raises an error of that kind, and of that reason if given."""
    try:
        await call()
    except kind as error:
        named = reason is None or error.reason == reason
        require(named, f"{what}: the reason is {error.reason}, not {reason}.")
    except Exception as error:
        raise Broken(
            f"{what} is answered with {type(error).__name__}: {error}.", f"Raise {kind.__name__}."
        ) from error
    else:
        raise Broken(f"{what} is accepted.", f"Raise {kind.__name__}.")


@cache
def reference(model_dir: Path, seed: int) -> Any:
    """Return transformers' model; the weights of a seed above 0 are moved a little."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters() if seed else ():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
    return model


def parameters(model: Any, *, tied: bool) -> dict[str, torch.Tensor]:
    """Return the tensors that a weights file holds; a tied head is not among them."""
    state = dict(model.state_dict())
    return {n: t for n, t in state.items() if not (tied and n == "lm_head.weight")}


def adapter_tensors(model_dir: Path) -> dict[str, torch.Tensor]:
    """Return random A and B of every projection of queries, by PEFT's names."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, module in reference(model_dir, 0).named_modules():
        if name.endswith("q_proj"):
            rows, columns = module.weight.shape
            for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                key = f"base_model.model.{name}.lora_{part}.weight"
                tensors[key] = torch.randn(shape, generator=generator) * 0.1
    if not tensors:
        raise Broken("The model has no q_proj to adapt.", "Check with the kit's own model.")
    return tensors


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write PEFT's two files and return that of the tensors."""
    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK * SCALING,
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    path = folder / "adapter_model.safetensors"
    save_file(dict(tensors), path)
    return path


@contextmanager
def _merge_adapter(model: Any, adapter: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Hold W + scaling * B A in place of each adapted W."""
    weights = dict(model.named_parameters())
    originals = {}
    try:
        for key in adapter:
            if ".lora_A." in key:
                name = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
                originals[name] = weights[name].data
                up = adapter[key.replace(".lora_A.", ".lora_B.")]
                weights[name].data = originals[name] + SCALING * up @ adapter[key]
        yield
    finally:
        for name, tensor in originals.items():
            weights[name].data = tensor
