"""What a publish says and sends: manifests, probes, chunks, and steps of vLLM's own transfer."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from dataclasses import dataclass
from enum import IntEnum

from dialoop.episode import UpdateMode
from dialoop.sequences import Floats, PolicyVersion
from dialoop.v1 import inference_service_pb2 as pb
from dialoop.wire.codec import Codec, FieldRow, enum, many, submessage
from dialoop.wire.messages import logprobs_from_proto, logprobs_to_proto, token_ids_to_proto
from dialoop.wire.sequences import POLICY_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Token ids, and the log-probs float32 [L - 1] that a publisher has for them."""

    token_ids: tuple[int, ...]
    logprobs: Floats


class WeightsKind(IntEnum):
    """What is published as the policy.

    All of its weights, an adapter of those it began with, or what changed since another policy.
    """

    WHOLE = 1
    ADAPTER = 2
    DELTA = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsManifest:
    """What is published: version, sha256 (hex) and size of the safetensors bytes.

    `path` names a file under the server's weights root; empty when chunks follow. `data_plane` is
    empty for these two. `update_mode` is what becomes of answers under way; None leaves it to the
    replica. `adapter` and what comes after it are of a LoRA adapter (its adapter_config.json as
    text), which is checked with the probes before it is taken. Of kind ADAPTER the policy is the
    base weights of `base_digest` with that adapter added in, and `adapter` is empty. Of kind DELTA
    `base_digest` is the sha256 of the whole policy that the bytes change.
    """

    policy_version: PolicyVersion
    sha256: str = ""
    num_bytes: int = 0
    path: str = ""
    update_mode: UpdateMode | None = None
    data_plane: str = ""
    adapter: str = ""
    adapter_config_json: str = ""
    probes: tuple[Probe, ...] = ()
    max_logprob_difference: float = 0.0
    kind: WeightsKind = WeightsKind.WHOLE
    base_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """A load that succeeded, and how long generation stood still for it."""

    policy_version: PolicyVersion
    pause_s: float
    load_s: float


class TransferPhase(IntEnum):
    """A step of vLLM's own weight transfer: INIT once, the others at each publish."""

    INIT = 1
    START = 2
    UPDATE = 3
    FINISH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """A contiguous tensor in a GPU's memory, and what another process opens it with by CUDA IPC.

    device: UUID of the GPU. memory_handle, memory_offset: CUDA's handle of the allocation, and
    where in it the tensor begins. counter_name, counter_offset: torch's count of those who use it.
    event_handle: CUDA's handle of the event at which its bytes are there; empty: they are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    memory_handle: bytes
    memory_offset: int
    counter_name: str
    counter_offset: int
    event_handle: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStep:
    """What vLLM's trainer side says at a phase: a JSON object, or the tensors that it shares."""

    phase: TransferPhase
    info_json: str = ""
    tensors: tuple[SharedTensor, ...] = ()


Content = bytes | TransferStep
"""What follows a manifest."""

_PROBE = Codec(
    Probe,
    pb.Probe,
    token_ids=FieldRow(lambda ids: token_ids_to_proto([ids])[0], lambda row: tuple(row.values)),
    logprobs=FieldRow(
        lambda row: logprobs_to_proto([row])[0], lambda row: logprobs_from_proto([row])[0]
    ),
)
_MODE = enum(UpdateMode)
MANIFEST = Codec(
    WeightsManifest,
    pb.WeightsManifest,
    policy_version=submessage(POLICY_VERSION),
    update_mode=FieldRow(int, lambda number: _MODE.decode(number) if number else None),
    probes=many(_PROBE),
    kind=enum(WeightsKind, unspecified=WeightsKind.WHOLE),
)
TRANSFER_STEP = Codec(
    TransferStep,
    pb.TransferStep,
    phase=enum(TransferPhase),
    tensors=many(Codec(SharedTensor, pb.SharedTensor)),
)
LOADED = Codec(LoadedWeights, pb.LoadWeightsResponse, policy_version=submessage(POLICY_VERSION))


async def weights_requests(
    manifest: WeightsManifest, contents: AsyncIterable[Content] | Iterable[Content]
) -> AsyncIterator[pb.LoadWeightsRequest]:
    """Yield the requests of one LoadWeights."""
    yield pb.LoadWeightsRequest(manifest=MANIFEST.to_proto(manifest))
    if isinstance(contents, AsyncIterable):
        async for content in contents:
            yield _content_to_proto(content)
    else:
        for content in contents:
            yield _content_to_proto(content)


def _content_to_proto(content: Content) -> pb.LoadWeightsRequest:
    if isinstance(content, TransferStep):
        return pb.LoadWeightsRequest(transfer=TRANSFER_STEP.to_proto(content))
    return pb.LoadWeightsRequest(chunk=content)
