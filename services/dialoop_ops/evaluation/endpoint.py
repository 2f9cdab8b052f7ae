"""A policy behind any OpenAI-compatible endpoint, for evaluations.

    policy = EndpointPolicy("http://127.0.0.1:8000/v1", model="qwen")

Such an endpoint answers in text, so its samples have no tokens and no log-probs: they cannot be
trained. Where an environment ends answers at texts of its own, the endpoint is asked to leave them
in the answer (`include_stop_str_in_output`, which vLLM, SGLang and Dialoop know).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Self

from dialoop.chat import ChatHistory, History, ToolDefinition
from dialoop.episode import Sample
from dialoop.errors import InvalidConfig, Unavailable
from dialoop.messages import tool_for_template
from dialoop.reasons import Reason
from dialoop.sequences import Sequence, sequence_of
from dialoop.trajectory import SamplingParams, StopReason

_STOP_REASONS = {
    "stop": StopReason.STOP,
    "tool_calls": StopReason.STOP,
    "length": StopReason.LENGTH,
}


class EndpointPolicy:
    """Answers prompts through `POST /chat/completions`; close it, or use it with `async with`.

    Raises InvalidConfig (PACKAGE_MISSING) without the package openai.
    """

    def __init__(
        self, base_url: str, *, model: str, api_key: str = "", timeout_s: float = 600.0
    ) -> None:
        try:
            from openai import AsyncOpenAI
        except ImportError as error:
            raise InvalidConfig(
                "A policy behind an endpoint needs the package openai.",
                reason=Reason.PACKAGE_MISSING,
                remedy='Run: pip install "dialoop[endpoint]"',
            ) from error
        self._model = model
        # The library refuses an empty key, and an endpoint without keys reads none.
        self._client = AsyncOpenAI(
            base_url=base_url, api_key=api_key or "none", timeout=timeout_s, max_retries=3
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def generate(  # noqa: PLR0913 - a policy's question
        self,
        history: History,
        *,
        context: Sequence | None = None,
        num_context_messages: int = 0,
        sampling: SamplingParams | None = None,
        turn: int = 0,
        num_samples: int = 1,
        tools: Iterable[ToolDefinition] = (),
    ) -> tuple[Sample, ...]:
        """Answer the prompt `num_samples` times; Unavailable where the endpoint does not answer.

        The endpoint gets messages and tools alone, so `context` is not used.
        """
        from openai import APIError

        sampling = sampling or SamplingParams()
        shown = [tool_for_template(tool) for tool in tools]
        offer: dict[str, Any] = {"tools": shown} if shown else {}
        started = time.perf_counter()
        try:
            answer = await self._client.chat.completions.create(
                model=self._model,
                messages=history.to_chats(),  # type: ignore[arg-type]
                n=num_samples,
                **offer,
                **_request(sampling),
            )
        except APIError as error:
            raise Unavailable(
                f"The endpoint does not answer: {error.message}",
                reason=Reason.UNAVAILABLE,
                remedy="See that its address, model name and key are right.",
            ) from error
        seconds = time.perf_counter() - started
        return tuple(_sample(history, choice, sampling, seconds) for choice in answer.choices)


def _request(sampling: SamplingParams) -> dict[str, Any]:
    """Return the fields of a request; what is None is left to the endpoint."""
    if sampling.constraint or sampling.top_logprobs:
        raise InvalidConfig(
            "A policy behind an endpoint samples without constraint and top_logprobs.",
            reason=Reason.SAMPLING_UNSUPPORTED,
            remedy="Leave them out, or evaluate with an engine of Dialoop.",
        )
    fields = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop) or None,
        "seed": sampling.seed,
    }
    # Not of OpenAI's API, and known to vLLM, SGLang and Dialoop; the last one to Dialoop alone.
    extra = {
        "include_stop_str_in_output": True if sampling.stop else None,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_in_reasoning": sampling.stop_in_reasoning or None,
    }
    request = {name: value for name, value in fields.items() if value is not None}
    others = {name: value for name, value in extra.items() if value is not None}
    return request | ({"extra_body": others} if others else {})


def _sample(history: History, choice: Any, sampling: SamplingParams, seconds: float) -> Sample:
    (message,) = History.from_chats([choice.message.model_dump(exclude_none=True)])
    return Sample(
        history=ChatHistory(prompt=history).respond(message),
        sequence=sequence_of([]),
        stop_reason=_STOP_REASONS.get(choice.finish_reason, StopReason.STOP),
        sampling=sampling,
        generate_s=seconds,
    )
