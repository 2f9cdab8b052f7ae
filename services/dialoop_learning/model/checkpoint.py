"""Whether a model directory holds exactly what its architecture has, found without its weights.

python -m dialoop_learning.model.checkpoint DIRECTORY    # or --cuda

prints one JSON object: {} for a checkpoint that is whole, else `reason`, `message` and `remedy`.
transformers draws tensors that a checkpoint lacks at random and leaves out those that it does not
know, with a warning alone. A run would train from there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from dialoop.errors import DialoopError, InvalidConfig
from dialoop.reasons import Reason
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from dialoop_learning.model.weight_files import is_tied, some_of


def save_model(model: transformers.PreTrainedModel, directory: Path, **options: Any) -> None:
    """Write a model that everybody may read whom the umask lets.

    safetensors makes its files with mode 600, whatever the umask: a container, which has another
    user, could not start from them.
    """
    model.save_pretrained(directory, **options)
    for weights in directory.glob("*.safetensors"):
        shutil.copymode(directory / "config.json", weights)


def require_whole(directory: Path) -> None:
    """Raise InvalidConfig unless transformers knows the architecture and finds each of its tensors.

    The model is built on torch's meta device: no weight is read. The tensors of a quantized
    checkpoint are not compared.
    Reasons: MODEL_UNKNOWN, MODEL_TENSORS_DIFFER.
    """
    is_tied(directory)  # raises where files and index, or head and config.json, contradict
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (ValueError, KeyError) as error:
        raise _unknown(directory, str(error).partition("\n")[0]) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _unknown(directory, f"{config.model_type!r} is no causal language model")
    if getattr(config, "quantization_config", None):
        return  # its files hold other tensors, which the quantizer converts when it loads them
    try:
        _, loading = AutoModelForCausalLM.from_pretrained(
            directory,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
        )
    except Exception as error:  # transformers raises many kinds for a file that it cannot convert
        raise _differ(directory, str(error).partition("\n")[0]) from error
    problems = [
        f"{what} {some_of(names)}"
        for what, names in (
            ("lacks", loading["missing_keys"]),
            ("holds what the architecture has no place for:", loading["unexpected_keys"]),
            ("holds in another shape", {name for name, *_ in loading["mismatched_keys"]}),
        )
        if names
    ]
    if problems:
        raise _differ(directory, "it " + "; it ".join(problems))


def cuda_problem() -> str:
    """Return why torch reaches no GPU; empty where it does."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA."
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:  # of a driver that is too old, or a device that is lost
        return str(error).partition("\n")[0]
    return ""


def _unknown(directory: Path, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"transformers {transformers.__version__} has no class for the model in {directory}: "
        f"{why}.",
        reason=Reason.MODEL_UNKNOWN,
        remedy="Use a decoder of one of the families in docs/families.md.",
    )


def _differ(directory: Path, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"The checkpoint in {directory} is not the one that its config.json describes: {why}.",
        reason=Reason.MODEL_TENSORS_DIFFER,
        remedy="Save the whole model there with model.save_pretrained(directory).",
    )


def main() -> None:
    """Check the directory of the command line and print what is wrong as JSON."""
    parser = argparse.ArgumentParser(description="Check that a model directory is whole.")
    parser.add_argument("directory", type=Path, nargs="?", default=Path())
    parser.add_argument("--cuda", action="store_true", help="say why torch reaches no GPU instead")
    arguments = parser.parse_args()
    if arguments.cuda:
        sys.stdout.write(cuda_problem())
        return
    problem = {}
    try:
        require_whole(arguments.directory)
    except DialoopError as error:
        problem = {
            "reason": str(error.reason),
            "message": error.message,
            "remedy": error.remedy,
        }
    sys.stdout.write(json.dumps(problem) + "\n")


if __name__ == "__main__":
    main()
