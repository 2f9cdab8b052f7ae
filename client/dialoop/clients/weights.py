"""What a publish says and sends: manifests, probes, chunks, and steps of vLLM's own transfer."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from dialoop.v1 import inference_service_pb2 as pb
from dialoop.wire import logprobs_to_proto, policy_version_to_proto, token_ids_to_proto

if TYPE_CHECKING:
    from dialoop.episode import UpdateMode
    from dialoop.sequences import Floats, PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Token ids, and the log-probs float32 [L - 1] that a publisher has for them."""

    token_ids: tuple[int, ...]
    logprobs: Floats


class WeightsKind(IntEnum):
    """What is published as the policy: all of its weights, or an adapter of those it began with."""

    WHOLE = 1
    ADAPTER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsManifest:
    """What is published: version, sha256 (hex) and size of the safetensors bytes.

    `path` names a file under the server's weights root; empty when chunks follow. `data_plane` is
    empty for these two. `update_mode` is what becomes of answers under way; None leaves it to the
    replica. `adapter` and what comes after it are of a LoRA adapter (its adapter_config.json as
    text), which is checked with the probes before it is taken. Of kind ADAPTER the policy is the
    base weights of `base_digest` with that adapter added in, and `adapter` is empty.
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


async def weights_requests(
    manifest: WeightsManifest, contents: AsyncIterable[Content] | Iterable[Content]
) -> AsyncIterator[pb.LoadWeightsRequest]:
    """Yield the requests of one LoadWeights."""
    yield pb.LoadWeightsRequest(manifest=_manifest_to_proto(manifest))
    if isinstance(contents, AsyncIterable):
        async for content in contents:
            yield _content_to_proto(content)
    else:
        for content in contents:
            yield _content_to_proto(content)


def _manifest_to_proto(manifest: WeightsManifest) -> pb.WeightsManifest:
    return pb.WeightsManifest(
        policy_version=policy_version_to_proto(manifest.policy_version),
        sha256=manifest.sha256,
        num_bytes=manifest.num_bytes,
        path=manifest.path,
        update_mode=int(manifest.update_mode or 0),  # type: ignore[arg-type]  # enums are ints
        data_plane=manifest.data_plane,
        adapter=manifest.adapter,
        adapter_config_json=manifest.adapter_config_json,
        probes=[_probe_to_proto(probe) for probe in manifest.probes],
        max_logprob_difference=manifest.max_logprob_difference,
        kind=int(manifest.kind),  # type: ignore[arg-type]  # enums are ints
        base_digest=manifest.base_digest,
    )


def _probe_to_proto(probe: Probe) -> pb.Probe:
    (token_ids,) = token_ids_to_proto([probe.token_ids])
    (logprobs,) = logprobs_to_proto([probe.logprobs])
    return pb.Probe(token_ids=token_ids, logprobs=logprobs)


def _content_to_proto(content: Content) -> pb.LoadWeightsRequest:
    if isinstance(content, TransferStep):
        step = pb.TransferStep(
            phase=int(content.phase),  # type: ignore[arg-type]  # enums are ints
            info_json=content.info_json,
            tensors=[pb.SharedTensor(**asdict(tensor)) for tensor in content.tensors],
        )
        return pb.LoadWeightsRequest(transfer=step)
    return pb.LoadWeightsRequest(chunk=content)
