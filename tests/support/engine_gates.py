"""An engine and the trainer's own model on the same weights, and how far apart they may be."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from dialoop.episode import UpdateMode
from dialoop_learning.model.policy import PolicyModel, load_policy
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_services.inference.engine import BASE_VERSION, Engine, EngineOptions
from safetensors.torch import load_file, save_file

from tests.support.engine_world import MAX_MODEL_LEN, save_tokenizer, version

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dialoop.sequences import PolicyVersion

MAX_DIFFERENCE = 1e-5
MEAN_DIFFERENCE_BF16 = 3e-3
MAX_NUM_SEQS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Which engine, on which kind of model."""

    kind: str
    tied: bool
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind}-{'tied' if self.tied else 'untied'}-{self.dtype}"


_EVERY_RUN = (
    ("transformers", True, "float32"),
    ("vllm", True, "float32"),
)


def _param(kind: str, *, tied: bool, dtype: str) -> Any:
    setup = Setup(kind=kind, tied=tied, dtype=dtype)
    marks = []
    if kind == "vllm":
        marks.append(pytest.mark.vllm)
    if (kind, tied, dtype) not in _EVERY_RUN:
        marks.append(pytest.mark.heavy(reason="every kind takes half a minute"))
    return pytest.param(setup, id=str(setup), marks=marks)


GATE_KINDS = [
    _param(kind, tied=tied, dtype=dtype)
    for kind in ("transformers", "vllm")
    for dtype in ("float32", "bfloat16")
    for tied in (True, False)
]


def random_model(seed: int, setup: Setup) -> transformers.PreTrainedModel:
    """3M parameters; logits differ by nats from one seed to the next, by less in bfloat16.

    Rounding to 8 bits grows with the logits: with nats between versions the formats alone are
    3e-3 to 6e-3 apart on average, with tenths of nats below 3e-3.
    """
    torch.manual_seed(seed)
    scale = 1.0 if setup.dtype == "float32" else 0.6
    config = transformers.Qwen2Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=setup.tied,
        initializer_range=0.05 * scale,
        eos_token_id=257,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3 * scale)
    return model


class Gated:
    """An engine, the trainer's model, and every version that was published."""

    def __init__(self, engine: Engine, policy: PolicyModel, folder: Path, setup: Setup) -> None:
        self.engine, self.policy, self.folder, self.setup = engine, policy, folder, setup
        self._number = 0
        self._paths: dict[PolicyVersion, Path] = {}
        self.differences: list[float] = []

    async def publish(self, mode: UpdateMode = UpdateMode.RECOMPUTE) -> PolicyVersion:
        """Other weights, on the engine and on the trainer."""
        self._number += 1
        new = version(self._number)
        model = random_model(self._number, self.setup)
        self._paths[new] = save_state(model, self.folder / f"{new}.safetensors", self.setup)
        await self.engine.load_weights(self._paths[new], new, mode=mode)
        self.trainer_takes(new)
        return new

    def trainer_takes(self, number: PolicyVersion) -> None:
        """The trainer's model has that version's weights."""
        path = self._paths.get(number, self.folder / "base.safetensors")
        self.policy.causal_lm.load_state_dict(load_file(path), strict=False)
        self.policy.causal_lm.tie_weights()

    def keep_base(self) -> None:
        """Keep the weights that the model directory came with."""
        model = random_model(0, self.setup)
        self._paths[BASE_VERSION] = save_state(model, self.folder / "base.safetensors", self.setup)

    @torch.no_grad()
    def trainer_logprobs(self, rows: list[list[int]]) -> list[np.ndarray]:
        """float32 [len - 1] of each row, by the trainer's packed forward pass."""
        made = [TokenRow.from_demonstration(ids, [False] + [True] * (len(ids) - 1)) for ids in rows]
        batch = pack_rows(made)
        return [part.float().numpy() for part in batch.split(self.policy(batch).logprobs)]

    def require_close(self, own: np.ndarray, theirs: np.ndarray) -> None:
        """Within the gate of the number format."""
        difference = np.abs(own - theirs)
        if self.setup.dtype == "float32":
            assert difference.max() < MAX_DIFFERENCE
        else:
            self.differences.extend(difference.tolist())
            assert difference.max() < 0.1

    @property
    def version_gap(self) -> float:
        """By how many nats, at least somewhere, one version differs from the next."""
        return 0.5 if self.setup.dtype == "float32" else 0.25

    async def core_is_busy(self) -> bool:
        """What vLLM's core says of itself; the transformers engine has no other process."""
        if self.setup.kind != "vllm":
            return False
        llm = self.engine._llm
        return bool(await llm.engine_core.call_utility_async("has_work"))


def save_state(model: transformers.PreTrainedModel, path: Path, setup: Setup) -> Path:
    state = model.state_dict()
    if setup.tied:
        del state["lm_head.weight"]
    dtype = getattr(torch, setup.dtype)
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in state.items()}, path)
    return path


@asynccontextmanager
async def gated_engine(setup: Setup, folder: Path) -> AsyncIterator[Gated]:
    directory = folder / "model"
    random_model(0, setup).save_pretrained(directory)
    save_tokenizer(directory)
    engine = await start_engine(setup, directory)
    world = Gated(engine, load_policy(directory, dtype=setup.dtype), folder, setup)
    world.keep_base()
    try:
        yield world
        if world.differences:
            mean = float(np.mean(world.differences))
            assert mean < MEAN_DIFFERENCE_BF16, f"{setup}: {mean}"
    finally:
        await engine.close()


async def start_engine(setup: Setup, directory: Path) -> Engine:
    options = EngineOptions(
        max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS, dtype=setup.dtype
    )
    if setup.kind == "vllm":
        pytest.importorskip("vllm")
        from dialoop_services.inference.vllm_engine.environment import prepare

        prepare()
        from dialoop_services.inference.vllm_engine.engine import VllmEngine

        return await VllmEngine.start(directory, options)
    from dialoop_services.inference.transformers_engine.engine import TransformersEngine

    return await TransformersEngine.start(directory, options)
