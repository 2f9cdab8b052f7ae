"""Export a published policy as a model directory.

transformers, vLLM and PEFT load the result: config, generation config, tokenizer, chat template and
safetensors of the whole policy. A published LoRA adapter is exported as a PEFT directory, or merged
into the weights that it was trained on.
"""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import rich.progress
from dialoop.errors import AlreadyExists, InvalidConfig, InvalidInput, NotFound
from dialoop.reasons import Reason
from dialoop_learning.rl.staleness import publish_order, version_of_name
from rich.console import Console
from safetensors import SafetensorError, safe_open

from dialoop_ops.cli.console import say, say_json
from dialoop_ops.runs.run_config import find_run

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

WEIGHTS, ADAPTER, ADAPTER_CONFIG = (
    "model.safetensors",
    "adapter_model.safetensors",
    "adapter_config.json",
)
_LATEST = "latest"
_COPY_BYTES = 1 << 24
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_WEIGHT_INDEX = ".index.json"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicies:
    """A run's policies on disk, and the model directory it started from."""

    policies: Path
    model_dir: Path

    @classmethod
    def of(cls, run_dir: Path) -> RunPolicies:
        """Return the policies of a run's directory; raise NotFound when it is not a run."""
        mark = run_dir / "run.json"
        if not mark.is_file():
            raise NotFound(
                f"{run_dir} is not a run of Dialoop (it has no {mark.name}).",
                reason=Reason.RUN_NOT_FOUND,
                remedy="Give the directory of a run, such as runs/demo.",
            )
        directory = json.loads(mark.read_text("utf-8"))["config"]["model"]["directory"]
        return cls(
            policies=run_dir / "policies",
            model_dir=Path(directory) if directory else run_dir / "model",
        )

    @property
    def versions(self) -> tuple[str, ...]:
        """Return the published versions that are still on disk, oldest first."""
        folders = {
            path.parent for name in (WEIGHTS, ADAPTER) for path in self.policies.glob(f"*/{name}")
        }
        return tuple(path.name for path in sorted(folders, key=_place_of))

    def policy(self, version: str) -> Path:
        """Return the directory of a version, of `latest`, or of a number that one lineage has.

        Raises NotFound (POLICY_NOT_FOUND) when no policy or several match.
        """
        versions = self.versions
        matches = [name for name in versions if name == version or name.endswith(f"-{version}")]
        if version == _LATEST and versions:
            matches = [self._latest(versions)]
        if version in versions:
            matches = [version]
        if len(matches) != 1:
            if version in self._published_versions():
                raise NotFound(
                    f"The policy {version} was deleted to save disk space.",
                    reason=Reason.POLICY_GONE,
                    remedy=f"Use one of: {', '.join(versions)}. To keep all of a later run, "
                    "set keep_policies = 0 in [train].",
                )
            raise NotFound(
                f"{self.policies} has {'several' if matches else 'no'} policies {version!r}.",
                reason=Reason.POLICY_NOT_FOUND,
                remedy=f"Use one of: {', '.join(versions) or 'none'}.",
            )
        return self.policies / matches[0]

    def _published_versions(self) -> frozenset[str]:
        """Return every version that the run has published, by its metrics."""
        metrics = self.policies.parent / "metrics.jsonl"
        if not metrics.is_file():
            return frozenset()
        with metrics.open(encoding="utf-8", newline="\n") as lines:
            rows = [json.loads(line) for line in lines if '"kind": "publish"' in line]
        return frozenset(f"{row['lineage']}-{row['policy_version']}" for row in rows)

    def _latest(self, versions: Sequence[str]) -> str:
        try:
            latest = json.loads((self.policies / "latest.json").read_text("utf-8"))
        except (OSError, ValueError):  # it is missing, or a disk damaged it
            latest = {}
        name = str(Path(str(latest.get("path", ""))).parent)
        return name if name in versions else versions[-1]


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
            _write_adapter(policy, run.model_dir, temporary)
        elif is_adapter:
            _write_merged(policy, run.model_dir, weights, temporary)
        else:
            _write_model(policy / WEIGHTS, run.model_dir, temporary)
        if out.is_dir():
            out.rmdir()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _write_model(weights: Path, model_dir: Path, out: Path) -> None:
    """Copy the model directory with `weights` in place of its own."""
    out.mkdir(parents=True)
    for file in model_dir.iterdir():
        is_weights = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(_WEIGHT_INDEX)
        if file.is_file() and not is_weights:
            shutil.copyfile(file, out / file.name)
        elif file.is_dir() and file.name == "additional_chat_templates":
            shutil.copytree(file, out / file.name)
    copy_with_bar(weights, out / WEIGHTS, Console(stderr=True))
    _write_dtype(out / "config.json", _dtype(weights))


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


def _write_adapter(policy: Path, model_dir: Path, out: Path) -> None:
    out.mkdir(parents=True)
    shutil.copyfile(policy / ADAPTER, out / ADAPTER)
    config = json.loads((policy / ADAPTER_CONFIG).read_text("utf-8"))
    config["base_model_name_or_path"] = config.get("base_model_name_or_path") or str(
        model_dir.resolve()
    )
    config["task_type"] = config.get("task_type") or "CAUSAL_LM"
    (out / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_merged(policy: Path, model_dir: Path, base: Path | None, out: Path) -> None:
    """Write the model with the adapter added, by the arithmetic of the replicas that served it."""
    from dialoop_learning.lora.base_weights import BaseWeights, adapted_tensors
    from safetensors.torch import save_file

    weights = BaseWeights.of(model_dir)
    if base is not None:
        weights = replace(weights, files=(base,))
    scratch = out.with_name(f"{out.name}.merged")
    try:
        tensors = dict(adapted_tensors(policy, weights, digest=weights.digest()))
        save_file(tensors, scratch, metadata={"format": "pt"})
        _write_model(scratch, model_dir, out)
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


def _place_of(policy: Path) -> tuple[tuple[int, int], str]:
    return publish_order(version_of_name(policy.name)), policy.name


def export(arguments: argparse.Namespace) -> int:
    """Do what `dialoop export` says, and return 0."""
    run = RunPolicies.of(find_run(arguments.run, arguments.root))
    out = export_policy(
        run, arguments.version, arguments.directory, merged=arguments.merged, base=arguments.base
    )
    policy = run.policy(arguments.version).name
    if arguments.json:
        say_json({"policy": policy, "directory": str(out)})
    else:
        say(f"{policy} -> {out}")
    return 0
