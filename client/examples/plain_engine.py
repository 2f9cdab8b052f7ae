"""An engine in one file: `engine = "plain_engine:PlainEngine"` in a config.

It computes the whole sequence anew for each token, so it is slow and needs no cache. A publish may
come between two tokens: each token carries the version of the weights that sampled it. Loads have
no keys to keep or to compute anew, so `mode` changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import torch
from dialoop import PolicyVersion, SamplingParams
from dialoop.episode import UpdateMode
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.model.weight_files import is_tied, model_shapes
from dialoop_services.inference import engine
from dialoop_services.inference.transformers_engine.engine import copy_weights, load_model
from dialoop_services.inference.transformers_engine.rows import BatchRow, generator_of
from dialoop_services.inference.transformers_engine.sampler import processed_logprobs, sample_rows
from dialoop_services.inference.weights.parameters import require_same_parameters
from safetensors.torch import load_file


class PlainEngine:
    """Samples, scores and loads weights; it neither streams nor pauses nor serves adapters."""

    name, version, is_alive = "plain", "1", True

    def __init__(self, model_dir: Path, options: engine.EngineOptions) -> None:
        self._model = load_model(model_dir, getattr(torch, options.dtype))
        self._decode = Tokenizer.from_directory(model_dir).decode
        self._shapes, self._tied = model_shapes(model_dir), is_tied(model_dir)
        self._generator = torch.Generator().manual_seed(options.seed)
        self.max_model_len = options.max_model_len
        self.vocab_size = self._model.get_input_embeddings().num_embeddings
        self.policy_version = engine.BASE_VERSION

    @classmethod
    async def start(cls, model_dir: Path, options: engine.EngineOptions) -> PlainEngine:
        """Return the engine, ready to sample."""
        return cls(model_dir, options)

    async def sample(
        self,
        prompt_ids: Any,
        sampling: SamplingParams,
        *,
        stop: engine.StopTokens,
        num_samples: int = 1,
    ) -> tuple[engine.Sampled, ...]:
        """Continue `prompt_ids` `num_samples` times, one after the other."""
        engine.require_ids(prompt_ids, vocab_size=self.vocab_size)
        engine.require_sampling(sampling)
        room = engine.room_for(prompt_ids, sampling, self.max_model_len)
        if room <= 0:
            return engine.context_full(num_samples)
        samples = []
        for index in range(num_samples):
            generator = generator_of(sampling, index, shared=self._generator)
            row = BatchRow(
                prompt_ids, sampling, stop=stop, room=room, generator=generator, on_tokens=None
            )
            while not row.is_over:
                self._append_token(row)
                await asyncio.sleep(0)  # other requests and loads take their turn
            row.deliver()
            samples.append(row.done.result())
        return tuple(samples)

    def _append_token(self, row: BatchRow) -> None:
        logits = self._logits(row.ids)[-1:]
        logprobs = processed_logprobs(logits, [row.sampling], [row.ids])
        token = int(sample_rows(logprobs, [row.sampling], [row.generator]))
        row.append(token, float(logprobs[0, token]), self.policy_version, decode=self._decode)

    @torch.inference_mode()
    def _logits(self, token_ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(input_ids=torch.tensor([token_ids])).logits
        return logits[0].float()

    async def logprobs(self, token_ids: Any) -> engine.Scored:
        """Return the log-probs of given ids under the loaded policy."""
        engine.require_ids(token_ids, vocab_size=self.vocab_size)
        engine.require_fit(token_ids, self.max_model_len)
        rows = torch.log_softmax(self._logits(list(token_ids))[:-1], dim=-1)
        values = rows.gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        return engine.Scored(logprobs=values.numpy(), policy_version=self.policy_version)

    async def load_weights(
        self, path: Path, version: PolicyVersion, *, mode: UpdateMode = UpdateMode.RECOMPUTE
    ) -> engine.LoadTimes:
        """Replace all weights between two tokens."""
        begun = time.monotonic()
        require_same_parameters(path, self._shapes, tied=self._tied)
        copy_weights(self._model, load_file(path), tied=self._tied)
        self.policy_version = version
        seconds = time.monotonic() - begun
        return engine.LoadTimes(pause_s=seconds, load_s=seconds)

    async def close(self) -> None:
        """Do nothing: the model goes with the engine."""
