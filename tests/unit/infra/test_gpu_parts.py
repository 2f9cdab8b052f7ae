"""What is packed for a GPU machine without a package index, and unpacked there."""

from __future__ import annotations

import re
import struct
import tomllib
from pathlib import Path

import pytest

from benchmarks.gpu import pack
from benchmarks.gpu.fatbin import keep_architecture
from benchmarks.gpu.unpack import PARTS, unpack

PTX, CUBIN = 1, 2


COME_WITH_TRANSFORMERS = (
    *("accelerate", "jinja2", "matplotlib", "mpmath", "numpy", "peft", "psutil", "pyyaml", "rich"),
    *("safetensors", "tokenizers", "torch", "transformers", "uvloop"),
)


def test_what_dialoop_needs_is_packed_or_comes_with_transformers() -> None:
    packed = {name_of(line) for line in pack.REQUIREMENTS.read_text("utf-8").splitlines()}
    root = Path(__file__).parents[3]
    needed: set[str] = set()
    for file in root.glob("*/dialoop*/pyproject.toml"):
        project = tomllib.loads(file.read_text("utf-8"))["project"]
        extras = project["optional-dependencies"]
        parts = ("replay", "inference", "scorer", "trainer", "stack")
        lines = [
            *project["dependencies"],
            *(line for part in parts for line in extras.get(part, ())),
        ]
        needed |= {name_of(line) for line in lines}
    ours = {f"dialoop{name}" for name in ("", "-extras", "-learning", "-services")}
    assert needed - packed - set(COME_WITH_TRANSFORMERS) == ours
    if "pyjwt" in needed:  # with [crypto]
        assert "cryptography" in packed


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 0, 64, len(code)) + struct.pack(
        "<IIHHI", 0, 0, 0, 0, architecture
    )
    return head.ljust(64, b"\0") + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(path: Path, *containers: bytes) -> Path:
    """Write an ELF file with a section of CUDA code, and one of names."""
    code, names = b"".join(containers), b"\0.nv_fatbin\0.names\0"
    start = 64
    table = start + len(code) + len(names)
    sections = [
        (0, 0, 0),
        (1, start, len(code)),
        (12, start + len(code), len(names)),
    ]
    head = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", table)
    head = head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(sections), 2)
    heads = b"".join(
        struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, size, 0, 0, 0, 0)
        for name, at, size in sections
    )
    path.write_bytes(head.ljust(start, b"\0") + code + names + heads)
    return path


def test_a_library_keeps_the_code_that_the_chip_loads_and_its_size(tmp_path) -> None:
    mine, other, text = (letter * 24 for letter in (b"m", b"o", b"t"))
    path = library(
        tmp_path / "lib.so",
        container(entry(CUBIN, 80, other), entry(CUBIN, 90, mine), entry(PTX, 80, text)),
        container(entry(CUBIN, 100, other), entry(PTX, 75, b"p" * 24), entry(PTX, 80, text)),
        container(entry(CUBIN, 100, b"s" * 8), entry(CUBIN, 120, other)),
    )
    size = path.stat().st_size
    assert keep_architecture(path, 90) == (64 + 24) * 2 + 64 + 8
    data = path.read_bytes()
    assert len(data) == size
    assert (data.count(mine), data.count(text), data.count(other)) == (1, 1, 0)
    assert b"p" * 24 not in data
    assert b"s" * 8 in data  # a container is never empty
    assert keep_architecture(path, 90) == (64 + 24) * 2 + 64 + 8  # and it can be read again
    assert path.read_bytes() == data


def test_a_file_without_cuda_code_stays_as_it_is(tmp_path) -> None:
    path = tmp_path / "plain.so"
    path.write_bytes(b"no library")
    assert keep_architecture(path, 90) == 0
    assert path.read_bytes() == b"no library"


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    site = tmp_path / "made"
    for name, content in (("vllm/a.py", "A = 1\n"), ("vllm/vllm-rs", "x"), ("gguf.py", "B = 2\n")):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(content)
    (site / "run").write_text("#!/bin/sh\n")
    (site / "run").chmod(0o755)
    pack.slim(site)
    pack.compress(site, tmp_path / "site.tar.xz")
    made = pack.split(tmp_path / "site.tar.xz", tmp_path / "parts", part_bytes=100)
    assert len(made) > 2
    assert all(part.stat().st_size <= 100 for part in made)
    return tmp_path / "parts"


def test_what_was_packed_is_unpacked_once(parts, tmp_path) -> None:
    site = tmp_path / "there" / "site"
    unpack(parts, site)
    assert (site / "vllm" / "a.py").read_text() == "A = 1\n"
    assert (site / "run").stat().st_mode & 0o100
    assert not (site / "vllm" / "vllm-rs").exists()
    (site / "gguf.py").unlink()
    unpack(parts, site)
    assert not (site / "gguf.py").exists()  # it is not done again
    pack.split(tmp_path / "site.tar.xz", parts, part_bytes=150)
    unpack(parts, site)
    assert (site / "gguf.py").exists()


def test_a_part_that_is_missing_or_damaged_is_named(parts, tmp_path) -> None:
    damaged = parts / "part-1"
    content = damaged.read_bytes()
    damaged.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(ValueError, match="part-1 is not the part that was packed"):
        unpack(parts, tmp_path / "site")
    damaged.unlink()
    with pytest.raises(ValueError, match=f"part-1 is missing: carry all that {PARTS} names"):
        unpack(parts, tmp_path / "site")
    damaged.write_bytes(content)
    unpack(parts, tmp_path / "site")
