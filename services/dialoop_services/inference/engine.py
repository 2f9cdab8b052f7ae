"""The protocol between the inference service and an engine.

    sampled = await engine.sample(prompt_ids, SamplingParams(max_new_tokens=24), stop=stop)
    sampled[0].token_ids     # (17, 9, 4, 262): the stop token is kept
    sampled[0].versions      # (VersionSpan(start=0, length=4, policy_version=main-7),)

The engine labels every sampled token with the version whose weights produced it. A full forward
pass under that version gives the same log-prob again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dialoop.episode import UpdateMode
from dialoop.errors import InvalidInput, Unavailable, Unsupported
from dialoop.reasons import Reason
from dialoop.sequences import Floats, PolicyVersion
from dialoop.trajectory import SamplingParams, StopReason

from dialoop_services.inference.weights.adapter_files import NO_ADAPTERS, AdapterLimits

if TYPE_CHECKING:
    from dialoop_learning.lora.base_weights import BaseWeights
    from dialoop_learning.rl.routed_experts import Routing
    from numpy.typing import NDArray

    from dialoop_services.inference.weights.adapter_files import AdapterSpace
    from dialoop_services.inference.weights.loadable import Adapter, PolicyAdapter, Step

BASE_VERSION = PolicyVersion(lineage="base", number=0)
"""The version of a model directory's own weights."""
OUTSIDE_VERSION = PolicyVersion(lineage="outside", number=0)
"""The version of weights that are on a server which Dialoop does not run."""

MIN_TEMPERATURE = 0.01
"""Below this vLLM would silently sample at another temperature; 0 is greedy."""
MIN_PENALTY, MAX_PENALTY = 0.01, 100.0
"""Outside these bounds a penalized logit may overflow, and the log-probs with it."""
_ROUNDING = 1e-6  # of 0.01 that came over the wire as the float32 next to it


TopLogprobs = Mapping[int, float]
"""The likeliest tokens at one position with their log-probs, the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Sampled tokens [start, start + length) come from one policy version."""

    start: int
    length: int
    policy_version: PolicyVersion


Watch = Callable[[int], str | None]
"""Takes an answer's tokens one by one; returns the stop string where the answer ends with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTokens:
    """What ends a message: single tokens, and strings that may span several.

    `by_id` gives each stopping token's string, empty for the end-of-turn token. watch: begins what
    finds the end of one answer where only its reader knows that; the strings are none then.
    """

    by_id: Mapping[int, str] = field(default_factory=dict)
    strings: tuple[str, ...] = ()
    watch: Callable[[], Watch] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One sample: ids and log-probs (nats, of the distribution sampled from), one per token.

    `top_logprobs` is one per token too where SamplingParams.top_logprobs asks for it, else empty.
    num_cached_tokens: tokens of the prompt whose keys the engine had already.
    routed_experts: [N, layers, k] of the first N tokens of prompt and sample, those that the engine
    computed, where SupportsRoutedExperts; the last token of a sample is not computed.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    stop_reason: StopReason
    stop_string: str = ""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    queue_s: float = 0.0
    num_cached_tokens: int = 0
    update_mode: UpdateMode = UpdateMode.RECOMPUTE
    routed_experts: NDArray[Any] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """A few new tokens of a running sample, all of one policy version."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: PolicyVersion
    top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Log-probs float32 [len - 1] of positions 1.. at temperature 1, and their version."""

    logprobs: Floats
    policy_version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """Seconds for which generation was paused, and seconds that the whole load took."""

    pause_s: float
    load_s: float


OnTokens = Callable[[TokenChunk], None]
OnBegin = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine is started with; an engine ignores options that mean nothing to it.

    max_model_len: tokens of a prompt and its sample. max_num_seqs: samples decoded together.
    kv_cache_bytes: memory for the keys and values of all samples. dtype: of the weights.
    device: "cpu" or "cuda", for an engine that is told where to compute.
    tensor_parallel_size: devices that share one model. num_threads: threads that compute on a CPU;
    0 for one on each core, absent for what suits the engine. seed: of samples whose request has
    none.
    weight_transfer: the backend that SupportsTransfer names; empty for none.
    records_experts: whether samples name the experts of each token, as SupportsRoutedExperts says.
    device_lock: the lock of a device that the engine shares with the trainer. may_fork: whether
    this process is the engine's own and has computed nothing yet, so that it can be forked.
    own: further options under the engine's own names, as [inference.engine] gives them.
    """

    max_model_len: int = 512
    max_num_seqs: int = 64
    kv_cache_bytes: int = 64 << 20
    dtype: str = "float32"
    device: str = "cpu"
    tensor_parallel_size: int = 1
    num_threads: int | None = None
    seed: int = 0
    adapters: AdapterLimits = NO_ADAPTERS
    weight_transfer: str = ""
    records_experts: bool = False
    device_lock: Path | None = None
    may_fork: bool = False
    own: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Engine(Protocol):
    """A policy that samples, scores and loads new weights: what every engine has.

    The config names its class. The class also needs a class method
    `async start(model_dir: Path, options: EngineOptions) -> Engine`.
    The `Supports...` protocols below are for what only some engines can do.
    """

    name: str
    version: str
    max_model_len: int
    vocab_size: int

    @property
    def policy_version(self) -> PolicyVersion:
        """Return the version of the weights loaded now."""

    @property
    def is_alive(self) -> bool:
        """Return whether the engine can still answer; one that died stays dead."""

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stop: StopTokens,
        num_samples: int = 1,
    ) -> tuple[Sampled, ...]:
        """Continue `prompt_ids` `num_samples` times."""

    async def logprobs(self, token_ids: Sequence[int]) -> Scored:
        """Score given ids under the loaded policy."""

    async def load_weights(
        self, path: Path, version: PolicyVersion, *, mode: UpdateMode = UpdateMode.RECOMPUTE
    ) -> LoadTimes:
        """Pause, replace all weights by those of the safetensors file `path`, and continue.

        Later tokens are labelled with `version`. `mode` says what happens to samples in flight:
        RECOMPUTE drops their keys, KEEP_KV keeps them, WAIT lets them end first. The service never
        calls a paused engine with WAIT.
        Raises PreconditionFailed (UNKNOWN_PARAMETERS) before anything is changed.
        """

    async def close(self) -> None:
        """Release threads, processes and memory."""


@runtime_checkable
class OutsideWeights(Protocol):
    """An engine whose weights are on a server that Dialoop does not run.

    It serves OUTSIDE_VERSION, and refuses `load_weights` with Unsupported before anything changes.
    What its server cannot do it refuses with Unsupported too, and never answers otherwise.
    """

    weights_are_outside: bool


@runtime_checkable
class SupportsStreaming(Protocol):
    """An engine that hands out tokens as it samples them."""

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stop: StopTokens,
        on_tokens: OnTokens,
    ) -> Sampled:
        """Continue `prompt_ids` once; call `on_tokens` with the tokens as they come."""


@runtime_checkable
class SupportsWatch(Protocol):
    """An engine whose `sample` and `stream` end where `StopTokens.watch` says.

    The samples of others are broken off, or cut when they are whole.
    """

    watches_answers: bool


@runtime_checkable
class SupportsBegin(Protocol):
    """An engine in which requests may wait, and which says when it begins one.

    Its `sample` and `stream` take `on_begin: OnBegin | None = None`, and call it on the event loop
    whenever a sample of the request leaves the wait. The time limit of an answer starts there; with
    an engine that does not say it, the limit counts the wait too.
    """

    tells_begin: bool


@runtime_checkable
class SupportsConstraints(Protocol):
    """An engine whose `sample` and `stream` hold an answer to `SamplingParams.constraint`.

    They raise InvalidInput (INVALID_CONSTRAINT) for one that the engine cannot follow. Log-probs
    are of the tokens that were allowed.
    """

    constrains_answers: bool


@runtime_checkable
class SupportsTopLogprobs(Protocol):
    """An engine whose samples name the likeliest tokens, as `SamplingParams.top_logprobs` says."""

    gives_top_logprobs: bool


@runtime_checkable
class SupportsRoutedExperts(Protocol):
    """An engine whose samples name the experts of each token that it computed.

    It does so where EngineOptions.records_experts asks for it, and raises InvalidConfig at its
    start where the model has no experts, or routers that it cannot read.
    """

    @property
    def routing(self) -> Routing | None:
        """Return what the routers choose from; None where nobody asked for a record."""


@runtime_checkable
class SupportsAdapters(Protocol):
    """An engine that serves LoRA adapters beside the policy.

    Its `sample`, `logprobs` and `stream` take `adapter: Adapter | None = None`. The versions that
    they return are those of the whole weights; the caller knows the adapter's own.
    """

    adapter_space: AdapterSpace

    async def add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter, or raise PreconditionFailed (ADAPTER_REFUSED) and change nothing."""

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Remove an adapter that no sample uses any more. Idempotent."""

    async def logprobs(self, token_ids: Sequence[int], *, adapter: Adapter | None = None) -> Scored:
        """Score given ids under the loaded policy, with an adapter or without."""


@runtime_checkable
class SupportsPolicyAdapters(Protocol):
    """An engine that loads a policy published as an adapter of the model directory's weights."""

    base_weights: BaseWeights
    """The weights of the model directory, whatever is loaded now."""

    async def load_onto_base(
        self,
        adapter: PolicyAdapter,
        version: PolicyVersion,
        *,
        mode: UpdateMode = UpdateMode.RECOMPUTE,
    ) -> LoadTimes:
        """Load the base weights plus an adapter that fits them, as `load_weights` loads a file."""


@runtime_checkable
class SupportsTransfer(Protocol):
    """An engine that takes weights from the trainer's device without a file."""

    transfer_backend: str
    """The data plane it was built for, such as nccl; empty for none."""

    async def transfer_weights(
        self,
        steps: AsyncIterator[Step],
        version: PolicyVersion,
        *,
        mode: UpdateMode = UpdateMode.RECOMPUTE,
    ) -> LoadTimes:
        """Load weights from the trainer's device, as `load_weights` loads those of a file."""


@runtime_checkable
class SupportsPause(Protocol):
    """An engine that can hold generation."""

    async def pause(self) -> None:
        """Stop generation for a while; requests in flight keep their place."""

    async def resume(self) -> None:
        """Continue generation."""


@runtime_checkable
class SupportsSleep(Protocol):
    """An engine that can share its device with the trainer."""

    @property
    def is_asleep(self) -> bool:
        """Return whether the engine has given its device up."""

    async def sleep(self, *, keep_weights: bool) -> None:
        """Free the device's memory. The caller has waited until no request is in flight.

        If the engine sleeps already, it frees the memory that a failed wake may have left behind.
        Weights that are not kept may be lost. Then only a load of the policy wakes the engine.
        """

    async def wake(self) -> None:
        """Continue with the weights that were kept. A load of the policy wakes too. Idempotent."""


def require_ids(token_ids: Sequence[int], *, vocab_size: int) -> None:
    """Refuse an empty row and ids the model has no embedding for."""
    if not token_ids:
        raise InvalidInput(
            "There are no token ids.", reason=Reason.NO_TOKENS, remedy="Send at least one token."
        )
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        raise InvalidInput(
            f"Token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}.",
            reason=Reason.TOKEN_OUT_OF_RANGE,
            remedy="Encode with the tokenizer of this policy.",
        )


def require_sampling(
    sampling: SamplingParams, *, constrains: bool = False, gives_top_logprobs: bool = False
) -> None:
    """Refuse sampling parameters that an engine would silently change.

    constrains: whether the engine holds answers to a form, as SupportsConstraints says.
    gives_top_logprobs: whether it names the likeliest tokens, as SupportsTopLogprobs says.
    """
    if sampling.top_logprobs and not gives_top_logprobs:
        raise Unsupported(
            "This engine knows the sampled token's log-prob alone (`top_logprobs`).",
            reason=Reason.UNSUPPORTED_LOGPROBS,
            remedy='Leave it out, or serve with engine = "vllm" or "transformers".',
        )
    if sampling.constraint and not constrains:
        raise Unsupported(
            "This engine does not hold answers to a form (`constraint`).",
            reason=Reason.UNSUPPORTED,
            remedy='Leave it out, or serve with engine = "vllm".',
        )
    if sampling.top_p == 0:
        raise InvalidInput(
            "top_p is 0.",
            reason=Reason.INVALID_SAMPLING,
            remedy="Give temperature 0 for greedy sampling.",
        )
    temperature = sampling.temperature
    if temperature is not None and 0 < temperature < MIN_TEMPERATURE * (1 - _ROUNDING):
        raise InvalidInput(
            f"temperature is {temperature}.",
            reason=Reason.INVALID_SAMPLING,
            remedy=f"Give 0 for greedy sampling, or at least {MIN_TEMPERATURE}.",
        )
    penalty = sampling.repetition_penalty
    if penalty is not None and not MIN_PENALTY * (1 - _ROUNDING) <= penalty <= MAX_PENALTY:
        raise InvalidInput(
            f"repetition_penalty is {penalty}.",
            reason=Reason.INVALID_SAMPLING,
            remedy=f"Give {MIN_PENALTY} to {MAX_PENALTY:g}; 1 is none.",
        )


def room_for(prompt_ids: Sequence[int], sampling: SamplingParams, max_model_len: int) -> int:
    """Return how many tokens may be sampled; 0 or less when the prompt fills the context."""
    room = max_model_len - len(prompt_ids)
    return room if sampling.max_new_tokens is None else min(room, sampling.max_new_tokens)


def context_full(num_samples: int) -> tuple[Sampled, ...]:
    """Return the empty samples of a prompt that leaves no room."""
    empty = Sampled(token_ids=(), logprobs=(), versions=(), stop_reason=StopReason.CONTEXT_FULL)
    return (empty,) * num_samples


def require_fit(token_ids: Sequence[int], max_model_len: int) -> None:
    """Refuse a row longer than the context."""
    if len(token_ids) > max_model_len:
        raise InvalidInput(
            f"{len(token_ids)} tokens do not fit the context of {max_model_len}.",
            reason=Reason.CONTEXT_FULL,
            remedy="Send shorter sequences, or start the service with a larger context.",
        )


def require_one_stream(num_samples: int) -> None:
    """Refuse to stream several samples at once: their tokens would mix."""
    if num_samples != 1:
        raise InvalidInput(
            f"num_samples is {num_samples} on a stream.",
            reason=Reason.INVALID_SAMPLING,
            remedy="Open one stream per sample.",
        )


def weights_bad() -> Unavailable:
    """Return the error of a request whose weights were lost while it ran."""
    return Unavailable(
        "The replica's weights are bad.",
        reason=Reason.WEIGHTS_BAD,
        remedy="Try another replica, or wait for the next publish.",
    )


def engine_died() -> Unavailable:
    """Return the error of a request under which the engine failed: it may be the cause."""
    return Unavailable(
        "The engine failed while it worked on the request.",
        reason=Reason.ENGINE_DIED,
        remedy="See the replica's log. Leave the request out if the engine fails again.",
    )


def engine_stopped() -> Unavailable:
    """Return the error of a request that finds the engine stopped."""
    return Unavailable(
        "The engine stopped.", reason=Reason.NOT_READY, remedy="Try another replica."
    )


def loads_refused(engine: str) -> Unsupported:
    """Return the error of a publish to an engine whose weights are elsewhere."""
    return Unsupported(
        f"The engine {engine} samples from a server whose weights Dialoop does not set.",
        reason=Reason.UNSUPPORTED,
        remedy='Train with engine = "vllm" or "transformers"; use this one for evaluations and '
        "teachers.",
    )
