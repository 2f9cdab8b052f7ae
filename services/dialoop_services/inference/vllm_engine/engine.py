"""vLLM's AsyncLLM as an engine, in this process.

Versions are exact because vLLM labels every token inside its engine core, at the step that sampled
it, with the version committed there; tokens that are still on their way here when a load begins
keep their label. A load commits only while the core is paused with all keys dropped, so no step
straddles two versions.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from dialoop.episode import UpdateMode
from dialoop.errors import InternalError, InvalidConfig, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import SamplingParams, StopReason
from dialoop_learning.lora.base_weights import BaseWeights
from dialoop_learning.model.weight_files import is_tied, model_shapes
from pydantic import ValidationError
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from dialoop_services.config.engines import has_experts
from dialoop_services.inference.answer_ends import first_end, first_spans, sample_each
from dialoop_services.inference.engine import (
    BASE_VERSION,
    EngineOptions,
    LoadTimes,
    OnBegin,
    OnTokens,
    Sampled,
    Scored,
    StopTokens,
    TokenChunk,
    TopLogprobs,
    VersionSpan,
    context_full,
    engine_died,
    engine_stopped,
    require_fit,
    require_ids,
    require_sampling,
    room_for,
)
from dialoop_services.inference.vllm_engine import internals
from dialoop_services.inference.vllm_engine.adapters import (
    add_to_vllm,
    lora_request,
    remove_from_vllm,
)
from dialoop_services.inference.vllm_engine.constraints import unfit_constraint
from dialoop_services.inference.vllm_engine.options import (
    engine_args,
    frees_memory_asleep,
    vllm_params,
)
from dialoop_services.inference.vllm_engine.orphans import OWNER_VARIABLE
from dialoop_services.inference.vllm_engine.outputs import (
    chunks_of,
    label_of,
    logprobs_of,
    queued_s,
    sampled_of,
    spans_of,
    stop_reason_of,
    stop_string_of,
    version_of,
)
from dialoop_services.inference.vllm_engine.sleep import Sleep
from dialoop_services.inference.vllm_engine.transfer import TransferReceiver, in_workers
from dialoop_services.inference.weights.adapter_files import AdapterSpace
from dialoop_services.inference.weights.loadable import Adapter, PolicyAdapter, Step
from dialoop_services.inference.weights.parameters import require_same_parameters

_SHUTDOWN_S = 1.0
_LOOK_FOR_BEGIN_S = 0.5


class VllmEngine:
    """An engine on vLLM."""

    name = "vllm"
    tells_begin = True
    constrains_answers = True
    gives_top_logprobs = True
    watches_answers = True
    version = str(vllm.__version__)

    def __init__(self, llm: AsyncLLM, *, model_dir: Path, options: EngineOptions) -> None:
        self._llm = llm
        self._shapes = model_shapes(model_dir)
        self._tied = is_tied(model_dir)
        self.base_weights = BaseWeights.of(model_dir)
        self.policy_version = BASE_VERSION
        """The version of the weights loaded now."""
        self._control = asyncio.Lock()
        self._is_held = False
        self._sleep = Sleep(
            llm, lock=options.device_lock, frees_memory=frees_memory_asleep(options)
        )
        self.max_model_len = options.max_model_len
        self.transfer_backend = options.weight_transfer
        self._receiver = TransferReceiver(
            llm, backend=options.weight_transfer, shapes=self._shapes, tied=self._tied
        )
        self.vocab_size = int(llm.model_config.get_vocab_size())
        self.adapter_space = AdapterSpace(limits=options.adapters, shapes=self._shapes)
        model_config = json.loads((model_dir / "config.json").read_text("utf-8"))
        self._keeps_experts = has_experts(model_config) and not torch.cuda.is_available()

    @classmethod
    async def start(cls, model_dir: Path, options: EngineOptions) -> VllmEngine:
        """Build the engine core (its own process) and wait until it answers."""
        internals.check_version()
        await asyncio.to_thread(is_tied, model_dir)  # raises where vLLM would load other weights
        args = await asyncio.to_thread(engine_args, model_dir, options)
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        try:
            llm = internals.launch(args, may_fork=options.may_fork)
        except ValidationError as error:  # of vLLM's config, before anything is loaded
            first = error.errors(include_url=False)[0]
            what = (
                f"{'.'.join(map(str, first['loc']))} = {first['input']!r}, " if first["loc"] else ""
            )
            raise InvalidConfig(
                f"vLLM refuses its options: {what}{first['msg']}.",
                reason=Reason.ENGINE_FAILED,
                remedy="Correct [inference.engine], or DIALOOP_INFERENCE_ENGINE_OPTIONS.",
            ) from error
        except Exception as error:
            raise InvalidConfig(
                f"vLLM does not start with {model_dir} ({type(error).__name__}).",
                reason=Reason.ENGINE_FAILED,
                remedy="See vLLM's own lines above, or set DIALOOP_INFERENCE_ENGINE=transformers.",
            ) from error
        engine = cls(llm, model_dir=model_dir, options=options)
        await engine._sleep.hold_device()
        await llm.update_weight_version(label_of(BASE_VERSION))
        return engine

    @property
    def is_alive(self) -> bool:
        """Return whether the engine can still answer."""
        return not (self._llm.errored or self._sleep.is_broken)

    @property
    def num_running(self) -> int:
        """Return the number of samples that wait or decode."""
        return int(self._llm.get_num_unfinished_requests())

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stop: StopTokens,
        num_samples: int = 1,
        adapter: Adapter | None = None,
        on_begin: OnBegin | None = None,
    ) -> tuple[Sampled, ...]:
        """Continue `prompt_ids` `num_samples` times."""
        if stop.watch is not None:  # vLLM ends no single one of the samples of a request
            options: dict[str, Any] = {"adapter": adapter, "on_begin": on_begin}

            def one(own: SamplingParams) -> Awaitable[Sampled]:
                return self.stream(prompt_ids, own, stop=stop, on_tokens=_ignore, **options)

            return await sample_each(one, sampling, num_samples)
        params = self._params(prompt_ids, sampling, stop=stop)
        if params is None:
            return context_full(num_samples)
        params.n = num_samples
        final = await self._last_output(prompt_ids, params, adapter, on_begin)
        queue_s, num_cached = queued_s(final), final.num_cached_tokens or 0
        return tuple(
            replace(
                sampled_of(output, stop, queue_s=queue_s, num_top=sampling.top_logprobs),
                num_cached_tokens=num_cached,
            )
            for output in final.outputs
        )

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
        params = self._params(prompt_ids, sampling, stop=stop)
        if params is None:
            return context_full(1)[0]
        params.output_kind = RequestOutputKind.DELTA
        request_id = uuid.uuid4().hex
        ids: list[int] = []
        logprobs: list[float] = []
        tops: list[TopLogprobs] = []
        watch, end = stop.watch and stop.watch(), None
        generating = self._outputs(request_id, prompt_ids, params, adapter, on_begin)
        async with aclosing(generating) as outputs:
            async for output in outputs:
                completion = output.outputs[0]
                start, sampled = len(ids), completion.token_ids
                end = first_end(watch, sampled) if watch else None
                count = len(sampled) if end is None else end.num_tokens
                ids.extend(sampled[:count])
                values, top = logprobs_of(completion.logprobs, sampling.top_logprobs)
                logprobs.extend(values[:count])
                tops.extend(top[:count])
                spans = self._spans_so_far(request_id, completion, num_tokens=len(ids))
                spans = first_spans(spans, len(ids))
                for chunk in chunks_of(ids, logprobs, spans, start=start, tops=tops):
                    on_tokens(chunk)
                if end is not None:
                    break  # vLLM aborts what nobody waits for
        return Sampled(
            token_ids=tuple(ids),
            logprobs=tuple(logprobs),
            top_logprobs=tuple(tops),
            versions=spans,
            stop_reason=stop_reason_of(completion) if end is None else StopReason.STOP,
            stop_string=stop_string_of(completion, stop) if end is None else end.stop_string,
            queue_s=queued_s(output),
            num_cached_tokens=output.num_cached_tokens or 0,
        )

    def _params(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, stop: StopTokens
    ) -> vllm.SamplingParams | None:
        """Return what to ask of vLLM; None when the prompt fills the context."""
        require_ids(prompt_ids, vocab_size=self.vocab_size)
        require_sampling(sampling, constrains=True, gives_top_logprobs=True)
        room = room_for(prompt_ids, sampling, self.max_model_len)
        return None if room <= 0 else vllm_params(sampling, stop=stop, room=room)

    async def logprobs(self, token_ids: Sequence[int], *, adapter: Adapter | None = None) -> Scored:
        """Score given ids; the one token that vLLM must sample with them carries the version."""
        require_ids(token_ids, vocab_size=self.vocab_size)
        require_fit(token_ids, self.max_model_len)
        params = vllm.SamplingParams(
            max_tokens=1, prompt_logprobs=0, logprobs=0, flat_logprobs=True, ignore_eos=True,
            detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        final = await self._last_output(token_ids, params, adapter)
        values = np.array(final.prompt_logprobs.logprobs, dtype=np.float32)
        if len(values) != len(token_ids) - 1:
            raise InternalError(f"vLLM gave {len(values)} log-probs for {len(token_ids)} tokens.")
        version = spans_of(final.outputs[0].weight_versions)[0].policy_version
        return Scored(logprobs=values, policy_version=version)

    async def load_weights(
        self, path: Path, version: PolicyVersion, *, mode: UpdateMode = UpdateMode.RECOMPUTE
    ) -> LoadTimes:
        """Pause, replace all weights and commit `version`; then continue by `mode`."""
        started_at = time.monotonic()
        await asyncio.to_thread(require_same_parameters, path, self._shapes, tied=self._tied)
        return await self._exchange(
            lambda: in_workers(self._llm, "dialoop_load_weights", str(path), self._tied),
            version,
            mode=mode,
            started_at=started_at,
        )

    async def load_onto_base(
        self,
        adapter: PolicyAdapter,
        version: PolicyVersion,
        *,
        mode: UpdateMode = UpdateMode.RECOMPUTE,
    ) -> LoadTimes:
        """Load the base weights plus the adapter, which each worker adds in as it loads."""
        base, started_at = self.base_weights, time.monotonic()
        arguments = list(map(str, base.files)), base.tied, str(adapter.path), adapter.scaling
        return await self._exchange(
            lambda: in_workers(self._llm, "dialoop_load_onto_base", *arguments),
            version,
            mode=mode,
            started_at=started_at,
        )

    async def transfer_weights(
        self,
        steps: AsyncIterator[Step],
        version: PolicyVersion,
        *,
        mode: UpdateMode = UpdateMode.RECOMPUTE,
    ) -> LoadTimes:
        """Load weights from the trainer's device by vLLM's own transfer."""
        started_at = time.monotonic()
        await self._receiver.meet(steps)
        return await self._exchange(
            lambda: self._receiver.receive(steps), version, mode=mode, started_at=started_at
        )

    async def _exchange(
        self,
        replace: Callable[[], Awaitable[None]],
        version: PolicyVersion,
        *,
        mode: UpdateMode,
        started_at: float,
    ) -> LoadTimes:
        if self._keeps_experts:
            raise PreconditionFailed(
                "vLLM on a CPU does not take new weights of experts.",
                reason=Reason.MODEL_NOT_PUBLISHABLE,
                remedy='Use engine = "transformers", or a GPU.',
            )
        async with self._control:
            await self._sleep.make_room_for_weights()
            try:
                if mode is UpdateMode.WAIT:
                    await internals.pause(self._llm, "wait", clear_cache=True)
                paused = time.monotonic()
                await internals.pause(self._llm, "keep", clear_cache=mode is not UpdateMode.KEEP_KV)
                await self._replace(replace, version)
            finally:
                await self._sleep.end()
                await self._go_on()
            ended = time.monotonic()
        return LoadTimes(pause_s=ended - paused, load_s=ended - started_at)

    async def _replace(
        self, replace: Callable[[], Awaitable[None]], version: PolicyVersion
    ) -> None:
        try:
            if not await self._llm.is_paused():
                raise InternalError("vLLM does not pause.")
            await replace()
            await self._llm.update_weight_version(label_of(version))
            if await self._llm.get_weight_version() != label_of(version):
                raise InternalError("vLLM did not take the version.")
        except BaseException:
            # Half-replaced weights must not sample one more token.
            await internals.pause(self._llm, "abort", clear_cache=True)
            raise
        self.policy_version = version

    async def add_adapter(self, adapter: Adapter) -> None:
        """Add an adapter while requests run."""
        await add_to_vllm(self._llm, adapter)

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Remove an adapter."""
        await remove_from_vllm(self._llm, adapter)

    async def pause(self) -> None:
        """Stop generation for a while; requests in flight keep their place."""
        async with self._control:
            await internals.pause(self._llm, "keep", clear_cache=False)
            self._is_held = True

    async def resume(self) -> None:
        """Continue generation."""
        async with self._control:
            self._is_held = False
            await self._go_on()

    async def _go_on(self) -> None:
        """Let the core run, unless it is paused or sleeps."""
        if self._sleep.is_asleep:
            return
        if self._is_held:
            # vLLM goes on by itself when it wakes.
            await internals.pause(self._llm, "keep", clear_cache=False)
        else:
            await self._llm.resume_generation()

    @property
    def is_asleep(self) -> bool:
        """Return whether the engine has given its device up."""
        return self._sleep.is_asleep

    async def sleep(self, *, keep_weights: bool) -> None:
        """Stop, and on CUDA free weights and keys; requests in flight are aborted."""
        async with self._control:
            await self._sleep.begin(keep_weights=keep_weights)

    async def wake(self) -> None:
        """Continue with the weights that were kept."""
        async with self._control:
            await self._sleep.wake()
            await self._go_on()

    async def close(self) -> None:
        """Stop the engine core's process."""
        # A CPU worker hangs at its end until it is killed, so waiting is useless.
        await asyncio.to_thread(self._llm.shutdown, timeout=_SHUTDOWN_S)

    async def _last_output(
        self,
        token_ids: Sequence[int],
        params: vllm.SamplingParams,
        adapter: Adapter | None,
        on_begin: OnBegin | None = None,
    ) -> Any:
        outputs = self._outputs(uuid.uuid4().hex, token_ids, params, adapter, on_begin)
        return [output async for output in outputs][-1]

    async def _outputs(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: Any,
        adapter: Adapter | None,
        on_begin: OnBegin | None,
    ) -> Any:
        # Salted, so that later requests do not use keys that a KEEP_KV load kept for running ones.
        prompt = tokens_input(list(token_ids), cache_salt=label_of(self.policy_version))
        had_died = self._llm.errored
        telling = on_begin and asyncio.create_task(self._tell_begin(request_id, on_begin))
        try:
            lora = lora_request(adapter) if adapter else None
            generating = self._llm.generate(prompt, params, request_id, lora_request=lora)
            async with aclosing(generating) as outputs:
                async for output in outputs:
                    yield output
        except EngineDeadError as error:
            raise (engine_stopped() if had_died else engine_died()) from error
        except EngineGenerateError as error:
            if self._llm.errored:
                raise engine_died() from error
            raise InternalError("vLLM failed in one request and goes on.") from error
        except VLLMValidationError as error:
            if params.structured_outputs is None:
                raise
            raise unfit_constraint() from error
        finally:
            if telling is not None:
                telling.cancel()

    async def _tell_begin(self, request_id: str, on_begin: OnBegin) -> None:
        """Call `on_begin` as samples of a request begin: vLLM says nothing before their end."""
        ids: set[str] = set()
        begun: set[str] = set()
        while not ids or begun < ids:
            await asyncio.sleep(_LOOK_FOR_BEGIN_S)
            ids |= internals.samples_of(self._llm, request_id)
            new = {sample for sample in ids - begun if internals.has_started(self._llm, sample)}
            if new:
                on_begin()
            begun |= new

    def _spans_so_far(
        self, request_id: str, completion: Any, *, num_tokens: int
    ) -> tuple[VersionSpan, ...]:
        """Return the spans of a running request; vLLM adds them to the last output only."""
        if completion.finish_reason is not None:
            return spans_of(completion.weight_versions)
        starts = internals.versions_so_far(self._llm, request_id)
        ends = [start for _, start in starts[1:]] + [num_tokens]
        return tuple(
            VersionSpan(start=start, length=end - start, policy_version=version_of(label))
            for (label, start), end in zip(starts, ends, strict=True)
        )


def _ignore(_: TokenChunk) -> None:
    """Do nothing with tokens of which nobody wants to hear before the end."""
