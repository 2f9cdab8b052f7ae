"""Weights on their way to a file: captured at one moment, written and digested in one pass.

`Learner.capture` copies the weights between two train steps. `write` of what it returns may run in
another thread, beside the next train step.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from dialoop.clients.weights import WeightsKind

from dialoop_services.runtime.durable import whole_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

_CHUNK_BYTES = 1 << 20
"""Bytes that are written and digested together, while the processor still has them in its cache."""

# In the order of a safetensors file: the widest first, so that every tensor is aligned.
_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_NAMES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """A safetensors file of the whole policy, or of the adapter to add to the base."""

    path: Path
    sha256: str
    num_bytes: int
    kind: WeightsKind = WeightsKind.WHOLE
    adapter_config_json: str = ""
    base_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedWeights:
    """The weights of one moment on the first rank's host; other ranks have no tensors.

    tensors: by the names of the file. metadata: the file's own, at most one entry, since more come
    in no fixed order.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    kind: WeightsKind = WeightsKind.WHOLE
    adapter: Mapping[str, str] = field(default_factory=dict)

    def write(self, *copies: Path) -> ExportedWeights:
        """Write the file, and the same bytes to `copies`; each appears whole or not at all.

        The bytes are read once. The caller brings the file to the disk, where something relies on
        that. Raise PreconditionFailed (WRITE_FAILED) if one of them cannot be written.
        """
        with ExitStack() as whole:
            temporaries = [whole.enter_context(whole_file(p, sync=False)) for p in copies]
            # Left first: a reader of a copy may rely on the file, so it appears before the copies.
            temporaries.append(whole.enter_context(whole_file(self.path, sync=False)))
            files = [whole.enter_context(path.open("wb")) for path in temporaries]
            sha256, num_bytes = _write(self.tensors, self.metadata, files)
        return ExportedWeights(
            path=self.path, sha256=sha256, num_bytes=num_bytes, kind=self.kind, **self.adapter
        )


def _write(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], files: Sequence[BinaryIO]
) -> tuple[str, int]:
    """Write the bytes of `safetensors.torch.save_file`; return SHA-256 and length."""
    digest, num_bytes = hashlib.sha256(), 0
    for chunk in _chunks(tensors, metadata):
        digest.update(chunk)
        for file in files:
            file.write(chunk)
        num_bytes += len(chunk)
    return digest.hexdigest(), num_bytes


def _chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Yield the file: the header's length in 8 bytes, the header, then tensors without gaps.

    Source: the format at https://github.com/huggingface/safetensors.
    """
    ordered = sorted(tensors.items(), key=lambda item: (_RANKS[item[1].dtype], item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(flat), _CHUNK_BYTES):
            yield flat[start : start + _CHUNK_BYTES]
