"""Export a published policy as a model directory.

transformers, vLLM and PEFT load the result: config, generation config, tokenizer, chat template and
safetensors of the whole policy. A published LoRA adapter is exported as a PEFT directory, or merged
into the weights that it was trained on. Strings that end the run's answers are `stop_strings` of
the generation config, for which transformers' `generate` needs `tokenizer=` too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import uuid
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import rich.progress
from dialoop.errors import AlreadyExists, InvalidConfig, InvalidInput
from dialoop.reasons import Reason
from dialoop_learning.model.weight_files import ADAPTER_CONFIG
from rich.console import Console
from safetensors import SafetensorError, safe_open

from dialoop_ops.cli.console import say, say_json
from dialoop_ops.runs.policies import ADAPTER, WEIGHTS, RunPolicies
from dialoop_ops.runs.run_config import find_run

MAX_SHARD_BYTES = 5_000_000_000
"""Largest file of weights in an export; a larger policy is in several, with an index."""
_COPY_BYTES = 1 << 24
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_WEIGHT_INDEX = ".index.json"
_GENERATION_CONFIG = "generation_config.json"
_END_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def export_policy(
    run: RunPolicies, version: str, out: Path, *, merged: bool = False, base: str = ""
) -> Path:
    """Write the version to `out`, which appears whole or not at all, and return `out`.

    `merged` adds an adapter to the weights of `base` (a version; empty: the run's own model).
    Raises AlreadyExists, NotFound, or InvalidInput (NOT_AN_ADAPTER).
    """
    policy = run.policy(version)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise AlreadyExists(
            f"{out} exists already.", reason=Reason.EXPORT_EXISTS, remedy="Name a new directory."
        )
    is_adapter = (policy / ADAPTER).is_file()
    if merged and not is_adapter:
        raise InvalidInput(
            f"{policy.name} is a whole policy, so there is no adapter to merge.",
            reason=Reason.NOT_AN_ADAPTER,
            remedy="Leave --merged out.",
        )
    weights = run.policy(base) / WEIGHTS if base else None
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    try:
        if is_adapter and not merged:
            _write_adapter(policy, run, temporary)
        elif is_adapter:
            _write_merged(policy, run, weights, temporary)
        else:
            _write_model(policy / WEIGHTS, run, temporary)
        if out.is_dir():
            out.rmdir()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _write_model(weights: Path, run: RunPolicies, out: Path) -> None:
    """Copy the model directory with `weights` in place of its own."""
    dtype = _dtype(weights)
    _copy_companions(run, out)
    if weights.stat().st_size > MAX_SHARD_BYTES:
        from huggingface_hub import save_torch_state_dict
        from safetensors.torch import load_file

        mapped = load_file(weights)  # pages of it are read as they are written
        save_torch_state_dict(
            mapped, out, max_shard_size=MAX_SHARD_BYTES, metadata={"format": "pt"}
        )
    else:
        copy_with_bar(weights, out / WEIGHTS, Console(stderr=True))
    _write_dtype(out / "config.json", dtype)


def _copy_companions(run: RunPolicies, out: Path, *, without: Collection[str] = ()) -> None:
    """Copy what a model directory holds beside weights, and add the run's stop strings."""
    out.mkdir(parents=True)
    for file in run.model_dir.iterdir():
        is_weights = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(_WEIGHT_INDEX)
        if file.is_file() and not is_weights and file.name not in without:
            shutil.copyfile(file, out / file.name)
        elif file.is_dir() and file.name == "additional_chat_templates":
            shutil.copytree(file, out / file.name)
    if not run.stop:
        return
    path = out / _GENERATION_CONFIG
    if path.is_file():
        fields = json.loads(path.read_text("utf-8"))
    else:  # what transformers takes from config.json where there is no such file
        config = json.loads((run.model_dir / "config.json").read_text("utf-8"))
        fields = {key: config[key] for key in _END_KEYS if config.get(key) is not None}
    own = fields.get("stop_strings") or ()
    own = (own,) if isinstance(own, str) else own
    fields["stop_strings"] = list(dict.fromkeys((*own, *run.stop)))
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_with_bar(source: Path, target: Path, console: Console) -> None:
    """Copy a large file, with a bar and the time left where somebody looks."""
    disable = not console.is_terminal
    with (
        rich.progress.open(
            source, "rb", description=f"writing {target.name}", console=console, disable=disable
        ) as reader,
        target.open("wb") as writer,
    ):
        shutil.copyfileobj(reader, writer, _COPY_BYTES)


def _write_adapter(policy: Path, run: RunPolicies, out: Path) -> None:
    # With a config.json it would look like a whole model.
    _copy_companions(run, out, without=("config.json", "README.md"))
    shutil.copyfile(policy / ADAPTER, out / ADAPTER)
    config = json.loads((policy / ADAPTER_CONFIG).read_text("utf-8"))
    config["base_model_name_or_path"] = config.get("base_model_name_or_path") or str(
        run.model_dir.resolve()
    )
    config["task_type"] = config.get("task_type") or "CAUSAL_LM"
    (out / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_merged(policy: Path, run: RunPolicies, base: Path | None, out: Path) -> None:
    """Write the model with the adapter added, by the arithmetic of the replicas that served it."""
    from dialoop_learning.lora.base_weights import BaseWeights, adapted_tensors
    from safetensors.torch import save_file

    weights = BaseWeights.of(run.model_dir)
    if base is not None:
        weights = replace(weights, files=(base,))
    scratch = out.with_name(f"{out.name}.merged")
    try:
        tensors = dict(adapted_tensors(policy, weights, digest=weights.digest()))
        save_file(tensors, scratch, metadata={"format": "pt"})
        _write_model(scratch, run, out)
    finally:
        scratch.unlink(missing_ok=True)


def _dtype(weights: Path) -> str:
    """Return the dtype of the weights, as a config names it; "" if tensors differ."""
    try:
        with safe_open(weights, framework="pt") as file:
            dtypes = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InvalidConfig(
            f"{weights} is not a safetensors file ({error}).",
            reason=Reason.WEIGHTS_BROKEN,
            remedy="Export another version; the file of this one is incomplete.",
        ) from error
    return _DTYPES.get(dtypes.pop(), "") if len(dtypes) == 1 else ""


def _write_dtype(path: Path, dtype: str) -> None:
    config = json.loads(path.read_text("utf-8"))
    if dtype:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def export(arguments: argparse.Namespace) -> int:
    """Do what `dialoop export` says, and return 0."""
    run = RunPolicies.of(find_run(arguments.run, arguments.root))
    out = export_policy(
        run, arguments.version, arguments.directory, merged=arguments.merged, base=arguments.base
    )
    policy = run.policy(arguments.version).name
    if arguments.json:
        say_json({"policy": policy, "directory": str(out), "stop_strings": list(run.stop)})
    else:
        say(f"{policy} -> {out}")
        if run.stop:
            say(
                f"An answer ends at {' or '.join(map(json.dumps, run.stop))}: stop_strings in "
                f"{_GENERATION_CONFIG}, for which generate() needs tokenizer=."
            )
    return 0
