"""Defaults that follow from the model and the machine, under the keys that a job file sets.

with_derived(values)["inference"]                    # its max_model_len is 8192, say
derived_from(values)["inference.max_model_len"]      # 511 of a model with 512, for vLLM

Lengths follow from config.json of `model.directory`. The demo's tiny model has those of the tables.
A device that is "auto" or left out is a GPU where there are enough for each process.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dialoop_services.config.engines import facts_of_engine
from dialoop_services.config.memory import BYTES_OF, ModelShape, key_bytes

LONGEST, LONGEST_ANSWER = 8192, 1024
AUTO, VISIBLE = "auto", "CUDA_VISIBLE_DEVICES"
DEVICES = ("train.device", "inference.device", "scorer.device")
LENGTHS = ("inference.max_model_len", "collector.max_new_tokens", "inference.kv_cache_mib")
_CACHED_TOKENS, _LEAST_CACHE_MIB = 32768, 64
_POSITIONS = ("max_position_embeddings", "n_positions")
_MODEL = "the model's config.json"


@dataclass(frozen=True, slots=True)
class Derived:
    """A value that no file names, and what it follows from."""

    value: int | str
    source: str


def with_derived(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a job file with those that follow from its model and this machine."""
    whole = dict(values)
    for path, derived in derived_from(values).items():
        table, key = path.split(".")
        inner = whole.get(table, {})
        if isinstance(inner, BaseModel):
            whole[table] = inner.model_copy(update={key: derived.value})
        else:
            whole[table] = {**inner, key: derived.value}
    return whole


def derived_from(values: Mapping[str, Any]) -> dict[str, Derived]:
    """Return each key that follows from the model or the machine, as the file does not name it."""
    tables = {name: _table(values.get(name)) for name in ("model", "inference", "collector")}
    tables |= {name: _table(values.get(name)) for name in ("train", "scorer", "resources")}
    if any(table is None for table in tables.values()):
        return {}  # the check of the file names it
    job = {name: table or {} for name, table in tables.items()}
    engine = values.get("engine", "vllm")
    if not isinstance(engine, str):
        return {}
    lengths = lengths_of(job, engine, str(values.get("dtype", "float32")))
    return lengths | _devices(job, engine, values)


def _table(value: Any) -> dict[str, Any] | None:
    """Return what a table sets; None where it is no table."""
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in value.model_fields_set}
    return dict(value or {}) if value is None or isinstance(value, Mapping) else None


def lengths_of(job: Mapping[str, dict[str, Any]], engine: str, dtype: str) -> dict[str, Derived]:
    """Return the lengths that follow from config.json, of those that the tables do not set."""
    fields = _model_config(job["model"].get("directory"))
    if not fields:
        return {}
    derived = {}
    inference, collector = job["inference"], job["collector"]
    longest = inference.get("max_model_len")
    if longest is None:
        positions = next((fields[n] for n in _POSITIONS if isinstance(fields.get(n), int)), LONGEST)
        longest = max(2, min(positions - facts_of_engine(engine).num_spare_positions, LONGEST))
        derived["inference.max_model_len"] = Derived(longest, _MODEL)
    if not isinstance(longest, int):
        return derived
    if "max_new_tokens" not in collector:
        answer = max(1, min(LONGEST_ANSWER, longest // 2))
        derived["collector.max_new_tokens"] = Derived(answer, "half of max_model_len")
    shape = ModelShape.of(fields, num_parameters=1)
    is_fixed = "gpu_memory_utilization" not in (_table(inference.get("engine")) or {})
    if engine == "vllm" and shape and is_fixed and "kv_cache_mib" not in inference:
        number = inference.get("max_num_seqs", 64)
        number = number if isinstance(number, int) else 1
        num_tokens = min(number * longest, max(longest, _CACHED_TOKENS))
        each = str(inference.get("dtype") or dtype)
        each = each if each in BYTES_OF else "float32"
        size = key_bytes(shape, dtype=each, num_tokens=num_tokens)
        cache = max(_LEAST_CACHE_MIB, math.ceil(size / 2**20))
        source = f"keys and values of {num_tokens} tokens"
        derived["inference.kv_cache_mib"] = Derived(cache, source)
    return derived


def _model_config(directory: Any) -> dict[str, Any]:
    """Return config.json's part about text; {} where it cannot be read here."""
    if not (directory and isinstance(directory, str)):
        return {}
    try:
        content = json.loads((Path(directory) / "config.json").read_text("utf-8"))
        return dict(content.get("text_config") or content)
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _devices(
    job: Mapping[str, dict[str, Any]], engine: str, values: Mapping[str, Any]
) -> dict[str, Derived]:
    """Choose a device for each process that is told none: a GPU where one is left for it.

    vLLM's replicas have theirs already. Then the trainer chooses, then the transformers engine, and
    last the reference model, which goes where the trainer is. By turns, or where processes may
    overlap, no process needs a GPU of its own.
    """
    num_gpus, where = _num_gpus(job["resources"], _table(values.get("launch")) or {})
    train, inference, scorer = job["train"], job["inference"], job["scorer"]
    is_told = facts_of_engine(engine).takes_device
    together = values.get("placement") == "shared" or inference.get("data_plane") == "ipc"
    overlaps = bool(job["resources"].get("overlap"))
    replicas = _whole(inference.get("num_replicas")) * _whole(inference.get("tensor_parallel_size"))
    own = _table(job["resources"].get("inference")) or {}
    left = num_gpus - (0 if is_told or own.get("devices") == 0 else replicas)
    chosen: dict[str, Derived] = {}

    def choose(path: str, named: Any, number: int, *, shares: bool, beside: Any = None) -> str:
        """Return the device of a kind of process, and note the GPUs that it takes.

        `beside`: the device of those that it shares one with.
        """
        nonlocal left
        device = named
        if named in (None, AUTO):
            fits = num_gpus and number <= (num_gpus if shares else left) and beside != "cpu"
            device = "cuda" if fits else "cpu"
            full = f", of which {max(0, left)} are left for {number}" if num_gpus else ""
            chosen[path] = Derived(device, f"{where}{full if device == 'cpu' else ''}")
        if device != "cpu" and not shares:
            left -= number
        return str(device)

    number = _whole(train.get("num_processes"))
    if together and is_told:  # then both compute on the same devices
        number = max(number, replicas)
    replica = inference.get("device") if together and is_told else None
    device = choose(
        "train.device", train.get("device"), number, shares=overlaps or together, beside=replica
    )
    if is_told:
        beside = device if together else None
        choose(
            "inference.device", inference.get("device"), replicas, shares=overlaps, beside=beside
        )
    elif inference.get("device", AUTO) == AUTO:  # the engine's package decides
        chosen["inference.device"] = Derived("cpu", f"{engine} chooses its own")
    refers = any(scorer.get(name) for name in ("reference_logprobs", "kl_coefficient", "models"))
    if refers and device != "cpu":
        choose("scorer.device", scorer.get("device"), 1, shares=overlaps)
    elif scorer.get("device", AUTO) == AUTO:
        chosen["scorer.device"] = Derived("cpu", "as the trainer" if refers else "it has no model")
    return chosen


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the NVIDIA GPUs that a process with these variables sees."""
    visible = environment.get(VISIBLE)
    if visible is None:
        found = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdecimal()]
        return tuple(str(index) for index in range(len(found)))
    names: list[str] = []
    for name in map(str.strip, visible.split(",")):
        if name in ("", "-1"):
            break  # CUDA ignores what follows a name that is none
        names.append(name)
    return tuple(names)


def device_here() -> str:
    """Return the device of a process that is told none: a GPU where it sees one."""
    return "cuda" if visible_gpus(os.environ) else "cpu"


def _num_gpus(resources: Mapping[str, Any], launch: Mapping[str, Any]) -> tuple[int, str]:
    """Return how many GPUs the job may have, and where they are from."""
    named = resources.get("gpus_per_node")
    if isinstance(named, int):
        number = named * _whole(resources.get("num_nodes"))
        return number, f"[resources] has {number or 'no'} GPUs"
    if launch.get("on", "local") != "local":
        return 0, "[resources] names no GPUs"
    number = len(visible_gpus(os.environ))
    return number, f"this machine has {number or 'no'} GPU{'s'[: number != 1]}"


def _whole(value: Any) -> int:
    """Return a number that a file may name, 1 where it does not."""
    return value if isinstance(value, int) else 1
