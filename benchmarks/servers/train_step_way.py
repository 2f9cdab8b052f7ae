"""Make train steps in one way, in a process of its own: one for each line that orders it.

python -m benchmarks.servers.train_step_way WAY FOLDER THREADS

reads `prove PATH` (write loss and clipped gradients), `norm` (answer loss and the gradients' norm),
`step` (answer wall and CPU seconds) or `memory` (answer the bytes that a step takes at its peak:
above model, gradients and optimiser, or on a GPU with them), and answers with JSON lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.servers import train_step_peers as peers
from benchmarks.servers.train_step_batch import (
    CLIP,
    DEVICE,
    ENTROPY_COEFF,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    load_batch,
    load_model,
)

TRL = {
    "trl": {},
    "trl_fp32": {"bf16": False, "gradient_checkpointing": False},
    "trl_bf16": {"bf16": True, "gradient_checkpointing": False},
}
TORCHRL = {"torchrl": True, "torchrl_no_entropy": False}
OURS = ("ours", "ours_entropy", "ours_entropy_bonus", "ours_recomputed", "ours_cut")
SORTED = {
    f"sorted_{micro_batch}{products}": micro_batch
    for micro_batch in (1, 2, 4)
    for products in ("", "_onednn")
}


class OurStep:
    """dialoop_learning.training.update, as the trainer calls it."""

    def __init__(self, folder: Path, way: str) -> None:
        from dialoop_learning.loss.loss_loading import load_objective
        from dialoop_learning.model.attention import PACKED_ATTENTION
        from dialoop_learning.model.policy import PolicyModel
        from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
        from dialoop_learning.packing.rows import TokenRow

        self.model = load_model(folder, attention=PACKED_ATTENTION)
        self._policy = PolicyModel(self.model)
        if DEVICE.type == "cuda":
            self._policy.autocast = torch.bfloat16
        if way == "ours_recomputed":
            self._policy.checkpoint_activations()
        if way == "ours_cut":
            self._policy.take_kernel("cut", device=DEVICE)
        settings = OptimizerSettings(learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM)
        self._optimizer = GuardedOptimizer(self.model.parameters(), settings)
        options = {"clip_low": CLIP, "clip_high": CLIP}
        coeff = ENTROPY_COEFF if way == "ours_entropy_bonus" else 0.0
        self._loss = load_objective("grpo", options, aggregation="token", entropy_coeff=coeff)
        self._with_entropy = way == "ours_entropy"
        self._rows = [
            TokenRow(
                token_ids=s.ids,
                response_mask=torch.arange(len(s.ids)) >= s.num_prompt,
                inference_logprobs=s.inference_logprobs,
                advantages=torch.full((s.num_trained,), s.advantage),
                group_index=s.prompt,
            )
            for s in load_batch(folder)
        ]

    def step(self, took: peers.Took) -> None:
        """One update, rows planned and packed anew."""
        from dialoop_learning.parallel.ranks import ALONE
        from dialoop_learning.parallel.step_plan import own_rows
        from dialoop_learning.training import update

        optimizer = _Watched(self._optimizer, lambda loss: took(self.model, loss))
        rows = own_rows(self._rows, ALONE, max_tokens=int(os.environ.get("ROW_TOKENS", "2048")))
        update(
            self._policy,
            optimizer,
            [row.to(DEVICE) for row in rows],
            self._loss,
            with_entropy=self._with_entropy,
        )


class _Watched:
    """An optimiser that reports each step before it makes it."""

    def __init__(self, optimizer: Any, before_step: Callable[[float], None]) -> None:
        self._optimizer, self._before_step = optimizer, before_step

    def step(self, loss: float) -> Any:
        self._before_step(loss)
        return self._optimizer.step(loss)


class SortedStep:
    """A plain loop over transformers: sorted by length, right-padded, logits of answers only.

    No attention mask is needed: under a causal mask no token sees the filling on its right.
    With `products` its linear layers are computed as ours are, which torch does not do by itself.
    """

    def __init__(self, folder: Path, micro_batch: int, *, products: bool) -> None:
        from dialoop_learning.model.products import OneDnnLinear

        self._products = OneDnnLinear if products else contextlib.nullcontext
        self.model = load_model(folder)
        batch = sorted(load_batch(folder), key=lambda s: -len(s.ids))
        self._total = sum(s.num_trained for s in batch)
        self._parts = [batch[i : i + micro_batch] for i in range(0, len(batch), micro_batch)]
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, took: peers.Took) -> None:
        """One update."""
        total = 0.0
        for part in self._parts:
            ids = torch.nn.utils.rnn.pad_sequence([s.ids for s in part], batch_first=True)
            mask = torch.zeros_like(ids, dtype=torch.bool)
            for row, s in zip(mask, part, strict=True):
                row[s.num_prompt : len(s.ids)] = True
            ids, mask = ids.to(DEVICE), mask.to(DEVICE)
            half = torch.autocast("cuda", torch.bfloat16, enabled=DEVICE.type == "cuda")
            with self._products(), half:
                states = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
                logits = self.model.lm_head(states[:, :-1][mask[:, 1:]]).float()
            chosen = logits.gather(-1, ids[mask][:, None]).squeeze(-1)
            old = torch.cat([s.inference_logprobs for s in part]).to(DEVICE)
            of_tokens = [torch.full((s.num_trained,), s.advantage) for s in part]
            advantages = torch.cat(of_tokens).to(DEVICE)
            ratio = (chosen - logits.logsumexp(-1) - old).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.minimum(ratio * advantages, clipped * advantages).sum() / self._total
            loss.backward()
            total += float(loss.detach())
        took(self.model, total)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()


class MatmulPeak:
    """Large float32 products by the faster library: the most this machine does, no train step."""

    def __init__(self) -> None:
        from dialoop_learning.model.products import product

        self._one, self._other = torch.randn(2, 2048, 2048)
        took = {f: min(self._time(f) for _ in range(3)) for f in (torch.mm, product)}
        self._product = min(took, key=lambda f: took[f])

    def _time(self, product: Callable[..., Any]) -> float:
        began = time.perf_counter()
        product(self._one, self._other)
        return time.perf_counter() - began

    def step(self, _: peers.Took) -> None:
        """Ten products of 2 * 2048^3 operations."""
        for _ in range(10):
            self._product(self._one, self._other)


class OrderQueue:
    """Takes orders from stdin between two steps, and answers on what was stdout."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries print; the answers stay clean
        self._order: list[str] = []
        self._wall = self._cpu = self._before = 0.0
        self._gradient_bytes = 0
        self._norm: dict[str, float] = {}

    def took(self, model: Any, loss: float) -> None:
        """Gradients are complete: write them, as they are clipped, where the order asks for it."""
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        self._gradient_bytes = sum(g.nbytes for g in gradients.values())
        if self._order[0] not in ("prove", "norm"):
            return
        norm = torch.stack([g.float().norm() for g in gradients.values()]).norm()
        self._norm = {"loss": loss, "norm": float(norm)}
        if self._order[0] == "norm":
            return
        share = min(1.0, MAX_GRAD_NORM / (float(norm) + 1e-6))
        clipped = {name: g.float() * share for name, g in gradients.items()}
        torch.save({"loss": loss, "gradients": clipped}, self._order[1])

    def between(self) -> None:
        """Answer the step that was made, and wait for the next; peers.Finished at the end."""
        if self._order:
            self._answer()
        line = sys.stdin.readline()
        if not line:
            raise peers.Finished
        self._order = line.split()
        if self._order[0] == "memory":
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status("VmRSS")
            if DEVICE.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def _answer(self) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        answer = {
            "wall_s": time.perf_counter() - self._wall,
            "cpu_s": time.process_time() - self._cpu,
        }
        if self._order[0] == "memory":
            host = _status("VmHWM") - self._before - self._gradient_bytes
            on_device = DEVICE.type == "cuda"
            answer = {"bytes": torch.cuda.max_memory_allocated() if on_device else host}
        if self._order[0] == "norm":
            answer = self._norm
        print(json.dumps(answer), file=self._out, flush=True)


def _status(name: str) -> int:
    """Return a size of this process in bytes: VmRSS now, or VmHWM, its highest since the reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def main() -> None:
    way, folder, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    orders = OrderQueue()
    try:
        if way in TRL:
            peers.run_trl(folder, orders.between, orders.took, TRL[way])
            return
        made: Any
        if way in TORCHRL:
            made = peers.TorchrlStep(folder, entropy_bonus=TORCHRL[way])
        elif way in SORTED:
            made = SortedStep(folder, SORTED[way], products=way.endswith("_onednn"))
        else:
            made = MatmulPeak() if way == "peak" else OurStep(folder, way)
        while True:
            orders.between()
            made.step(orders.took)
    except peers.Finished:
        return


if __name__ == "__main__":
    main()
