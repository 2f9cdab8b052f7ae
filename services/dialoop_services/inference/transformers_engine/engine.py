"""A transformers model as an engine, on a CPU or a GPU: one task decodes all requests together.

Versions are exact because everything that uses the model holds one lock. A step samples with one
version. A load replaces all weights between two steps; running rows then compute their keys again
under the new version, or keep them in a KEEP_KV load, which marks their samples.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from dialoop.episode import UpdateMode
from dialoop.errors import DataLost, InternalError, InvalidConfig
from dialoop.reasons import Reason
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.lora.base_weights import BaseWeights
from dialoop_learning.memory import return_free_memory
from dialoop_learning.model.checkpoint_names import from_checkpoint
from dialoop_learning.model.experts import routers_of, routing_of
from dialoop_learning.model.weight_files import HEAD, is_tied, model_shapes
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dialoop_services.inference.engine import (
    BASE_VERSION,
    EngineOptions,
    LoadTimes,
    OnBegin,
    OnTokens,
    Sampled,
    Scored,
    StopTokens,
    context_full,
    engine_died,
    engine_stopped,
    require_fit,
    require_ids,
    require_sampling,
    room_for,
    weights_bad,
)
from dialoop_services.inference.replica.device_lease import to_the_end
from dialoop_services.inference.transformers_engine.adapters import AdaptedModel, require_peft
from dialoop_services.inference.transformers_engine.batch import DecodingBatch
from dialoop_services.inference.transformers_engine.keys import DECODING_ATTENTION
from dialoop_services.inference.transformers_engine.rows import BatchRow, distinct, generator_of
from dialoop_services.inference.transformers_engine.sampler import (
    likeliest,
    processed_logprobs,
    sample_rows,
)
from dialoop_services.inference.weights.adapter_files import AdapterSpace
from dialoop_services.inference.weights.parameters import require_same_parameters
from dialoop_services.runtime.cores import threads_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop.sequences import PolicyVersion
    from dialoop.trajectory import SamplingParams

    from dialoop_services.inference.weights.loadable import Adapter, PolicyAdapter

logger = logging.getLogger(__name__)

_ADMIT_SHARE = 4


class TransformersEngine:
    """An engine on a transformers model."""

    name = "transformers"
    tells_begin = True
    gives_top_logprobs = True
    watches_answers = True
    version = str(transformers.__version__)

    def __init__(
        self,
        model: Any,
        *,
        model_dir: Path,
        options: EngineOptions,
    ) -> None:
        self._model = model
        self._tokenizer = Tokenizer.from_directory(model_dir)
        self._shapes = model_shapes(model_dir)
        self._tied = is_tied(model_dir)
        self.base_weights = BaseWeights.of(model_dir)
        self.policy_version = BASE_VERSION
        """The version of the weights loaded now."""
        self._adapted = AdaptedModel(model)
        routers = routers_of(model) if options.records_experts else []
        self.routing = routing_of(model, routers) if options.records_experts else None
        self._batch = DecodingBatch(self._adapted, routers)
        self._running: list[BatchRow] = []
        # `sample` and `stream` fill it and wait, the runner drains it as places get free.
        self._waiting: deque[BatchRow] = deque()
        self._has_work = asyncio.Event()
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._is_held = False
        self.is_asleep = False
        # A load that waits for running rows to end clears the first; the runner sets the second.
        self._may_admit = asyncio.Event()
        self._may_admit.set()
        self._is_drained = asyncio.Event()
        self._loading = asyncio.Lock()
        self._model_lock = asyncio.Lock()
        self._generator = torch.Generator().manual_seed(options.seed)
        self._max_num_seqs = options.max_num_seqs
        self.max_model_len = options.max_model_len
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.adapter_space = AdapterSpace(limits=options.adapters, shapes=self._shapes)
        self._device = torch.device(options.device)
        self._runner = asyncio.create_task(self._run(), name="transformers-engine")

    @classmethod
    async def start(cls, model_dir: Path, options: EngineOptions) -> TransformersEngine:
        """Load the model and start decoding; `dtype` is float32 or bfloat16.

        Raises InvalidConfig: NEEDS_CUDA without the device, and for too few positions.
        """
        require_cuda(options.device)
        torch.set_num_threads(1 if options.num_threads is None else threads_of(options.num_threads))
        if options.adapters.max_adapters:
            await asyncio.to_thread(require_peft)
        model = await asyncio.to_thread(
            load_model, model_dir, getattr(torch, options.dtype), device=options.device
        )
        limit = int(model.config.get_text_config().max_position_embeddings)
        if options.max_model_len > limit:
            raise InvalidConfig(
                f"max_model_len is {options.max_model_len}, the model has {limit} positions.",
                remedy=f"Set DIALOOP_INFERENCE_MAX_MODEL_LEN to at most {limit}.",
            )
        return cls(model, model_dir=model_dir, options=options)

    @property
    def is_alive(self) -> bool:
        """Return whether the engine can still answer."""
        return not self._runner.done()

    @property
    def num_running(self) -> int:
        """Return the number of samples that wait or decode."""
        return sum(not row.is_over for row in (*self._running, *self._waiting))

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stop: StopTokens,
        on_tokens: OnTokens,
        adapter: Adapter | None = None,
        on_begin: OnBegin | None = None,
    ) -> Sampled:
        """Continue `prompt_ids` once; call `on_tokens` with the tokens as they come."""
        (sampled,) = await self.sample(
            prompt_ids,
            sampling,
            stop=stop,
            adapter=adapter,
            on_begin=on_begin,
            on_tokens=on_tokens,
        )
        return sampled

    async def sample(  # noqa: PLR0913 - a request
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stop: StopTokens,
        num_samples: int = 1,
        adapter: Adapter | None = None,
        on_begin: OnBegin | None = None,
        on_tokens: OnTokens | None = None,
    ) -> tuple[Sampled, ...]:
        """Continue `prompt_ids` `num_samples` times."""
        require_ids(prompt_ids, vocab_size=self.vocab_size)
        require_sampling(sampling, gives_top_logprobs=self.gives_top_logprobs)
        room = room_for(prompt_ids, sampling, self.max_model_len)
        if room <= 0:
            return context_full(num_samples)
        rows = [
            BatchRow(
                prompt_ids,
                sampling,
                stop=stop,
                room=room,
                generator=generator_of(sampling, index, shared=self._generator),
                on_tokens=on_tokens,
                adapter=adapter,
                on_begin=on_begin,
            )
            for index in range(num_samples)
        ]
        self._waiting.extend(rows)
        self._has_work.set()
        # Cancelling the caller cancels the futures, and the runner drops their rows.
        return tuple(await asyncio.gather(*(row.done for row in rows)))

    async def logprobs(self, token_ids: Sequence[int], *, adapter: Adapter | None = None) -> Scored:
        """Score given ids under the policy, with an adapter or without; also while paused."""
        require_ids(token_ids, vocab_size=self.vocab_size)
        require_fit(token_ids, self.max_model_len)
        async with self._model_lock:
            scoring = asyncio.to_thread(score, self._adapted, list(token_ids), adapter)
            values = await to_the_end(scoring)  # hold the lock for as long as the thread works
            return Scored(logprobs=values.cpu().numpy(), policy_version=self.policy_version)

    async def load_weights(
        self, path: Path, version: PolicyVersion, *, mode: UpdateMode = UpdateMode.RECOMPUTE
    ) -> LoadTimes:
        """Replace all weights between two steps and commit `version`; then continue by `mode`."""
        started_at = time.monotonic()
        await asyncio.to_thread(require_same_parameters, path, self._shapes, tied=self._tied)
        tensors = await asyncio.to_thread(load_file, path)
        return await self._exchange(tensors, version, mode=mode, started_at=started_at)

    async def load_onto_base(
        self,
        adapter: PolicyAdapter,
        version: PolicyVersion,
        *,
        mode: UpdateMode = UpdateMode.RECOMPUTE,
    ) -> LoadTimes:
        """Load the base weights plus the adapter, as `load_weights` loads a file."""
        started_at = time.monotonic()
        tensors = await asyncio.to_thread(add_to_base, self.base_weights, adapter)
        return await self._exchange(tensors, version, mode=mode, started_at=started_at)

    async def _exchange(
        self,
        tensors: dict[str, torch.Tensor],
        version: PolicyVersion,
        *,
        mode: UpdateMode,
        started_at: float,
    ) -> LoadTimes:
        async with self._loading:
            try:
                if mode is UpdateMode.WAIT:
                    await self._drain()
                async with self._model_lock:
                    paused = time.monotonic()
                    await self._replace(tensors, version, keeps_keys=mode is UpdateMode.KEEP_KV)
            finally:
                self._may_admit.set()
            ended = time.monotonic()
        await asyncio.to_thread(return_free_memory)
        return LoadTimes(pause_s=ended - paused, load_s=ended - started_at)

    async def _drain(self) -> None:
        """Admit no rows and return when all running rows have ended."""
        self._may_admit.clear()
        self._is_drained.clear()
        self._has_work.set()
        await self._is_drained.wait()

    async def _replace(
        self, tensors: dict[str, torch.Tensor], version: PolicyVersion, *, keeps_keys: bool
    ) -> None:
        try:
            await asyncio.to_thread(copy_weights, self._model, tensors, tied=self._tied)
        except BaseException:
            self._fail_all(weights_bad())
            raise
        self.policy_version = version
        if not keeps_keys:
            self._drop_keys()

    def _drop_keys(self) -> None:
        """Drop the keys of running rows, which start over from their tokens."""
        self._waiting.extendleft(reversed(self._running))
        self._running = []
        self._batch.clear()

    async def add_adapter(self, adapter: Adapter) -> None:
        """Add an adapter, between two steps."""
        async with self._model_lock:
            await asyncio.to_thread(self._adapted.add, adapter)

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Remove an adapter, between two steps."""
        async with self._model_lock:
            await asyncio.to_thread(self._adapted.remove, adapter)

    async def pause(self) -> None:
        """Stop generation for a while; requests in flight keep their place."""
        async with self._loading:
            self._is_held = True
            await self._stop_steps()

    async def resume(self) -> None:
        """Continue generation."""
        self._is_held = False
        self._go_on()

    async def sleep(self, *, keep_weights: bool) -> None:
        """Stop. On a GPU, drop the keys and keep the weights in the host's memory, always."""
        async with self._loading:
            self.is_asleep = True
            await self._stop_steps()
            if self._device.type == "cuda":
                async with self._model_lock:
                    self._drop_keys()
                    await to_the_end(asyncio.to_thread(move_model, self._model, "cpu"))

    async def wake(self) -> None:
        """Continue, with the weights on the device again."""
        if self._device.type == "cuda":
            async with self._model_lock:
                await to_the_end(asyncio.to_thread(move_model, self._model, self._device))
        self.is_asleep = False
        self._go_on()

    async def _stop_steps(self) -> None:
        self._may_run.clear()
        # A step that was under way ends first.
        async with self._model_lock:
            pass

    def _go_on(self) -> None:
        if not (self._is_held or self.is_asleep):
            self._may_run.set()

    async def close(self) -> None:
        """Stop decoding; waiting requests end as unavailable."""
        self._runner.cancel()
        await asyncio.gather(self._runner, return_exceptions=True)
        self._is_drained.set()
        self._fail_all(engine_stopped())

    async def _run(self) -> None:
        while True:
            await self._has_work.wait()
            await self._may_run.wait()
            async with self._model_lock:
                if self._may_run.is_set():
                    await self._decode_step()
            if not self._may_admit.is_set() and all(row.is_over for row in self._running):
                self._is_drained.set()
                await self._may_admit.wait()
            if not self._running and not self._waiting:
                self._has_work.clear()

    async def _decode_step(self) -> None:
        """Sample one token for every running row, and the first for as many new rows as fit."""
        self._drop_ended()
        old, new = self._running, self._take_waiting()
        self._running = old + new
        try:
            await asyncio.to_thread(self._advance, old, new)
        except Exception:
            logger.exception("a decoding step failed")
            self._fail_running(engine_died())
            return
        for row in self._running:
            row.deliver()

    def _take_waiting(self) -> list[BatchRow]:
        """Return as many new rows as fit; while more wait, at least a quarter of all places.

        An admission costs a pass of the model, whether it adds one row or many.
        """
        admitted: list[BatchRow] = []
        num_free = self._max_num_seqs - len(self._running)
        num_worthwhile = min(len(self._waiting), max(1, self._max_num_seqs // _ADMIT_SHARE))
        if not self._may_admit.is_set() or num_free < num_worthwhile:
            return admitted
        while self._waiting and len(admitted) < num_free:
            row = self._waiting.popleft()
            if not row.is_over:
                row.note_admission()
                admitted.append(row)
        return admitted

    def _drop_ended(self) -> None:
        """Drop the rows that have ended."""
        kept = self._batch.keep([i for i, row in enumerate(self._running) if not row.is_over])
        self._running = [self._running[i] for i in kept]

    @torch.inference_mode()
    def _advance(self, old: list[BatchRow], new: list[BatchRow]) -> None:
        logits = []
        if old:
            last = [row.ids[-1] for row in old]
            with self._adapted.rows_of([row.adapter for row in old]):
                logits.append(self._batch.step(last, [len(row.ids) - 1 for row in old]))
            self._note_experts(old, 1)
        if new:
            firsts, which = distinct(new)
            with self._adapted.rows_of([row.adapter for row in firsts]):
                logits.append(self._batch.admit([row.ids for row in firsts], which))
            self._note_experts(new)
        if not logits:
            return
        rows = old + new
        sampling = [row.sampling for row in rows]
        logprobs = processed_logprobs(torch.cat(logits), sampling, [row.ids for row in rows])
        tokens = sample_rows(logprobs, sampling, [row.generator for row in rows])
        chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
        tops = likeliest(logprobs, sampling)
        for row, token, logprob, top in zip(
            rows, tokens.tolist(), chosen.tolist(), tops, strict=True
        ):
            row.append(token, logprob, self.policy_version, decode=self._tokenizer.decode, top=top)

    def _note_experts(self, rows: list[BatchRow], num_tokens: int | None = None) -> None:
        """Note what the last pass chose for the last tokens of each row, or for all of them."""
        if self._batch.experts is None:
            return
        for row, experts in zip(rows, self._batch.experts.cpu().numpy(), strict=True):
            row.note_experts(experts[: num_tokens or len(row.ids)])

    def _fail_all(self, error: Exception) -> None:
        self._running += self._waiting
        self._waiting.clear()
        self._fail_running(error)

    def _fail_running(self, error: Exception) -> None:
        for row in self._running:
            row.fail(error)
        self._running = []
        self._batch.clear()


def require_cuda(device: str) -> None:
    """Raise InvalidConfig (NEEDS_CUDA) where the engine's device is missing."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig(
            "The engine's device is cuda, and this machine has no CUDA device.",
            reason=Reason.NEEDS_CUDA,
            remedy='Set device = "cpu" in [inference], or run where there is one.',
        )


def move_model(model: Any, device: torch.device | str) -> None:
    """Move all weights; what they leave on a GPU goes back to the driver, for other processes."""
    model.to(device)
    gc.collect()
    torch.cuda.empty_cache()


def load_model(model_dir: Path, dtype: torch.dtype, *, device: str = "cpu") -> Any:
    """Return the model of a directory, in evaluation mode; float32 products are exact."""
    if device == "cuda":
        torch.set_float32_matmul_precision("highest")  # no TF32
        torch.backends.cudnn.allow_tf32 = False
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, local_files_only=True)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(DECODING_ATTENTION)
    return model.to(device).eval().requires_grad_(False)


@torch.inference_mode()
def score(model: AdaptedModel, token_ids: list[int], adapter: Adapter | None) -> torch.Tensor:
    """Return the log-probs, float32 [L - 1], of given ids from position 1 on."""
    with model.rows_of([adapter]):
        ids = torch.tensor([token_ids], device=model.device)
        output = model(input_ids=ids, use_cache=False)
    logits = output.logits[0, :-1]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0]


@torch.inference_mode()
def copy_weights(model: Any, tensors: dict[str, torch.Tensor], *, tied: bool) -> None:
    """Replace all weights in place, under the names of a checkpoint, and compare each afterwards.

    Raises InternalError when the names are not the model's, and DataLost (WEIGHTS_DIFFER) where the
    model does not hold what was given.
    """
    if tied:
        tensors.pop(HEAD, None)
    own = from_checkpoint(model, tensors)
    outcome = model.load_state_dict(own, strict=False)
    missing = set(outcome.missing_keys) - ({HEAD} if tied else set())
    if missing or outcome.unexpected_keys:
        raise InternalError("The model's parameter names are not those of its files.")
    held = model.state_dict()
    for name, tensor in own.items():
        if not torch.equal(held[name], tensor.to(held[name])):
            raise DataLost(
                f"After a load, {name} is not what was published.",
                reason=Reason.WEIGHTS_DIFFER,
                remedy="Publish again. If it happens again, restart the replica.",
            )


def add_to_base(base: BaseWeights, adapter: PolicyAdapter) -> dict[str, torch.Tensor]:
    """Return the base weights with an adapter added."""
    return dict(base.with_adapter(load_file(adapter.path), scaling=adapter.scaling))
