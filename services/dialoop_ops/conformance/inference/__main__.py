"""`python -m dialoop_ops.conformance.inference my_engines:MyEngine`: check an engine.

It prints a line for each check and exits with 1 if the engine breaks one. From Python, await
`check_engine` with the import path and a folder; each of its findings says whether it `is_ok`.

The kit writes a tiny model with random weights, or takes yours, and starts the engine on it, in
float32 unless --dtype says otherwise. It compares what the engine says with plain forward passes of
transformers in float32. What every engine has is checked always, and each `Supports...` protocol
where the engine has it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from dialoop.errors import DialoopError

from dialoop_ops.cli.play import options_of
from dialoop_ops.conformance.inference.bench import TOLERANCES
from dialoop_ops.conformance.inference.running import check_engine


def main() -> int:
    """Check the engine of the command line; 0 if it passes, 1 if not, 2 if it does not start."""
    parser = argparse.ArgumentParser(description="Check an engine against what engines must do.")
    parser.add_argument("engine", help="a built-in name, or module:Class")
    parser.add_argument(
        "--model-dir", type=Path, help="a model to check with; a tiny one if absent"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of [inference.engine], as url=http://127.0.0.1:8000/v1",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="of the transformers engine; others choose theirs",
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(TOLERANCES),
        default="float32",
        help="of the engine's weights; vLLM's adapters on CUDA need bfloat16",
    )
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path.cwd()))
    with tempfile.TemporaryDirectory() as folder:
        try:
            check = check_engine(
                arguments.engine,
                folder=Path(folder),
                model_dir=arguments.model_dir,
                own=options_of(arguments.option),
                device=arguments.device,
                dtype=arguments.dtype,
            )
            findings = asyncio.run(check)
        except DialoopError as error:
            sys.stderr.write(f"{error.message} {error.remedy}\n")
            return 2
    for finding in findings:
        mark = "ok  " if finding.is_ok else "FAIL"
        text = finding.note if finding.is_ok else f"{finding.problem} {finding.remedy}".rstrip()
        sys.stdout.write(f"{mark} {finding.check:<24} {text}\n")
    return 0 if all(finding.is_ok for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
