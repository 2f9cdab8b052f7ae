"""What a job will need, said before it starts: memory of each process, bytes of a publish, time.

`estimate_of` returns None where the model's sizes are not known; `dialoop config check` prints the
estimate's `lines`.

The formulas are in `config/memory.py`. They count a CPU's memory; of processes on GPUs the same
bytes lie on the device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dialoop.errors import DialoopError, InvalidConfig
from dialoop.import_paths import nearest
from dialoop.reasons import Reason
from dialoop_learning.model.weight_files import is_tied, model_shapes, num_parameters
from dialoop_services.config.memory import (
    BYTES_OF,
    PROCESS_BYTES,
    VLLM_BYTES,
    ModelShape,
    Parts,
    Training,
    engine_memory,
    key_bytes,
    training_memory,
    training_products,
)
from dialoop_services.config.tables import DEVICE_PLANES, published_dtype

if TYPE_CHECKING:
    from dialoop_services.config.job import JobConfig
    from dialoop_services.config.tables import TrainSection

    from dialoop_ops.stack.devices import DevicePlan

_NUM_CHECKPOINTS = 3  # the newest two, and the one that is being written
_OUTER = {"embed_tokens", "lm_head"}
_NUM_PUBLISHED = 2  # in shared memory: the newest, and the one that is being written
_GIB, _MIB = 2**30, 2**20
_NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_MANY_CARDS, _FAST = 8, 10_000
_SHORTEST = 128  # tokens of a context that is worth to name
_CONTEXT_BYTES, _SURE = 0.4 * _GIB, 0.8
"""What CUDA itself takes of a GPU for a process, and the part of an estimate that a process
surely takes: trainers took .85 to 1.05 of theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes of each process by its name, of a publish, and the products of a train step.

    publish_bytes: of the file, in published_dtype. published_bytes: of what lies in the machine's
    memory of them.
    step_products: floating-point operations of one train step on one process, if every trajectory
    is as long as the context, max_model_len. row_tokens: of the longest row. mesh: dp_replicate,
    dp_shard and cp. on_gpus: processes beside the trainer whose model lies on a GPU. elsewhere:
    processes on other machines. sends_changes: publishes are deltas. num_policies: that may lie on
    the disk at a time.
    """

    processes: Mapping[str, Parts]
    publish_bytes: int
    published_dtype: str
    published_bytes: int
    step_products: float
    row_tokens: int
    max_model_len: int
    training: Training
    mesh: tuple[int, int, int]
    shape: ModelShape
    on_gpus: frozenset[str]
    elsewhere: frozenset[str]
    sends_changes: bool
    num_policies: int

    @property
    def checkpoint_bytes(self) -> int:
        """Return the bytes of a checkpoint: what is trained, and two numbers of AdamW for each."""
        trained = self.training.num_trained
        number = self.shape.num_parameters if trained is None else trained
        return 3 * number * BYTES_OF[self.training.dtype]

    @property
    def disk_bytes(self) -> int:
        """Return the bytes of policies and checkpoints that lie on the disk at a time."""
        return self.num_policies * self.publish_bytes + _NUM_CHECKPOINTS * self.checkpoint_bytes

    @property
    def total(self) -> int:
        """Return the bytes of all processes and of the published policies."""
        return sum(parts.total for parts in self.processes.values()) + self.published_bytes

    @property
    def host_bytes(self) -> int:
        """Return the bytes that a job whose trainer is on the CPU needs of the machine's memory."""
        on_gpus = sum(self.processes[name].total - PROCESS_BYTES for name in self.on_gpus)
        return self.total - on_gpus - sum(self.processes[name].total for name in self.elsewhere)

    def lines(self, *, gflops: float = 0.0) -> list[str]:
        """Return the estimate as text; the time with the rate of this machine, if it is given."""
        alike = _alike(self.processes)
        width = max(map(len, alike))
        lines = [
            f"memory   {names:<{width}}  {parts.total / _GIB:6.2f} GiB{each} = {parts}"
            for names, (each, parts) in alike.items()
        ]
        if self.training.num_processes > 1 or max(self.mesh) > 1:
            replicate, shard, context = self.mesh
            lines.insert(
                0,
                f"mesh     dp_replicate {replicate} x dp_shard {shard} x cp {context}: one copy's "
                f"weights are divided among {self.training.num_processes} processes",
            )
        shared = f" + {self.published_bytes / _GIB:.2f} published" if self.published_bytes else ""
        lines.append(
            f"memory   {'all':<{width}}  {self.total / _GIB:6.2f} GiB{shared and ', of these'}"
            f"{shared.removeprefix(' +')}"
        )
        lines.append(
            f"publish  {self.publish_bytes / _MIB:.1f} MiB each time ({self.what_is_published})"
            f"{', or what changed since the last one' if self.sends_changes else ''}"
        )
        lines.append(
            f"disk     {self.disk_bytes / _GIB:.2f} GiB at most = {self.num_policies} policies + "
            f"{_NUM_CHECKPOINTS} checkpoints of {self.checkpoint_bytes / _MIB:.1f} MiB"
        )
        products = f"{self.step_products / 1e12:.1f} Tflop of each process of the trainer"
        if max(self.mesh) == 1:
            products = f"{self.step_products / 1e12:.1f} Tflop of the trainer"
        time = ""
        if gflops:
            rate = f"{gflops / 1e3:.0f} Tflop/s" if gflops > _FAST else f"{gflops:.0f} Gflop/s"
            time = f", {span(self.step_products / gflops / 1e9)} at {rate}"
        lines.append(
            f"step     at most {products}{time}, if every trajectory has {self.max_model_len} "
            "tokens"
        )
        return lines

    @property
    def what_is_published(self) -> str:
        """Return how many numbers a publish has."""
        number = self.publish_bytes // BYTES_OF[self.published_dtype]
        what = "parameters" if number == self.shape.num_parameters else "of an adapter"
        return f"{number / 1e6:.1f} million {what} in {self.published_dtype}"


def _alike(processes: Mapping[str, Parts]) -> dict[str, tuple[str, Parts]]:
    """Return equal neighbours as one: "trainer-1 .. trainer-127"."""
    groups: list[list[str]] = []
    for name, parts in processes.items():
        if groups and processes[groups[-1][0]] == parts:
            groups[-1].append(name)
        else:
            groups.append([name])
    return {
        " .. ".join(dict.fromkeys((names[0], names[-1]))): (
            " each" if len(names) > 1 else "",
            processes[names[0]],
        )
        for names in groups
    }


def mesh_lines(config: JobConfig, *, room: float) -> list[str]:
    """Return what the trainer takes of a card of `room` bytes, and the smallest number that fits.

    None of a trainer on a CPU, or where the sizes of the model or of a card are not known.
    """
    here = estimate_of(config)
    if here is None or not room or config.train.device != "cuda":
        return []
    said = (
        f"card     the trainer takes {_whole(here) / _GIB:.1f} of {room / _GIB:.1f} GiB on each of "
        f"{config.train.num_nodes} x {config.train.num_processes} cards; the smallest that fits"
    )
    per_node = config.resources.gpus_per_node or config.train.num_processes
    sizes = [(1, 2**power) for power in range(per_node.bit_length()) if 2**power <= per_node]
    sizes += [(nodes, per_node) for nodes in _NODES]
    for nodes, processes in sizes:
        if nodes * processes % config.train.mesh.cp:
            continue
        mesh = config.train.mesh.model_copy(update={"dp_shard": "auto", "dp_replicate": 1})
        update = {"num_nodes": nodes, "num_processes": processes, "mesh": mesh}
        train = config.train.model_copy(update=update)
        smaller = estimate_of(config.model_copy(update={"train": train}))
        if smaller is not None and _whole(smaller) <= room:
            return [f"{said}: {nodes} x {processes}, {_whole(smaller) / _GIB:.1f} GiB each"]
    return [f"{said}: none up to {_NODES[-1]} x {per_node}: shorten rows, or raise cp"]


def _whole(estimate: Estimate) -> float:
    """Return all bytes of a process of the trainer on its card."""
    return _CONTEXT_BYTES + _card_bytes(estimate.processes["trainer"])


def _card_bytes(parts: Parts) -> int:
    """Return what of a process lies on its card."""
    return parts.total - parts.parts["process"]


def span(seconds: float) -> str:
    """Return a time as people say it: "40 s", "3.5 h", "6.7 days"."""
    for unit, length in (("days", 86400), ("h", 3600)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def card_lines(config: JobConfig, plan: DevicePlan, *, total: float | None) -> list[str]:
    """Return a line for each GPU of a plan with the bytes of each process there.

    total: bytes of a GPU, None where nobody says it. GPUs that hold the same are one line.
    """
    cards: dict[str, list[str]] = {}
    for (node, gpu), processes in card_needs(config, plan, total=total or 0).items():
        named = ((name, size) for name, size in processes.items())
        parts = " + ".join(f"{_shown(name)} {size / _GIB:.1f}" for name, size in named)
        of = f" of {total / _GIB:.1f}" if total else ""
        what = f"{sum(processes.values()) / _GIB:6.1f}{of} GiB: {parts}"
        cards.setdefault(what, []).append(f"{node}:{gpu}")
    return [f"card     {_listed(names)}  {what}" for what, names in cards.items()]


def _shown(process: str) -> str:
    """Return the name of a process; the trainer's on every node, which take the same."""
    return "trainer" if process.startswith("trainer") else process


def _listed(cards: list[str]) -> str:
    if len(cards) <= _MANY_CARDS:
        return " ".join(cards)
    return f"{cards[0]} .. {cards[-1]} ({len(cards)} cards)"


def estimate_of(config: JobConfig) -> Estimate | None:
    """Return what the job needs; None for the demo's tiny model, or one of unknown sizes."""
    directory = Path(config.model.directory)
    if not has_weights(config.model.directory):
        return None
    shape = ModelShape.of(fields_in(directory), num_parameters=num_parameters(directory))
    if shape is None:
        return None
    train, inference = config.train, config.inference
    longest = inference.max_model_len
    row_tokens = max(longest, train.row_tokens(longest))
    num_trajectories = train.groups_per_train_step * config.collector.group_size
    rows = max(1, num_trajectories * longest // row_tokens)
    training = Training(
        num_tokens=-(-row_tokens // train.mesh.cp),
        num_rows=-(-rows * train.mesh.cp // (train.num_minibatches * train.num_ranks)),
        dtype=config.dtype,
        autocast=train.autocast,
        num_trained=_num_of_adapter(config, directory) if config.model.lora_rank else None,
        recomputes=train.activation_checkpointing,
        num_processes=train.num_shards,
        is_cpu=train.device == "cpu",
    )
    adapts = config.model.publishes_adapters(inference.data_plane)
    sent = training.num_trained if adapts else None
    dtype = config.dtype if adapts else published_dtype(config.dtype, inference.dtype)
    publish = (shape.num_parameters if sent is None else sent) * BYTES_OF[dtype]
    of_row = training_products(shape, replace(training, num_tokens=row_tokens))
    trainer = training_memory(shape, training)
    processes = {f"trainer-{n}" if n else "trainer": trainer for n in range(train.num_ranks)}
    num_replicas = inference.num_replicas if train.mode == "rl" else 0
    engine = _memory_of_replica(config, shape, is_tied=is_tied(directory))
    replicas = {f"inference-{n}": engine for n in range(num_replicas)}
    processes |= replicas
    on_gpus = [*replicas] * (inference.device == "cuda")
    on_gpus += ["scorer"] * (config.scorer.device != "cpu")
    if config.scorer.needs_reference and config.scorer.reference_server is None:
        processes["scorer"] = engine_memory(
            _shape_of_reference(config, shape),
            process=PROCESS_BYTES,
            dtype=config.scorer.dtype,
            key_bytes=0,
        )
    return Estimate(
        processes=processes,
        publish_bytes=publish,
        published_dtype=dtype,
        published_bytes=_NUM_PUBLISHED * publish if inference.data_plane == "shared_memory" else 0,
        step_products=rows * of_row / train.num_ranks,
        row_tokens=row_tokens,
        max_model_len=longest,
        training=training,
        mesh=train.mesh.sizes(train.num_ranks),
        shape=shape,
        on_gpus=frozenset(on_gpus) & processes.keys(),
        elsewhere=frozenset(f"trainer-{n}" for n in range(train.num_processes, train.num_ranks)),
        sends_changes=not adapts and _sends_deltas(config),
        num_policies=_num_policies(train),
    )


def _sends_deltas(config: JobConfig) -> bool:
    """Return whether a publish of whole weights sends what changed, as its data plane does."""
    inference = config.inference
    carries_bytes = inference.data_plane not in ("shared_memory", *DEVICE_PLANES)
    return inference.deltas == "always" or (inference.deltas == "auto" and carries_bytes)


def _num_policies(train: TrainSection) -> int:
    """Return how many policies lie on the disk at most: one of each step, or those that stay."""
    every = train.num_steps + 1
    if not (train.keep_policies and train.keep_milestones):
        return every
    return min(every, 1 + train.keep_policies + train.keep_milestones + 1)


def warnings_for_disk(config: JobConfig, free: int) -> tuple[str, ...]:
    """Return a warning where policies and checkpoints need more than the `free` bytes of a disk."""
    with suppress(DialoopError):  # of a model that the preflight refuses
        estimate = estimate_of(config)
        if estimate is not None and estimate.disk_bytes > free:
            return (
                f"policies and checkpoints may take {estimate.disk_bytes / _GIB:.1f} GiB, and the "
                f"disk of runs/ has {free / _GIB:.1f} free: lower keep_policies and "
                "keep_milestones in [train], or make room",
            )
    return ()


def card_needs(
    config: JobConfig, plan: DevicePlan, *, total: float
) -> dict[tuple[int, str], dict[str, float]]:
    """Return for each GPU of a plan, by node and entry, what each process surely needs there.

    total: bytes of a GPU. A process by turns needs none of its own: the largest of them counts.
    """
    estimate = estimate_of(config)
    needs: dict[tuple[int, str], dict[str, float]] = {}
    for process in plan.processes:
        for rank, entry in enumerate(process.gpus):
            size = _on_device(config, estimate, process.name, rank=rank, total=total)
            needs.setdefault((process.node, entry), {})[process.name] = size
    if config.placement == "shared":
        needs = {
            entry: dict([max(sizes.items(), key=lambda item: item[1])])
            for entry, sizes in needs.items()
        }
    return needs


def what_fits(
    config: JobConfig, plan: DevicePlan, processes: Mapping[str, float], room: float
) -> str:
    """Return a sentence with changes under which the largest of the processes fits a GPU.

    processes: the bytes of each on the GPU. They are tried one after the other, and all together.
    """
    name = max(processes, key=lambda name: processes[name])
    others = sum(processes.values()) - processes[name]
    said: list[str] = []
    changed, size = config, processes[name]
    for table, key, value in _savings(config, plan, name):
        section = getattr(changed, table)
        if getattr(section, key) == value:
            continue
        changed = changed.model_copy(update={table: section.model_copy(update={key: value})})
        said = [each for each in said if not each.startswith(f"{key} ")]
        said.append(f"{key} = {json.dumps(value)} in [{table}]")
        size = _on_device(changed, estimate_of(changed), name, rank=0, total=room)
        if size + others <= room:
            break
    if not said:
        return "Take a smaller model, or a GPU with more memory."
    fits = "fits" if size + others <= room else "needs no less than that: take a smaller model"
    return f"With {' and '.join(said)} {name} takes {size / _GIB:.1f} GiB, and {fits}."


def _savings(
    config: JobConfig, plan: DevicePlan, process: str
) -> Iterator[tuple[str, str, str | int | bool]]:
    """Yield table, key and value of what takes memory from a process, the least change first."""
    if process.startswith("inference"):
        yield "inference", "dtype", "bfloat16"
        most = max(len(node.gpus) for node in plan.nodes)
        size = config.inference.tensor_parallel_size
        while (size := 2 * size) <= most:
            yield "inference", "tensor_parallel_size", size
        return
    if process == "scorer":
        yield "scorer", "dtype", "bfloat16"
        return
    yield "train", "activation_checkpointing", True
    yield "train", "autocast", "bfloat16"
    used = {(each.node, gpu) for each in plan.processes for gpu in each.gpus}
    most = max(len(node.gpus) for node in plan.nodes)
    free = sum(len(node.gpus) for node in plan.nodes) - len(used)
    room = config.train.num_ranks + free if config.placement == "split" else 0
    nodes, count = config.train.num_nodes, config.train.num_processes
    while 2 * count <= most and 2 * count * nodes <= room:
        count *= 2
        yield "train", "num_processes", count
    while 2 * nodes <= len(plan.nodes) and 2 * count * nodes <= room:
        nodes *= 2
        yield "train", "num_nodes", nodes
    yield "model", "lora_rank", config.model.lora_rank or 16


def _on_device(
    config: JobConfig, estimate: Estimate | None, process: str, *, rank: int, total: float
) -> float:
    """Return the bytes of a process on one of its GPUs."""
    share = config.inference.engine.get("gpu_memory_utilization")
    if process.startswith("inference") and config.engine == "vllm" and share:
        return float(share) * total  # vLLM demands so much when it starts
    name = process
    if process.startswith("trainer"):  # that of a node, of which this is the rank-th
        rank += int(process.partition("-")[2] or 0) * config.train.num_processes
        name = f"trainer-{rank}" if rank else "trainer"
    name = "inference-0" if name == "inference" else name
    parts = estimate.processes.get(name) if estimate else None
    model_bytes = _card_bytes(parts) if parts else 0
    return _CONTEXT_BYTES + _SURE * model_bytes


def fields_in(directory: Path) -> dict[str, Any]:
    """Return a model's config.json; of one that reads images too, the part about text.

    Raises InvalidConfig (MODEL_INCOMPLETE) where it is no JSON object.
    """
    try:
        content = json.loads((directory / "config.json").read_text("utf-8"))
        fields: dict[str, Any] = content.get("text_config", content)
    except (ValueError, AttributeError) as error:
        raise InvalidConfig(
            f"config.json of the model directory {directory} is no JSON object.",
            reason=Reason.MODEL_INCOMPLETE,
            remedy="Save the model there with model.save_pretrained(directory).",
        ) from error
    return fields


def has_weights(directory: str) -> bool:
    """Return whether the directory, which may be empty text, holds a model."""
    folder = Path(directory)
    is_model = bool(directory) and (folder / "config.json").is_file()
    return is_model and any(folder.glob("*.safetensors"))


def _shape_of_reference(config: JobConfig, policy: ModelShape) -> ModelShape:
    """Return the shape of the scorer's model; the policy's where that is it, or not known."""
    directory = Path(config.scorer.reference_model)
    if not has_weights(config.scorer.reference_model):
        return policy
    count = num_parameters(directory)
    return ModelShape.of(fields_in(directory), num_parameters=count) or policy


def _memory_of_replica(config: JobConfig, shape: ModelShape, *, is_tied: bool) -> Parts:
    """Return the memory of one inference replica."""
    inference, is_vllm = config.inference, config.engine == "vllm"
    dtype = inference.dtype or config.dtype
    num_groups, concurrent = config.collector.max_groups_in_flight, inference.max_num_seqs
    if num_groups != "auto":
        concurrent = min(concurrent, num_groups * config.collector.group_size)
    num_tokens = inference.max_model_len * concurrent
    keys = key_bytes(shape, dtype=dtype, num_tokens=num_tokens)
    memory = engine_memory(
        shape,
        process=VLLM_BYTES if is_vllm else PROCESS_BYTES,
        dtype=dtype,
        key_bytes=inference.kv_cache_mib << 20 if is_vllm else keys,
        num_devices=inference.num_devices,
        packs_head=is_vllm and config.train.device == "cpu" and is_tied,
    )
    if config.engine != "transformers" or not config.model.publishes_adapters(inference.data_plane):
        return memory
    added = shape.num_parameters * BYTES_OF[config.dtype]
    return Parts(parts={**memory.parts, "next policy": added})


def _num_of_adapter(config: JobConfig, directory: Path) -> int:
    """Return how many numbers the LoRA adapter has: rank x (inputs + outputs) of each layer."""
    total = 0
    for name, shape in model_shapes(directory).items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        is_target = module in config.model.lora_targets if config.model.lora_targets else True
        if len(shape) == 2 and name.endswith(".weight") and module not in _OUTER and is_target:
            total += config.model.lora_rank * sum(shape)
    return total


def require_targets(config: JobConfig) -> None:
    """Raise InvalidConfig (LORA_TARGET) for a name of lora_targets that no linear layer has.

    Names are those of matrices in the model's files; torch is not asked.
    """
    if not (config.model.lora_rank and config.model.lora_targets):
        return
    shapes = model_shapes(Path(config.model.directory))
    linear = {
        name.removesuffix(".weight").rpartition(".")[2]
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight")
    } - _OUTER
    unknown = sorted(set(config.model.lora_targets) - linear)
    # Fused layers have other names in files than in the model, which then says it when it starts.
    if unknown and not any(name.endswith(tuple(unknown)) for name in shapes):
        near = [name for name in map(partial(nearest, names=linear), unknown) if name]
        hint = f"Did you mean {', '.join(near)}? " if near else ""
        raise InvalidConfig(
            f"lora_targets names {', '.join(unknown)}, and the model has no such linear layer.",
            reason=Reason.LORA_TARGET,
            remedy=f"{hint}Set lora_targets in [model] to some of {', '.join(sorted(linear))}.",
        )


def _size_with(config: JobConfig, table: str, key: str, value: int) -> float:
    """Return the bytes of the machine that the job needs with another value of a key."""
    changed = getattr(config, table).model_copy(update={key: value})
    estimate = estimate_of(config.model_copy(update={table: changed}))
    return math.inf if estimate is None else estimate.host_bytes


def require_memory(config: JobConfig, available: float) -> None:
    """Raise InvalidConfig (ROW_LARGER_THAN_MEMORY) where the job needs more memory than there is.

    available: bytes of the machine. A trainer on a GPU is not checked.
    """
    estimate = estimate_of(config)
    if estimate is None or config.train.device != "cpu" or estimate.host_bytes <= available:
        return
    trainer = estimate.processes["trainer"]
    remedies = ["a shorter max_model_len in [inference]", "a smaller model"]
    length = estimate.row_tokens
    while (length := length // 2) >= _SHORTEST:
        if (size := _size_with(config, "inference", "max_model_len", length)) <= available:
            needs = f", which needs {size / _GIB:.1f} GiB"
            remedies[0] = f"max_model_len = {length} in [inference]{needs}"
            break
    if not estimate.training.recomputes:
        size = _size_with(config, "train", "activation_checkpointing", True)
        needs = f", which needs {size / _GIB:.1f} GiB"
        remedies.insert(0, f"activation_checkpointing = true in [train]{needs}")
    if not config.model.lora_rank:
        remedies.append("lora_rank in [model]")
    raise InvalidConfig(
        f"The job needs {estimate.host_bytes / _GIB:.1f} GiB of memory, and this machine has "
        f"{available / _GIB:.1f}. For rows of {estimate.row_tokens} tokens the trainer takes "
        f"{trainer.total / _GIB:.1f} GiB ({trainer}); one sequence is never split over processes.",
        reason=Reason.ROW_LARGER_THAN_MEMORY,
        remedy=f"Set {', '.join(remedies)}, or take a larger machine.",
    )
