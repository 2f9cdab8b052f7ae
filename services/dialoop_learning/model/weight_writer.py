"""A safetensors file that is written a few tensors at a time, with the bytes that safetensors has.

with WeightsWriter(path, like, {"format": "pt"}) as writer:    # like: tensors on the meta device
    for bucket in buckets:
        writer.put(bucket)                  # returns while a thread writes

So whoever gathers a model needs memory for two buckets and not for the whole.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

# In the order in which safetensors puts them, largest alignment first.
_KINDS = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNED = 8


class WeightsWriter:
    """Writes tensors to their places in a file, in any order.

    Leaving the context waits for them and raises the first OSError of a write, so that all ranks of
    a gathering can go on to its end.
    """

    def __init__(self, path: Path, like: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        order = list(_KINDS)
        names = sorted(like, key=lambda name: (order.index(like[name].dtype), name))
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        self._places: dict[str, int] = {}
        end = 0
        for name in names:
            tensor, start = like[name], end
            end += tensor.numel() * tensor.itemsize
            kind, shape = _KINDS[tensor.dtype], list(tensor.shape)
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
            self._places[name] = start
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNED)
        self._head = len(text).to_bytes(8, "little") + text
        self._path, self._size = path, len(self._head) + end
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        self._file = self._path.open("wb")
        self._thread = ThreadPoolExecutor(1, "weights")
        self._writing = self._thread.submit(self._begin)
        return self

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Write these tensors on the host, while the caller goes on; wait for those before."""
        before = self._writing
        if before is None or before.exception() is None:
            self._writing = self._thread.submit(self._write, dict(tensors))

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._thread.shutdown()
        if self._writing is not None:
            self._writing.result()

    def _begin(self) -> None:
        self._file.write(self._head)
        self._file.truncate(self._size)

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            at = len(self._head) + self._places[name]
            while data:
                written = os.pwrite(self._file.fileno(), data, at)
                data, at = data[written:], at + written
