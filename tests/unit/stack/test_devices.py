"""Which process gets which GPUs: a table of plans, and what every plan must hold."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop_learning.model.checkpoint import cuda_problem
from dialoop_ops.cli.main import main
from dialoop_ops.stack import gpus as gpus_module
from dialoop_ops.stack import preflight, running
from dialoop_ops.stack.devices import (
    Node,
    nodes_of,
    plan_devices,
    plan_here,
    this_machine,
    with_data_plane,
)
from dialoop_ops.stack.estimates import card_needs
from dialoop_ops.stack.gpus import driver_lists, hold
from dialoop_ops.stack.layout import Layout
from dialoop_ops.stack.preflight import mistakes_in
from dialoop_ops.stack.run_dir import open_run
from dialoop_services.config.file import parse_config

from benchmarks.servers.families import make_family

if TYPE_CHECKING:
    from dialoop_services.config.job import JobConfig

PLANS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "goldens" / "device_plans.json").read_text("utf-8")
)
SHARED: dict[str, Any] = {"placement": "shared", "train": {"device": "cuda", "pipeline_depth": 0}}


def job(**values: Any) -> JobConfig:
    return parse_config(values, source="job.toml")


def node(gpus: int, processors: int | None = None, memory_gib: float | None = None) -> Node:
    names = tuple(map(str, range(gpus)))
    return Node(gpus=names, processors=processors, memory_gib=memory_gib)


def plan_of(values: dict[str, Any]) -> Any:
    config = job(**values)
    return plan_devices(config, nodes_of(config, {}))


@pytest.mark.parametrize("name", PLANS)
def test_every_variable_of_every_process_is_as_planned(name: str) -> None:
    plan = plan_of(PLANS[name]["config"])
    variables = {each.name: [each.node, dict(each.variables)] for each in plan.processes}
    assert variables == PLANS[name]["processes"]


@pytest.mark.parametrize("name", [name for name in PLANS if "split" in name])
def test_no_gpu_of_a_split_plan_has_two_processes(name: str) -> None:
    plan = plan_of(PLANS[name]["config"])
    users = [(each.node, gpu) for each in plan.processes for gpu in each.gpus]
    assert len(users) == len(set(users)) > 0


def test_without_gpus_no_process_gets_a_variable() -> None:
    plan = plan_devices(job(), (node(0, 2, 4.0),))
    assert {each.name: dict(each.variables) for each in plan.processes} == {
        name: {}
        for name in ("trainer", "inference", "scorer", "collector", "environment", "replay")
    }
    assert plan.lines() == []


def test_gpus_keep_the_names_under_which_this_machine_shows_them() -> None:
    here = this_machine({"CUDA_VISIBLE_DEVICES": "5,GPU-3f,-1,7"})
    assert here.gpus == ("5", "GPU-3f"), "CUDA ignores what follows -1"
    plan = plan_devices(job(train={"device": "cuda"}), (here,))
    assert plan.variables("trainer") == {"CUDA_VISIBLE_DEVICES": "5"}
    assert plan.variables("inference") == {"CUDA_VISIBLE_DEVICES": "GPU-3f"}


REFUSED: dict[str, tuple[dict[str, Any], Node, str]] = {
    "too few GPUs": (
        {"train": {"device": "cuda", "num_processes": 2}, "inference": {"num_replicas": 3}},
        node(4),
        "GPUs: trainer 2 + inference 1 + inference-1 1 + inference-2 1 = 5 of 4",
    ),
    "a replica larger than a machine": (
        {"inference": {"tensor_parallel_size": 4}, "resources": {"num_nodes": 2}},
        node(2),
        "GPUs: inference 4 = 4 of 2",
    ),
    "a trainer of more machines than there are": (
        {"train": {"device": "cuda", "num_nodes": 2}, "resources": {"num_nodes": 1}},
        node(4),
        "GPUs: trainer 1 + trainer-1 1 + inference 1 = 3 of 4",
    ),
    "too few processors": (
        {"resources": {"trainer": {"processors": 6}, "scorer": {"processors": 3}}},
        node(0, 8, 16.0),
        "processors: trainer 6 + scorer 3 = 9 of 8",
    ),
    "too little memory": (
        {"resources": {"trainer": {"memory_gib": 12}, "inference": {"memory_gib": 6.5}}},
        node(0, 8, 16.0),
        "GiB: trainer 12 + inference 6.5 = 18.5 of 16",
    ),
    "other devices than the trainer uses": (
        {"train": {"device": "cuda"}, "resources": {"trainer": {"devices": 2}}},
        node(4),
        "devices is 2, and device and num_processes in [train] use 1",
    ),
    "GPUs for an engine without": (
        {"engine": "transformers", "resources": {"inference": {"devices": 1}}},
        node(4),
        "devices is 1, and engine, device and tensor_parallel_size in [inference] use 0",
    ),
    "a scorer on a device that it does not get": (
        {"scorer": {"device": "cuda:1"}, "resources": {"scorer": {"devices": 1}}},
        node(4),
        "devices is 1, and device in [scorer] use 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_does_not_fit_is_refused_with_its_arithmetic(name: str) -> None:
    values, machine, says = REFUSED[name]
    remedy = "in [resources]" if " of " in says else "Leave devices out"
    with pytest.raises(InvalidConfig) as caught:
        plan_devices(job(**values), (machine,))
    assert says in caught.value.message
    assert remedy in caught.value.remedy


def test_with_overlap_the_least_used_gpus_are_shared() -> None:
    values = {"train": {"device": "cuda"}, "inference": {"num_replicas": 3}}
    plan = plan_devices(job(**values, resources={"overlap": True}), (node(2),))
    gpus = {each.name: each.gpus for each in plan.processes if each.gpus}
    assert gpus == {
        "trainer": ("0",),
        "inference": ("1",),
        "inference-1": ("0",),
        "inference-2": ("1",),
    }
    with pytest.raises(InvalidConfig, match="inference-1 has no room"):
        plan_devices(job(**values), (node(2),))


def on_transformers(**values: Any) -> JobConfig:
    return job(engine="transformers", inference={"device": "cuda"}, **values)


def test_a_transformers_engine_gets_one_gpu_where_its_device_is_cuda() -> None:
    trained = {"train": {"device": "cuda"}}
    assert plan_devices(on_transformers(**trained), (node(2),)).variables("inference") == {
        "CUDA_VISIBLE_DEVICES": "1"
    }
    on_cpu = plan_devices(job(engine="transformers", **trained), (node(2),))
    assert on_cpu.variables("inference") == {"CUDA_VISIBLE_DEVICES": ""}


def test_a_transformers_engine_and_a_trainer_share_one_gpu_by_overlap_or_by_turns() -> None:
    trained = {"train": {"device": "cuda", "pipeline_depth": 0}}
    for more in ({"resources": {"overlap": True}}, {"placement": "shared"}):
        plan = plan_devices(on_transformers(**trained, **more), (node(1),))
        assert plan.variables("trainer") == plan.variables("inference") != {}
    with pytest.raises(InvalidConfig, match="= 2 of 1"):
        plan_devices(on_transformers(**trained), (node(1),))


def test_an_engine_on_cuda_is_refused_where_it_would_get_no_gpu() -> None:
    with pytest.raises(InvalidConfig, match="GPUs: inference 1 = 1 of 0"):
        plan_devices(on_transformers(), (node(0),))
    with pytest.raises(InvalidConfig, match="devices is 0"):
        plan_devices(on_transformers(resources={"inference": {"devices": 0}}), (node(1),))


def test_over_cuda_ipc_the_trainer_computes_where_the_replica_does() -> None:
    values = {"train": {"device": "cuda"}, "inference": {"data_plane": "ipc"}}
    plan = plan_devices(job(**values), (node(2),))
    assert plan.variables("trainer") == plan.variables("inference")


ON_ONE_GPU: dict[str, Any] = {"train": {"device": "cuda"}, "resources": {"overlap": True}}
OTHERWISE: dict[str, tuple[dict[str, Any], int]] = {
    "two GPUs": ({}, 2),
    "none": ({"train": {}}, 0),
    "a trainer on the CPU": ({"train": {}}, 1),
    "another engine": ({"engine": "transformers", "inference": {"device": "cuda"}}, 1),
    "two replicas": ({"inference": {"num_replicas": 2}}, 1),
    "devices by turns": (SHARED, 1),
    "replicas that come and go": ({"discovery": "registry"}, 1),
    "an adapter alone": ({"model": {"directory": "m", "lora_rank": 4}}, 1),
    "a plane that is named": ({"inference": {"data_plane": "shared_memory"}}, 1),
}


def plane_of(values: dict[str, Any], gpus: int) -> tuple[str, str]:
    """Which data plane a job names, and which one a stack takes for it."""
    config = job(**(ON_ONE_GPU | values))
    devices = {each.name: each.variables for each in plan_devices(config, (node(gpus),)).processes}
    return config.inference.data_plane, with_data_plane(config, devices).inference.data_plane


def test_where_trainer_and_vllm_share_a_gpu_policies_go_over_cuda_ipc() -> None:
    assert plane_of({}, 1) == ("shared_memory", "ipc")
    merged = {"model": {"directory": "m", "lora_rank": 4, "publish": "merged"}}
    assert plane_of(merged, 1) == ("shared_memory", "ipc")


@pytest.mark.parametrize("what", OTHERWISE)
def test_elsewhere_policies_go_as_the_job_says(what: str) -> None:
    assert plane_of(*OTHERWISE[what]) == ("shared_memory", "shared_memory")


@pytest.mark.parametrize(
    "more",
    [
        {"inference": {"num_replicas": 2}},
        {"inference": {"tensor_parallel_size": 2}},
        {"train": {"num_processes": 2}},
    ],
)
def test_over_cuda_ipc_more_than_a_device_each_is_refused(more: dict[str, Any]) -> None:
    """vLLM would find no handle for its GPU at the first publish."""
    values = {**more, "inference": {"data_plane": "ipc", **more.get("inference", {})}}
    with pytest.raises(InvalidConfig, match="shares the memory of one GPU"):
        job(**values)


def test_the_plan_says_over_what_policies_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    path = tmp_path / "job.toml"
    path.write_text('[train]\ndevice = "cuda"\n[resources]\noverlap = true\n', "utf-8")
    assert main(["config", "print", str(path)]) == 0
    assert "Policies go to the replica over ipc." in capsys.readouterr().out


def test_a_stack_takes_no_more_than_this_machine_has() -> None:
    here = {"CUDA_VISIBLE_DEVICES": "4,6"}
    config = job(train={"device": "cuda"}, resources={"gpus_per_node": 2})
    assert plan_here(config, here).variables("inference") == {"CUDA_VISIBLE_DEVICES": "6"}
    for other in ({"gpus_per_node": 8}, {"num_nodes": 2}):
        with pytest.raises(InvalidConfig, match="one machine with 2") as caught:
            plan_here(job(resources=other), here)
        assert caught.value.reason == "PLAN_TOO_LARGE"


def test_the_layout_gives_each_process_its_variables(tmp_path: Path) -> None:
    config = job(run="planned", **SHARED)
    plan = plan_devices(config, (node(1),))
    with open_run(tmp_path, config, fresh=False) as run_dir:
        ports = {name: 1 for each in plan.processes for name in (each.name, f"{each.name}_rest")}
        devices = {each.name: each.variables for each in plan.processes}
        layout = Layout(config=config, run_dir=run_dir, ports=ports, devices=devices)
        visible = {name: layout.spec(name).environment["CUDA_VISIBLE_DEVICES"] for name in devices}
    assert (visible.pop("trainer"), visible.pop("inference")) == ("0", "0")
    assert set(visible.values()) == {""}


def test_the_plan_of_the_docs_is_as_printed() -> None:
    page = (Path(__file__).parents[3] / "docs" / "scale.md").read_text("utf-8")
    config, lines = (
        page.split(f"<!-- test: {name} -->\n```{kind}\n")[1].split("```")[0]
        for name, kind in (("device_plan", "toml"), ("device_plan_lines", "text"))
    )
    assert plan_of(tomllib.loads(config)).lines() == lines.splitlines()
    smaller = tomllib.loads(config)
    smaller["resources"]["gpus_per_node"] = 6
    with pytest.raises(InvalidConfig) as caught:
        plan_of(smaller)
    assert caught.value.message.split(". ")[1].rstrip(".") in page


def test_config_check_and_print_show_a_plan_for_another_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = tmp_path / "job.toml"
    path.write_text('store = "memory"\n[train]\ndevice = "cuda"\n')
    for command in ("check", "print"):
        assert main(["config", command, str(path), "--set", "resources.gpus_per_node=2"]) == 0
        assert "inference    node 0  CUDA_VISIBLE_DEVICES=1\n" in capsys.readouterr().out
    assert main(["config", "check", str(path), "--set", "resources.gpus_per_node=1"]) == 2
    assert "trainer 1 + inference 1 = 2 of 1" in capsys.readouterr().err
    assert main(["config", "print", str(path)]) == 0
    assert "# Devices: trainer has no room" in capsys.readouterr().out


def reasons_of(**values: Any) -> dict[Any, str]:
    """The reasons of a job's mistakes, each with what it says."""
    mistakes = mistakes_in(parse_config(values, source="job.toml"))
    return {mistake.reason: str(mistake) for mistake in mistakes}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


@pytest.mark.usefixtures("one_gpu")
def test_adapters_in_float32_are_refused_where_vllm_computes_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapters = {"max_adapters": 2}
    says = reasons_of(engine="vllm", inference=adapters)[Reason.ADAPTERS_NEED_16_BITS]
    assert "max_adapters is 2" in says
    assert 'dtype = "bfloat16" in [inference]' in says
    fits: list[dict[str, Any]] = [
        {"inference": adapters | {"dtype": "bfloat16"}},
        {"inference": adapters, "dtype": "bfloat16"},
        {"inference": {}},
        {"inference": adapters, "engine": "transformers"},
    ]
    for values in fits:
        assert Reason.ADAPTERS_NEED_16_BITS not in reasons_of(**{"engine": "vllm", **values})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Reason.ADAPTERS_NEED_16_BITS not in reasons_of(engine="vllm", inference=adapters)


DRIVER = """#!/bin/sh
case "$*" in
  *compute-apps*) cat "$DRIVER_FOLDER/users" ;;
  *) cat "$DRIVER_FOLDER/gpus"; exit "$(cat "$DRIVER_FOLDER/code")" ;;
esac
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with a driver: call it with what nvidia-smi says of GPUs and of their users."""
    folder = tmp_path / "driver"
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(DRIVER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("DRIVER_FOLDER", str(folder))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(gpus_module, "_FOLDER", folder)
    monkeypatch.setattr(preflight, "_look", lambda _: SimpleNamespace(returncode=0, stdout=""))

    def says(gpus: str, users: str = "", *, code: int = 0) -> None:
        for name, text in (("gpus", gpus), ("users", users), ("code", str(code))):
            (folder / name).write_text(text)

    says(EMPTY_CARD)
    return says


EMPTY_CARD = "0, GPU-3f2a, NVIDIA H100 80GB HBM3, 81559, 81004\n"
FULL_CARD = "0, GPU-3f2a, NVIDIA H100 80GB HBM3, 81559, 300\n"
BESIDE: dict[str, Any] = {"engine": "vllm", **ON_ONE_GPU}


def test_a_gpu_with_room_is_no_mistake(driver: Any) -> None:
    reasons = reasons_of(**BESIDE).keys()
    assert not {Reason.NO_DEVICE, Reason.GPU_MEMORY_TAKEN, Reason.GPU_IN_USE} & reasons


def test_a_gpu_that_somebody_else_fills_is_said_with_the_figures(driver: Any) -> None:
    driver(FULL_CARD, "GPU-3f2a, 4711, 61440\nGPU-other, 1, 5\n")
    says = reasons_of(**BESIDE)[Reason.GPU_MEMORY_TAKEN]
    assert "GPU 0 (NVIDIA H100 80GB HBM3)" in says
    assert "0.3 of its 79.6 GiB are free" in says
    assert "trainer 0.4 + inference 0.4" in says
    assert "used by process 4711 with 60.0 GiB." in says


def test_a_share_of_a_gpu_is_compared_as_vllm_does(driver: Any) -> None:
    driver("0, GPU-3f2a, NVIDIA H100 80GB HBM3, 81559, 30000\n")
    share = {"inference": {"engine": {"gpu_memory_utilization": 0.5}}}
    says = reasons_of(**BESIDE, **share)[Reason.GPU_MEMORY_TAKEN]
    assert "inference 39.8" in says
    assert Reason.GPU_MEMORY_TAKEN not in reasons_of(**BESIDE)


def test_a_driver_without_a_device_is_said_in_its_words(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, code in (("No devices were found\n", 6), ("Driver/library version mismatch", 18)):
        driver(text, code=code)
        says = reasons_of(**BESIDE)[Reason.NO_DEVICE]
        assert text.strip() in says
        assert "--gpus all" in says
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert Reason.NO_DEVICE in reasons_of(**BESIDE)


def test_a_gpu_that_the_driver_does_not_list_is_named(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("3", "GPU-77"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
        says = reasons_of(**BESIDE)[Reason.NO_DEVICE]
        assert f"CUDA_VISIBLE_DEVICES names GPU {name}" in says
        assert "the driver lists GPU 0 (NVIDIA H100 80GB HBM3)" in says
    for name in ("GPU-3f", "MIG-1/2"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
        assert Reason.NO_DEVICE not in reasons_of(**BESIDE)


def test_a_torch_that_reaches_no_gpu_is_said(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        preflight, "_look", lambda _: SimpleNamespace(returncode=0, stdout=cuda_problem())
    )
    if torch.cuda.is_available():
        pytest.skip("this torch reaches a GPU")
    says = reasons_of(**BESIDE)[Reason.NO_DEVICE]
    assert "torch reaches none" in says


def test_two_jobs_on_one_gpu_are_refused_unless_both_share(driver: Any) -> None:
    alone = {"engine": "vllm"}
    gpus = driver_lists() or ()
    with hold(["0"], gpus, run="first", shares=False):
        for values in (alone, BESIDE):
            says = reasons_of(**values)[Reason.GPU_IN_USE]
            assert f"in use by run first of process {os.getpid()}" in says
            assert "79.1 of its 79.6 GiB are free" in says
    with hold(["GPU-3f2a"], gpus, run="second", shares=True):
        assert Reason.GPU_IN_USE in reasons_of(**alone), "by whatever name it goes"
        assert Reason.GPU_IN_USE not in reasons_of(**BESIDE)
    assert Reason.GPU_IN_USE not in reasons_of(**alone)


def test_a_stack_keeps_its_gpus_while_it_runs(driver: Any, tmp_path: Path) -> None:
    config = job(**BESIDE)
    with open_run(tmp_path / "runs", config, fresh=False) as run_dir:
        devices = {"trainer": {"CUDA_VISIBLE_DEVICES": "0"}, "scorer": {"CUDA_VISIBLE_DEVICES": ""}}
        layout = Layout(config=config, run_dir=run_dir, ports={}, devices=devices)
        with running._holding_gpus(layout):
            assert Reason.GPU_IN_USE in reasons_of(engine="vllm")
    assert Reason.GPU_IN_USE not in reasons_of(engine="vllm")


def test_by_turns_the_larger_process_alone_needs_room(driver: Any) -> None:
    config = job(**SHARED)
    plan = plan_devices(config, (node(1),))
    (needs,) = card_needs(config, plan, total=0).values()
    assert len(needs) == 1


def test_a_model_counts_with_what_it_surely_takes(driver: Any, tmp_path: Path) -> None:
    model = make_family("qwen2", tmp_path / "model")
    config = job(**BESIDE, model={"directory": str(model)}, inference={"kv_cache_mib": 40960})
    plan = plan_devices(config, (node(1),))
    (needs,) = card_needs(config, plan, total=0).values()
    assert needs["inference"] > 0.8 * 40 * 2**30
    assert 0.4 * 2**30 < needs["trainer"] < needs["inference"]
