"""InferenceClient: samples and log-probs of the policy, and its weights, in domain types."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from collections.abc import Sequence as AnySequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

from dialoop.chat import ChatHistory, History, Messages, ToolDefinition
from dialoop.clients.channel import Channel, rpc_of, tell_warnings
from dialoop.clients.errors import require_count
from dialoop.clients.inference_messages import (
    Question,
    samples_from_proto,
    top_logprobs_from_proto,
)
from dialoop.clients.weights import LOADED, Content, weights_requests
from dialoop.clients.weights import LoadedWeights as LoadedWeights
from dialoop.clients.weights import Probe as Probe
from dialoop.clients.weights import WeightsKind as WeightsKind
from dialoop.clients.weights import WeightsManifest as WeightsManifest
from dialoop.episode import Sample
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.sequences import Floats, PolicyVersion, Sequence
from dialoop.trajectory import SamplingParams
from dialoop.v1 import inference_service_pb2 as pb
from dialoop.wire.codec import Codec, FieldRow, submessage
from dialoop.wire.messages import CHAT_HISTORY, logprobs_from_proto, token_ids_to_proto
from dialoop.wire.sequences import POLICY_VERSION, sequence_from_proto


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleChunk:
    """Some tokens of a running generation; `samples` is filled on the last chunk only."""

    token_ids: tuple[int, ...]
    inference_logprobs: tuple[float, ...]
    policy_version: PolicyVersion | None
    text: str
    samples: tuple[Sample, ...] = ()
    top_logprobs: tuple[Mapping[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLogProbs(AnySequence["Floats"]):
    """Log-probs in nats, float32 [L - 1] per row: of the tokens from position 1 on.

    It is a sequence of these rows, from the inference service and from the scorer alike.
    `sequences` is what was scored, where the service made the tokens. `policy_version` is None for
    the scorer's reference model, which has none.
    """

    logprobs: tuple[Floats, ...]
    policy_version: PolicyVersion | None = None
    sequences: tuple[Sequence, ...] = ()
    model_digest: str = ""

    def __len__(self) -> int:
        return len(self.logprobs)

    @overload
    def __getitem__(self, index: int) -> Floats: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Floats, ...]: ...
    def __getitem__(self, index: int | slice) -> Floats | tuple[Floats, ...]:
        return self.logprobs[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    """What an inference replica serves, and how busy it is."""

    policy_version: PolicyVersion | None = None
    engine: str
    engine_version: str
    tokenizer_digest: str
    template_digest: str
    max_model_len: int
    ready: bool
    reason: str
    num_sampled_tokens: int
    num_requests_running: int
    num_parameters: int
    adapters: dict[str, PolicyVersion] = field(default_factory=dict)
    data_planes: tuple[str, ...] = ()
    model_digest: str = ""


_VERSION = submessage(POLICY_VERSION)
_ADAPTERS = FieldRow(
    lambda adapters: [
        pb.AdapterInfo(name=name, policy_version=POLICY_VERSION.to_proto(version))
        for name, version in sorted(adapters.items())
    ],
    lambda rows: {row.name: POLICY_VERSION.from_proto(row.policy_version) for row in rows},
)
POLICY_STATUS = Codec(
    PolicyStatus, pb.GetPolicyResponse, policy_version=_VERSION, adapters=_ADAPTERS
)

_rpc = partial(rpc_of, pb, "InferenceService")
# A sample whose answer was lost was never used, so sampling again does no harm. The service ends
# what takes too long; only it knows when a request has left its queue.
GENERATE = _rpc("Generate", is_retried=True, deadline_s=math.inf)
GENERATE_STREAM = _rpc("GenerateStream")
LOG_PROB = _rpc("LogProb", is_retried=True, deadline_s=600.0)
GET_POLICY = _rpc("GetPolicy", is_retried=True)
LOAD_WEIGHTS = _rpc("LoadWeights", deadline_s=600.0)
UNLOAD_ADAPTER = _rpc("UnloadAdapter", is_retried=True)
PAUSE = _rpc("Pause", is_retried=True)
RESUME = _rpc("Resume", is_retried=True)
SLEEP = _rpc("Sleep")
WAKE = _rpc("Wake")

_DRAIN_S = 30.0  # the service's default
_ANSWER_S = 30.0


class InferenceClient:
    """Asks one inference replica; satisfies `dialoop.episode.Policy`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def generate(  # noqa: PLR0913  # one question, many ways to ask it
        self,
        history: Messages | None = None,
        *,
        text: str | None = None,
        token_ids: Iterable[int] | None = None,
        context: Sequence | None = None,
        num_context_messages: int = 0,
        sampling: SamplingParams | None = None,
        turn: int = 0,
        num_samples: int = 1,
        adapter: str = "",
        template_name: str = "",
        tools: Iterable[ToolDefinition | Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        truncate_prompt: bool = False,
        skip_special_tokens: bool = False,
        add_special_tokens: bool = True,
        deadline_s: float | None = None,
    ) -> tuple[Sample, ...]:
        """Answer a history, or continue a text or token ids, `num_samples` times.

        A history may be given as chat dicts, or as what one user says: `generate("What is 3+4?")`.
        `context` are the tokens known so far of the first `num_context_messages` messages. The
        template's name, tools and options say how a history is rendered. With `truncate_prompt` a
        text or token prompt that fills the context loses its oldest tokens, and the sample says so;
        with `skip_special_tokens` its response's text leaves special tokens out. A text gets what
        the tokenizer puts before one, mostly a BOS, unless it begins so or `add_special_tokens` is
        false.
        The replica ends an answer that takes too long for its max_new_tokens (ANSWER_TIMED_OUT);
        `deadline_s` limits the whole call, the wait in the replica's queue included. Raises
        InternalError for another number of samples than asked for.
        """
        question = Question(
            history=history,
            text=text,
            token_ids=token_ids,
            context=context,
            num_context_messages=num_context_messages,
            sampling=sampling,
            turn=turn,
            num_samples=num_samples,
            adapter=adapter,
            template_name=template_name,
            tools=tools,
            template_options=template_options or {},
            truncate_prompt=truncate_prompt,
            skip_special_tokens=skip_special_tokens,
            add_special_tokens=add_special_tokens,
        )
        answer = await self._channel.call(GENERATE, question.to_proto(), deadline_s=deadline_s)
        require_count(len(answer.samples), num_samples, "samples")
        return samples_from_proto(answer)

    async def generate_stream(  # noqa: PLR0913
        self,
        history: Messages | None = None,
        *,
        text: str | None = None,
        token_ids: Iterable[int] | None = None,
        context: Sequence | None = None,
        num_context_messages: int = 0,
        sampling: SamplingParams | None = None,
        turn: int = 0,
        adapter: str = "",
        template_name: str = "",
        tools: Iterable[ToolDefinition | Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        truncate_prompt: bool = False,
        skip_special_tokens: bool = False,
        add_special_tokens: bool = True,
        partial_answer: Sequence | None = None,
        chunk_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> AsyncIterator[SampleChunk]:
        """Generate as `generate` does; yield tokens as they come, and last the whole sample.

        With `chunk_tokens` the tokens come so many at a time. The answer goes on after what another
        replica sampled of it, `partial_answer`: the sample holds both, the chunks the new tokens.
        """
        question = Question(
            history=history,
            text=text,
            token_ids=token_ids,
            context=context,
            num_context_messages=num_context_messages,
            sampling=sampling,
            turn=turn,
            adapter=adapter,
            template_name=template_name,
            tools=tools,
            template_options=template_options or {},
            truncate_prompt=truncate_prompt,
            skip_special_tokens=skip_special_tokens,
            add_special_tokens=add_special_tokens,
            partial_answer=partial_answer,
        )
        request = pb.GenerateStreamRequest(request=question.to_proto(), chunk_tokens=chunk_tokens)
        answers = self._channel.stream(GENERATE_STREAM, request, deadline_s=deadline_s)
        async with aclosing(answers):
            async for answer in answers:
                tell_warnings(answer.completed)
                yield SampleChunk(
                    token_ids=tuple(answer.token_ids),
                    inference_logprobs=tuple(answer.inference_logprobs),
                    policy_version=POLICY_VERSION.from_proto(answer.policy_version)
                    if answer.HasField("policy_version")
                    else None,
                    text=answer.text,
                    samples=samples_from_proto(answer.completed)
                    if answer.HasField("completed")
                    else (),
                    top_logprobs=top_logprobs_from_proto(answer.top_logprobs),
                )

    async def logprobs(
        self, rows: Iterable[Iterable[int]], *, adapter: str = "", deadline_s: float | None = None
    ) -> PolicyLogProbs:
        """Return log-probs of token ids under the loaded policy."""
        request = pb.LogProbRequest(token_ids=token_ids_to_proto(rows), adapter=adapter)
        return await self._logprobs(request, deadline_s)

    async def logprobs_of(
        self,
        *,
        histories: Iterable[History] = (),
        texts: Iterable[str] = (),
        adapter: str = "",
        deadline_s: float | None = None,
    ) -> PolicyLogProbs:
        """Return log-probs of conversations or texts; `sequences` are the tokens scored."""
        request = pb.LogProbRequest(
            histories=[CHAT_HISTORY.to_proto(ChatHistory(full=history)) for history in histories],
            texts=list(texts),
            adapter=adapter,
        )
        return await self._logprobs(request, deadline_s)

    async def _logprobs(
        self, request: pb.LogProbRequest, deadline_s: float | None
    ) -> PolicyLogProbs:
        answer = await self._channel.call(LOG_PROB, request, deadline_s=deadline_s)
        return PolicyLogProbs(
            logprobs=logprobs_from_proto(answer.logprobs),
            policy_version=POLICY_VERSION.from_proto(answer.policy_version),
            sequences=tuple(sequence_from_proto(row) for row in answer.sequences),
            model_digest=answer.model_digest,
        )

    async def get_policy(self) -> PolicyStatus:
        """Return which policy the replica serves and whether it is ready."""
        return POLICY_STATUS.from_proto(await self._channel.call(GET_POLICY, pb.GetPolicyRequest()))

    async def load_weights(
        self,
        manifest: WeightsManifest,
        contents: AsyncIterable[Content] | Iterable[Content] = (),
        *,
        deadline_s: float | None = None,
    ) -> LoadedWeights:
        """Load a published policy: from `manifest.path`, or from chunks when that is empty.

        Over the manifest's data plane (nccl, ipc) the contents are the steps that control it.
        """
        requests = weights_requests(manifest, contents)
        answer = await self._channel.upload(LOAD_WEIGHTS, requests, deadline_s=deadline_s)
        return LOADED.from_proto(answer)

    async def load_adapter(
        self,
        manifest: WeightsManifest,
        chunks: AsyncIterable[bytes] | Iterable[bytes] = (),
        *,
        deadline_s: float | None = None,
    ) -> LoadedWeights:
        """Load or swap the LoRA adapter that the manifest names; the policy is not touched."""
        if not manifest.adapter:
            raise InvalidInput(
                "The manifest names no adapter.",
                reason=Reason.INVALID_ADAPTER_NAME,
                remedy="Set its adapter, or call load_weights.",
            )
        return await self.load_weights(manifest, chunks, deadline_s=deadline_s)

    async def unload_adapter(self, name: str) -> bool:
        """Unload an adapter; return False where there was none."""
        request = pb.UnloadAdapterRequest(adapter=name)
        return bool((await self._channel.call(UNLOAD_ADAPTER, request)).unloaded)

    async def pause(self) -> None:
        """Stop sampling; requests in flight keep their place."""
        await self._channel.call(PAUSE, pb.PauseRequest())

    async def resume(self) -> None:
        """Resume sampling."""
        await self._channel.call(RESUME, pb.ResumeRequest())

    async def sleep(self, *, drain_s: float = 0.0, deadline_s: float | None = None) -> None:
        """Make the replica give its device to the trainer; requests under way end first.

        Requests that are not done within `drain_s` seconds (0 means 30) end and must be sent again.
        The default deadline is 30 s later.
        """
        if deadline_s is None:
            deadline_s = (drain_s or _DRAIN_S) + _ANSWER_S
        await self._channel.call(SLEEP, pb.SleepRequest(drain_s=drain_s), deadline_s=deadline_s)

    async def wake(self) -> None:
        """Make the replica take its device again; Unavailable (ASLEEP) while the trainer has it."""
        await self._channel.call(WAKE, pb.WakeRequest())
