"""A worker of vLLM's NCCL transfer without a GPU: vLLM's own code, with gloo in place of NCCL.

`worker` is the other process. `as_if_on_cuda` gives both processes streams that do nothing before
somebody waits for them, as CUDA's may: what reads too early, or is freed too early, shows.
"""

from __future__ import annotations

import base64
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

_PATIENCE = timedelta(seconds=20)


class Stream:
    """A CUDA stream whose work happens only when somebody waits for it."""

    every: ClassVar[list[Stream]] = []
    current: ClassVar[Stream | None] = None

    def __init__(self, **_: Any) -> None:
        self._work: list[Callable[[], None]] = []
        Stream.every.append(self)

    def add(self, work: Callable[[], None]) -> None:
        """Enqueue, as a kernel or a collective is."""
        self._work.append(work)

    def synchronize(self) -> None:
        """Do what waits, in its order."""
        work, self._work = self._work, []
        for each in work:
            each()


class Gloo:
    """A PyNcclCommunicator: its broadcasts join the current stream."""

    disabled = False

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: Any) -> None:
        store = dist.FileStore(unique_id.rstrip(b"\0").decode(), world_size)
        self._group = dist.ProcessGroupGloo(store, rank, world_size, _PATIENCE)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Broadcast at the stream's turn, from memory that must still be the tensor's by then."""
        held, options = weakref.ref(tensor), dist.BroadcastOptions()
        options.rootRank = src

        def work() -> None:
            here = held()
            if here is None:
                raise AssertionError("a tensor was freed before it was sent")
            self._group.broadcast([here], options).wait()

        assert Stream.current is not None
        Stream.current.add(work)

    def destroy(self) -> None:
        """Do nothing: gloo ends with its process."""


@contextmanager
def _on(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


def as_if_on_cuda(patch: Callable[[Any, str, Any], None]) -> None:
    """Put these streams, and gloo, where vLLM's transfer has CUDA's and NCCL."""
    from vllm.distributed.weight_transfer import nccl_common

    patch(torch.cuda, "Stream", Stream)
    patch(torch.cuda, "stream", _on)
    patch(torch.accelerator, "current_device_index", lambda: 0)
    patch(torch.accelerator, "synchronize", lambda: [each.synchronize() for each in Stream.every])
    patch(nccl_common, "uid_init_process_group", Gloo)


class Model:
    """Keeps what is loaded into it, copied on the stream as a kernel does."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors at the stream's turn."""
        assert Stream.current is not None
        for name, tensor in weights:
            Stream.current.add(lambda name=name, tensor=tensor: self._keep(name, tensor))

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor.clone()


def worker(pipe: Connection) -> None:
    """Serve the calls that AsyncLLM makes in a worker, each one answered with what it returns."""
    from dialoop_services.inference.vllm_engine.environment import prepare

    prepare()
    from dialoop_services.inference.vllm_engine.transfer import TransferWorker
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    as_if_on_cuda(setattr)
    model, device = Model(), torch.device("cpu")
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
    engine = NCCLWeightTransferEngine(SimpleNamespace(), config, device, model)
    ours = TransferWorker()
    ours.weight_transfer_engine = engine
    ours.init_weight_transfer_engine = lambda info: engine.init_transfer_engine(
        engine.parse_init_info(info)
    )
    calls: dict[str, Callable[..., Any]] = {
        "dialoop_connect": ours.dialoop_connect,
        "update_weights": engine.update_weights,
        "tensors": lambda: {name: tensor.clone() for name, tensor in model.tensors.items()},
    }
    pipe.send("ready")
    while True:
        name, arguments = pipe.recv()
        if name == "end":
            return
        try:
            answer = calls[name](*arguments)
        except Exception as error:
            answer = error
        pipe.send(answer)


def id_of(path: str) -> Any:
    """Return an NCCL id that names a file in which both sides meet."""
    return SimpleNamespace(internal=path.encode().ljust(128, b"\0"))


def path_in(id_b64: str) -> str:
    """Return the file that such an id names."""
    return base64.b64decode(id_b64).rstrip(b"\0").decode()
