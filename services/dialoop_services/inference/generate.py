"""Answer one question: render its messages, sample, read the tokens back as a message.

policy = EnginePolicy(engine, Renderer.of(model_dir))       # a `dialoop.episode.Policy`
(sample,) = await policy.generate(history)

The service answers by the same function, with a replica in place of the engine.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dialoop.chat import as_history
from dialoop.episode import Sample, UpdateMode
from dialoop.rollout import sampling_of_turn
from dialoop.trajectory import SamplingParams
from dialoop_learning.rl.routed_experts import COLUMN, Routing, experts_column

from dialoop_services.inference.answer_ends import sample_with
from dialoop_services.inference.engine import Engine, Sampled, SupportsRoutedExperts
from dialoop_services.inference.partial_answer import Sampler, go_on
from dialoop_services.inference.rendering import GenerationRequest, RawPrompt, Renderer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dialoop.answers import AnswerForm
    from dialoop.chat import Messages, ToolDefinition
    from dialoop.sequences import Ids, Sequence
    from dialoop.tokens.builder import Prompt


async def generate(
    request: GenerationRequest,
    sample: Sampler,
    *,
    renderer: Renderer,
    max_model_len: int,
    routing: Routing | None = None,
) -> tuple[Sample, ...]:
    """Answer `request` with `request.num_samples` samples.

    routing: what the engine's routers choose from, if it records that.
    """
    started, room = time.perf_counter(), request.sampling.max_new_tokens or 0
    if request.context is not None:  # columns of the tokens before are with the caller
        request = replace(request, context=replace(request.context, columns={}))

    def prepare() -> tuple[Prompt | RawPrompt, AnswerForm]:
        prompt = renderer.prompt(request, room=room, max_model_len=max_model_len)
        return prompt, renderer.answer_form(
            prompt, template_name=request.template_name, offers_tools=bool(request.tools)
        )

    prompt, form = await renderer.run_with(request.template_name, prepare, is_long=request.is_long)
    prompt_ids = prompt.sequence.token_ids.tolist()
    sampling = sampling_of_turn(request.sampling, request.turn)
    named = "" if request.history is None else request.template_name
    stop = await renderer.find_stop_tokens(
        sampling.stop, form, in_reasoning=sampling.stop_in_reasoning, template_name=named
    )
    if request.partial_answer is None:
        sampled = await sample(prompt_ids, sampling, stop=stop, num_samples=request.num_samples)
    else:
        decode = renderer.tokenizer.decode
        part = request.partial_answer
        answer = await go_on(part, sample, prompt_ids, sampling, stop=stop, decode=decode)
        sampled = (answer,)
    samples = [renderer.sample(prompt, output, template_name=named) for output in sampled]
    if routing is not None:
        samples = [
            _with_experts(sample, output, routing, num_tokens=len(prompt_ids))
            for sample, output in zip(samples, sampled, strict=True)
        ]
    num_cut = prompt.num_truncated_tokens if isinstance(prompt, RawPrompt) else 0
    generate_s = time.perf_counter() - started
    return tuple(
        replace(
            answer,
            sampling=request.sampling,
            tokenizer_digest=renderer.tokenizer.digest,
            template_digest=renderer.template_named(request.template_name).digest,
            generate_s=generate_s,
            queue_s=max(output.queue_s for output in sampled),
            update_mode=_update_mode_of(sampled),
            num_truncated_tokens=num_cut,
            prompt_id=_prompt_id_of(prompt.sequence.token_ids),
            sample_index=index,
            warnings=_warnings_of(request),
        )
        for index, answer in enumerate(samples)
    )


def with_defaults(sampling: SamplingParams, *, max_new_tokens: int) -> SamplingParams:
    """Return the sampling with temperature 1 and this limit where it leaves them open."""
    return replace(
        sampling,
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        max_new_tokens=sampling.max_new_tokens or max_new_tokens,
    )


class EnginePolicy:
    """An engine in this process as a policy, for `dialoop.rollout` and notebooks."""

    def __init__(self, engine: Engine, renderer: Renderer, *, max_new_tokens: int = 256) -> None:
        self._engine = engine
        self._renderer = renderer
        self._max_new_tokens = max_new_tokens

    async def generate(  # noqa: PLR0913 - a policy's question
        self,
        history: Messages,
        *,
        context: Sequence | None = None,
        num_context_messages: int = 0,
        sampling: SamplingParams | None = None,
        turn: int = 0,
        num_samples: int = 1,
        tools: Iterable[ToolDefinition] = (),
    ) -> tuple[Sample, ...]:
        """Answer the prompt `num_samples` times."""
        sampling = sampling or SamplingParams()
        request = GenerationRequest(
            history=as_history(history),
            context=context,
            num_context_messages=num_context_messages,
            turn=turn,
            tools=tuple(tools),
            sampling=with_defaults(sampling, max_new_tokens=self._max_new_tokens),
            num_samples=num_samples,
        )
        engine = self._engine
        return await generate(
            request,
            partial(sample_with, engine),
            renderer=self._renderer,
            max_model_len=engine.max_model_len,
            routing=routing_of(engine),
        )


def routing_of(engine: Engine) -> Routing | None:
    """Return what the engine's routers choose from, if it records that."""
    return engine.routing if isinstance(engine, SupportsRoutedExperts) else None


def _with_experts(sample: Sample, output: Sampled, routing: Routing, *, num_tokens: int) -> Sample:
    """Return the sample with the experts of its tokens, which follow the context's.

    num_tokens: of the whole prompt.
    """
    sequence = sample.sequence
    total = num_tokens + len(output.token_ids)
    column = experts_column(routing, output.routed_experts, total)
    own = replace(column, values=column.values[total - len(sequence) :])
    return replace(sample, sequence=replace(sequence, columns={**sequence.columns, COLUMN: own}))


def _prompt_id_of(token_ids: Ids) -> str:
    """Digest prompt tokens int32 [L]."""
    return hashlib.blake2b(token_ids.tobytes(), digest_size=8).hexdigest()


def _update_mode_of(sampled: Iterable[Sampled]) -> UpdateMode:
    """Return how weight loads treated the samples of an answer; KEEP_KV if one kept old keys."""
    modes = {output.update_mode for output in sampled}
    return next((m for m in (UpdateMode.KEEP_KV, UpdateMode.WAIT) if m in modes), min(modes))


def _warnings_of(request: GenerationRequest) -> tuple[str, ...]:
    """Return a sentence for each field of the request that has no effect."""
    warnings = []
    if request.history is None:
        unused = ("template_name", "tools", "template_options")
        warnings += [
            f"{name} is not used: the prompt is continued as it stands."
            for name in unused
            if getattr(request, name)
        ]
    else:
        if request.truncate_prompt:
            warnings.append("truncate_prompt is not used: a history is never cut.")
        if request.skip_special_tokens:
            warnings.append("skip_special_tokens is not used: a content is all that was sampled.")
    sampling = request.sampling
    if sampling.temperature == 0 and (sampling.truncates or sampling.seed is not None):
        warnings.append("top_p, top_k, min_p and seed are not used: temperature 0 is greedy.")
    return tuple(warnings)
