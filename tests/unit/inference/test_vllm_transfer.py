"""vLLM's own weight transfer on the wire: typed handles, steps that are checked, and no pickle."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from dialoop.clients.weights import (
    SharedTensor,
    TransferPhase,
    TransferStep,
    WeightsManifest,
    weights_requests,
)
from dialoop.errors import DialoopError, InvalidConfig
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion
from dialoop.v1 import inference_service_pb2 as pb
from dialoop_services.inference.requests import contents_of, manifest_of
from dialoop_services.inference.vllm_engine.environment import prepare
from dialoop_services.inference.weights.data_planes import DataPlanes
from dialoop_services.inference.weights.publications import Publications

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

prepare()
pytest.importorskip("vllm")
from dialoop_services.inference.vllm_engine import transfer as module  # noqa: E402
from dialoop_services.trainer.publish import vllm_transfer as sender  # noqa: E402

VERSION = PolicyVersion(lineage="main", number=1)
SHAPES = {"a.weight": (4, 8), "b.weight": (8,)}
NCCL = {
    "nccl_unique_id_b64": "aWQ=",
    "rank_offset": 1,
    "world_size": 2,
    "packed": True,
    "packed_buffer_size_bytes": 1024,
    "packed_num_buffers": 2,
}
NAMED = {
    "names": list(SHAPES),
    "dtype_names": ["float32", "float32"],
    "shapes": [[4, 8], [8]],
}


def as_torch_shares(name: str, *, waits: bool) -> tuple[Any, ...]:
    """The arguments of rebuild_cuda_tensor, as torch's reduce_tensor makes them of a tensor."""
    tensor = torch.zeros(SHAPES[name])
    return (
        torch.Tensor, tensor.size(), tensor.stride(), 0, torch.storage.TypedStorage, tensor.dtype,
        0, bytes(range(66)), tensor.nbytes, 512, False, b"/torch_42_7_0", 17, bytes(range(64)),
        waits,
    )  # fmt: skip


HANDLES = [
    {"GPU-1": as_torch_shares("a.weight", waits=True)},
    {"GPU-1": as_torch_shares("b.weight", waits=False)},
]
SHARED = [
    sender._as_shared(name, "float32", list(SHAPES[name]), handle)
    for name, handle in zip(SHAPES, HANDLES, strict=True)
]


class Workers:
    """An AsyncLLM with one worker, whose calls go through vLLM's own encoding of its socket."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.worker = module.TransferWorker()
        self.worker.init_weight_transfer_engine = self._note("init")
        self.worker.update_weights = self._note("update")
        self.worker.weight_transfer_engine = SimpleNamespace()

    def _note(self, name: str) -> Any:
        return lambda value=None: self.calls.append((name, value))

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        decoded = MsgpackDecoder().decode(MsgpackEncoder().encode(list(args)))
        return [getattr(self.worker, method)(*decoded)]

    async def start_weight_update(self) -> None:
        self.calls.append(("start", None))

    async def update_weights(self, request: Any) -> None:
        self.calls.append(("update", request.update_info))

    async def finish_weight_update(self) -> None:
        self.calls.append(("finish", None))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def step(phase: TransferPhase, info: Any = None, tensors: Any = ()) -> TransferStep:
    text = "" if info is None else json.dumps(info)
    return TransferStep(phase=phase, info_json=text, tensors=tuple(tensors))


def steps_of(init: Any, *updates: TransferStep) -> list[TransferStep]:
    """A whole publish of the first kind, with these updates."""
    first, last = step(TransferPhase.INIT, init), step(TransferPhase.FINISH)
    return [first, step(TransferPhase.START), *updates, last]


async def on_the_wire(
    steps: Any, *, backend: str, llm: Workers | None = None, receiver: Any = None
) -> Workers:
    """Bring the steps of a publish to vLLM, by way of the messages that gRPC carries."""
    llm = llm or Workers()
    receiver = receiver or module.TransferReceiver(
        cast("Any", llm), backend=backend, shapes=SHAPES, tied=False
    )

    async def messages() -> AsyncIterator[pb.LoadWeightsRequest]:
        manifest = WeightsManifest(policy_version=VERSION, data_plane=backend)
        async for request in weights_requests(manifest, steps):
            yield pb.LoadWeightsRequest.FromString(request.SerializeToString())

    requests = messages()
    manifest = manifest_of(await anext(requests))
    async with DataPlanes(Publications(None), transfer_backend=backend).arriving(
        manifest, contents_of(requests)
    ) as arrived:
        await receiver.meet(arrived.steps)
        await receiver.receive(arrived.steps)
    return llm


async def test_shared_tensors_reach_vllm_as_torch_shared_them_and_no_pickle_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own way is a pickle, which it refuses unless any caller may send one."""
    from vllm.distributed.weight_transfer import ipc_engine

    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    loop, llm = asyncio.get_running_loop(), Workers()
    client = sender.StepClient(loop)

    def trainer() -> None:
        """Make vLLM's calls, as its trainer engine does."""
        client.init_weight_transfer_engine({"packed": False})
        client.start_weight_update()
        client.update_weights({**NAMED, "ipc_handles": HANDLES})
        client.finish_weight_update()

    client.begin(lambda steps: on_the_wire(steps, backend="ipc", llm=llm), deadline_s=30)
    await asyncio.to_thread(trainer)
    assert llm.names == ["init", "start", "update", "finish"]
    update = dict(llm.calls)["update"]
    assert dict(llm.calls)["init"] == {"packed": False}

    rebuilt: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", lambda *row: rebuilt.append(row))
    properties = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    theirs = SimpleNamespace(
        update_info_cls=ipc_engine.IPCWeightTransferUpdateInfo,
        device=torch.device("cuda", 0),
        packed=False,
        model=SimpleNamespace(load_weights=list),
    )
    kind = ipc_engine.IPCWeightTransferEngine
    kind.receive_weights(theirs, kind.parse_update_info(theirs, update))
    expected = [handle["GPU-1"] for handle in HANDLES]
    assert rebuilt[0] == expected[0]
    # Where nobody waits, torch's event is whatever lay in memory.
    assert (rebuilt[1][:13], rebuilt[1][14]) == (expected[1][:13], False)


def test_a_part_of_a_tensor_is_not_shared_as_if_it_were_whole() -> None:
    whole = as_torch_shares("a.weight", waits=True)
    turned = (*whole[:2], (1, 4), *whole[3:])
    later = (*whole[:3], 4, *whole[4:])
    for part in (turned, later):
        with pytest.raises(ValueError, match="part of another tensor"):
            sender._as_shared("a.weight", "float32", [4, 8], {"GPU-1": part})


BAD_TENSORS: dict[str, dict[str, Any]] = {
    "another shape": {"shape": (8, 4)},
    "an unknown name": {"name": "c.weight"},
    "no number format": {"dtype": "load"},
    "a handle too short": {"memory_handle": b"x"},
    "a handle too long": {"memory_handle": bytes(1 << 20)},
    "an offset before the allocation": {"memory_offset": -1},
    "another file in shared memory": {"counter_name": "/psm_of_somebody"},
    "a path": {"counter_name": "/torch_1/../../x"},
    "a counter outside of its file": {"counter_offset": 10_000},
    "an event too short": {"event_handle": b"x"},
    "no device": {"device": ""},
}


@pytest.mark.parametrize("what", BAD_TENSORS)
async def test_a_shared_tensor_that_is_not_the_models_is_never_opened(what: str) -> None:
    bad = [replace(SHARED[0], **BAD_TENSORS[what]), SHARED[1]]
    llm = Workers()
    with pytest.raises(DialoopError) as caught:
        await on_the_wire(
            steps_of(None, step(TransferPhase.UPDATE, tensors=bad)), backend="ipc", llm=llm
        )
    assert caught.value.reason in (Reason.MANIFEST_MISMATCH, Reason.UNKNOWN_PARAMETERS)
    assert llm.names == ["init", "start", "finish"], "and the next publish may begin"


async def test_a_policy_that_lacks_a_parameter_is_refused() -> None:
    llm = Workers()
    some = [
        step(TransferPhase.UPDATE, tensors=SHARED[:1]),
        step(TransferPhase.UPDATE, tensors=SHARED[:1]),
    ]
    with pytest.raises(DialoopError, match=r"1 parameters are missing: b\.weight"):
        await on_the_wire(steps_of(None, *some), backend="ipc", llm=llm)
    assert (
        await on_the_wire(steps_of(None, step(TransferPhase.UPDATE, tensors=SHARED)), backend="ipc")
    ).names


BAD_NCCL: dict[str, tuple[Any, Any]] = {
    "an address to read a pickle from": (NCCL | {"master_address": "10.0.0.9"}, NAMED),
    "an address in place of the id": (
        {n: v for n, v in NCCL.items() if n != "nccl_unique_id_b64"}
        | {"master_address": "10.0.0.9", "master_port": 1},
        NAMED,
    ),
    "a size that is a text": (NCCL | {"world_size": "2"}, NAMED),
    "no buffers": (NCCL | {"packed_num_buffers": 0}, NAMED),
    "no INIT": (None, NAMED),
    "pickled handles": (NCCL, NAMED | {"ipc_handles_pickled": "gASVAAAA"}),
    "an attribute of torch that is no number format": (NCCL, NAMED | {"dtype_names": ["load"] * 2}),
    "a shape that the model has not": (NCCL, NAMED | {"shapes": [[1 << 40], [8]]}),
    "fewer shapes than names": (NCCL, NAMED | {"shapes": [[4, 8]]}),
    "shapes that are none": (NCCL, NAMED | {"shapes": [None, None]}),
    "a list for each worker": (NCCL, [NAMED]),
}


@pytest.mark.parametrize("what", BAD_NCCL)
async def test_what_nccl_is_told_is_read_field_by_field(what: str) -> None:
    init, update = BAD_NCCL[what]
    llm = Workers()
    with pytest.raises(DialoopError) as caught:
        await on_the_wire(
            steps_of(init, step(TransferPhase.UPDATE, update)), backend="nccl", llm=llm
        )
    assert caught.value.reason in (Reason.MANIFEST_MISMATCH, Reason.UNKNOWN_PARAMETERS)
    assert "update" not in llm.names


async def test_an_nccl_publish_reaches_vllm_as_its_trainers_engine_sent_it() -> None:
    llm = await on_the_wire(steps_of(NCCL, step(TransferPhase.UPDATE, NAMED)), backend="nccl")
    assert llm.calls == [("init", NCCL), ("start", None), ("update", NAMED), ("finish", None)]


async def test_a_replica_that_began_anew_asks_for_a_new_connection() -> None:
    """vLLM would begin a broadcast of which only one side knows, and both would wait for ever."""
    llm = Workers()
    _, *later = steps_of(NCCL, step(TransferPhase.UPDATE, NAMED))
    with pytest.raises(DialoopError) as caught:
        await on_the_wire(later, backend="nccl", llm=llm)
    assert caught.value.reason is Reason.TRANSFER_NOT_CONNECTED
    assert llm.calls == []
    receiver = module.TransferReceiver(cast("Any", llm), backend="nccl", shapes=SHAPES, tied=False)
    first = steps_of(NCCL, step(TransferPhase.UPDATE, NAMED))
    for steps in (first, later):
        await on_the_wire(steps, backend="nccl", receiver=receiver, llm=llm)
    assert llm.names.count("init") == 1


async def test_a_worker_whose_nccl_is_off_says_so_before_anything_is_sent() -> None:
    llm = Workers()
    group = SimpleNamespace(disabled=True)
    llm.worker.weight_transfer_engine = SimpleNamespace(model_update_group=group)
    with pytest.raises(DialoopError, match="NCCL is off"):
        await on_the_wire(
            steps_of(NCCL, step(TransferPhase.UPDATE, NAMED)), backend="nccl", llm=llm
        )
    assert "start" not in llm.names


def test_both_sides_refuse_an_nccl_that_vllm_cannot_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself goes on: its communicator is then off, and a broadcast sends nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if torch.version.cuda is not None:
        monkeypatch.setenv("VLLM_NCCL_SO_PATH", "/no/such/library")
    for start in (
        lambda: module.transfer_arguments("nccl"),
        lambda: sender.VllmTransfer("nccl", num_workers=1),
    ):
        with pytest.raises(InvalidConfig, match="NCCL that is installed") as caught:
            start()
        assert caught.value.reason is Reason.NCCL_UNUSABLE
        assert "chunks" in caught.value.remedy


def test_shared_tensors_keep_their_fields_over_the_wire() -> None:
    assert {field.name for field in pb.SharedTensor.DESCRIPTOR.fields} == set(
        SharedTensor.__slots__
    )
