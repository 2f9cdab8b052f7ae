"""Unpack what benchmarks.gpu.pack made, with Python's own modules alone."""

from __future__ import annotations

import compileall
import hashlib
import json
import shutil
import tarfile
from pathlib import Path

PARTS = "parts.json"


def unpack(parts: Path, site: Path) -> None:
    """Bring the folder `site` up to the parts; do nothing where it has their content already.

    Raise ValueError where a part is missing, or is not what was packed.
    """
    digests: dict[str, str] = json.loads((parts / PARTS).read_text("utf-8"))
    stamp = site.with_name(f"{site.name}.json")
    if stamp.is_file() and json.loads(stamp.read_text("utf-8")) == digests:
        return
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    archive = site.with_name(f"{site.name}.tar.xz")
    with archive.open("wb") as joined:
        for name, digest in digests.items():
            if not (parts / name).is_file():
                raise ValueError(f"{parts / name} is missing: carry all that {PARTS} names")
            content = (parts / name).read_bytes()
            if hashlib.sha256(content).hexdigest() != digest:
                raise ValueError(f"{parts / name} is not the part that was packed: carry it again")
            joined.write(content)
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(site, filter="data")
    archive.unlink()
    compileall.compile_dir(site, quiet=2, workers=0)  # once, and not in each of many processes
    stamp.write_text(json.dumps(digests), encoding="utf-8")
