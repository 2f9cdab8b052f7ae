"""Pack vLLM and a real model for a GPU machine that reaches no package index.

    python -m benchmarks.gpu.pack [--into runs/gpu_parts] [--part-mib 48]

installs packed.txt for Python 3.12 into a folder, leaves out what a dense bfloat16 model on Hopper
never loads, and writes it compressed, in parts small enough to be carried one by one. Beside them
lies parts.json with their digests. `make gpu-evidence` unpacks them on the other machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.fatbin import keep_architecture
from benchmarks.gpu.unpack import PARTS

REQUIREMENTS = Path(__file__).with_name("packed.txt")
HOPPER = 90
DROPPED = (
    "entrypoints/serve/instrumentator/static",
    "model_executor/layers/fused_moe/configs",
    "third_party/deep_gemm",
    "third_party/fmha_sm100",
    "third_party/tml_fa4",
    "vllm-rs",
    "vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "_deepselect_C.abi3.so",
    "_flashkda_C.abi3.so",
    "_flashmla_C.abi3.so",
    "_flashmla_extension_C.abi3.so",
    "_qutlass_C.abi3.so",
)
"""Of the package vllm: kernels of other chips and models, and pages of its server."""
_GLIBC = (35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
_PLATFORMS = (
    *(f"manylinux_2_{version}_x86_64" for version in _GLIBC),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
_SMALL = 1 << 20


def install(into: Path, requirements: Path = REQUIREMENTS) -> None:
    """Install the requirements for the other machine's Python, without their own needs."""
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    words += ["--no-deps", "--no-compile", "--only-binary=:all:", "--target", str(into)]
    words += ["--implementation", "cp", "--python-version", "3.12"]
    words += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*words, "-r", str(requirements)], check=True)


def slim(site: Path) -> None:
    """Drop what is never loaded, and the CUDA code of other chips."""
    package = site / "vllm"
    for name in DROPPED:
        path = package / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for library in package.rglob("*.so"):
        if library.stat().st_size > _SMALL:
            keep_architecture(library, HOPPER)


def compress(site: Path, into: Path) -> None:
    """Write the folder's content as one tar.xz file."""
    # Higher presets take three times as long for a tenth less: half of it is weights.
    with lzma.open(into, "wb", preset=2) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for path in sorted(site.iterdir()):
            tar.add(path, arcname=path.name)


def split(archive: Path, into: Path, *, part_bytes: int) -> list[Path]:
    """Write the archive in parts, and parts.json; return the parts."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    digests: dict[str, str] = {}
    for number, content in enumerate(_chunks(archive, part_bytes)):
        part = into / f"part-{number}"
        part.write_bytes(content)
        digests[part.name] = hashlib.sha256(content).hexdigest()
    (into / PARTS).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
    return [into / name for name in digests]


def _chunks(archive: Path, part_bytes: int) -> Iterator[bytes]:
    with archive.open("rb") as file:
        while content := file.read(part_bytes):
            yield content


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, default=Path("runs/gpu_parts"))
    parser.add_argument("--part-mib", type=int, default=48, help="size of a part")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        site, archive = Path(name) / "site", Path(name) / "site.tar.xz"
        install(site)
        slim(site)
        compress(site, archive)
        parts = split(archive, options.into, part_bytes=options.part_mib << 20)
    for part in parts:
        print(f"{part}  {part.stat().st_size / (1 << 20):.1f} MiB")
    print(f"Carry them with {options.into / PARTS}, and run `make gpu-evidence` there.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
