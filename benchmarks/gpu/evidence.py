"""What a GPU shows of Dialoop, line by line: `make gpu-evidence`; `REHEARSE=1` without a GPU.

    python -m benchmarks.gpu.evidence [--rehearse] [--only job,rates] [--all] [--within 560]

runs the lines that have no result of this commit and card yet, the most telling first, and writes
each result when it has one: a run that is cut loses only what came later, and the next one goes on
there. The results are rows of gpu_evidence.json, in $OUT or runs/gpu_evidence. On a machine without
a package index it first unpacks what `make gpu-parts` packed, and uses Python's own modules alone
until then.

A rehearsal goes through all lines that a CPU can, with a tiny model; its rows say so. Exit code 1:
a line failed or was not reached. 2: there is no GPU, or something that a line needs is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.lines import LINES, Ended, Line, run_line
from benchmarks.gpu.place import Place, Unprepared, commit_of, gpus_here, prepare, versions_of
from benchmarks.servers.machine import processor

RESULTS = "gpu_evidence.json"
COMMITTED = Path(__file__).parents[1] / "results" / RESULTS
NO_GPU = 2
_LOG_BYTES = 1 << 20


class Results:
    """The rows of files that are alike, each of one line at one commit on one card."""

    def __init__(self, files: Iterable[Path], *, committed: Path) -> None:
        self._files = tuple(files)
        self._committed = _rows_in(committed)
        self._rows: list[dict[str, Any]] = []
        for file in self._files:
            for row in _rows_in(file):
                self._put(row)

    def has(self, line: Line, facts: Mapping[str, Any]) -> bool:
        """Return whether a line needs no run: it passed here, or could not be run here."""
        wanted = _key({"name": line.name, **facts})
        rows = (*self._committed, *self._rows)
        statuses = [row["status"] for row in rows if _key(row) == wanted]
        return bool(statuses) and statuses[-1] in ("passed", "not run")

    def write(self, row: Mapping[str, Any]) -> None:
        """Put a row in the place of its last one, and write the files."""
        self._put(dict(row))
        text = json.dumps({"benchmark": "gpu_evidence", "rows": self._rows}, indent=1)
        for file in self._files:
            file.parent.mkdir(parents=True, exist_ok=True)
            draft = file.with_suffix(".draft")
            draft.write_text(text + "\n", encoding="utf-8")
            draft.replace(file)

    def _put(self, row: dict[str, Any]) -> None:
        self._rows = [each for each in self._rows if _key(each) != _key(row)] + [row]


def _rows_in(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (
        json.loads(file.read_text("utf-8"))["rows"] if file.is_file() else []
    )
    return rows


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("name", "commit", "card", "num_gpus", "rehearsal"))


def run_lines(
    lines: Sequence[Line],
    place: Place,
    results: Results,
    *,
    facts: Mapping[str, Any],
    within_s: float,
) -> bool:
    """Run one line after the other while there is time; return whether all came to a good end."""
    ends_at, is_well = time.monotonic() + within_s, True
    for line in lines:
        began = time.monotonic()
        left_s = ends_at - began
        if left_s < line.least_s:
            print(f"{line.number} {line.name:<16} no time left: run the command again", flush=True)
            is_well = False
            continue
        row = {"line": line.number, "name": line.name, "what": line.what, **facts}
        row["load_before"] = round(os.getloadavg()[0], 1)
        note = partial(_note, results, row, began)
        ended = run_line(line, place, limit_s=min(line.limit_s, left_s), note=note)
        note(ended)
        seconds = f"{time.monotonic() - began:.1f} s"
        print(
            f"{line.number} {line.name:<16} {ended.status:<8} {seconds:>8}  {ended.why}", flush=True
        )
        is_well = is_well and ended.status in ("passed", "not run")
    return is_well


def _note(results: Results, row: Mapping[str, Any], began: float, ended: Ended) -> None:
    seconds = round(time.monotonic() - began, 1)
    outcome = {"status": ended.status, "why": ended.why, "seconds": seconds}
    results.write({**row, **outcome, "figures": dict(ended.figures)})


def keep_logs(work: Path, archive: Path) -> None:
    """Pack what the lines wrote, without weights and rows, for whoever looks why one failed."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        for file in sorted(work.rglob("*")):
            is_log = file.suffix in (".log", ".out", ".err") or file.name == "metrics.jsonl"
            if is_log and file.is_file() and file.stat().st_size < _LOG_BYTES:
                tar.add(file, arcname=str(file.relative_to(work)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="go through it on a CPU")
    parser.add_argument("--only", default="", help="names of lines, between commas")
    parser.add_argument("--all", action="store_true", help="run lines that have a result too")
    parser.add_argument("--within", type=float, default=0.0, help="seconds for all lines (560)")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--work", type=Path, default=Path("runs"), help="folder of what runs")
    parser.add_argument("--model", type=Path, help="a model's folder, in place of the packed one")
    parser.add_argument("--commit", default="", help="of this tree, where it has no git")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options, began = _parser().parse_args(arguments), time.monotonic()
    gpus = gpus_here()
    if not gpus and not options.rehearse:
        print("This machine has no GPU that nvidia-smi sees: run this with --rehearse, or on one.")
        return NO_GPU
    names = [name for name in options.only.split(",") if name]
    unknown = set(names) - {line.name for line in LINES}
    commit = options.commit or commit_of()
    if unknown or not commit:
        lines = ", ".join(line.name for line in LINES)
        print(
            f"There is no line {', '.join(sorted(unknown))}; there are {lines}."
            if unknown
            else "This tree has no git: give --commit, which the results name."
        )
        return NO_GPU
    work = (options.work / ("gpu_rehearsal" if options.rehearse else "gpu_evidence")).resolve()
    output = options.output or Path(os.environ.get("OUT") or work)
    try:
        place = prepare(
            work,
            parts=options.work / "gpu_parts",
            model=options.model,
            num_gpus=len(gpus),
            is_rehearsal=options.rehearse,
        )
    except Unprepared as error:
        print(error)
        return NO_GPU
    facts: dict[str, Any] = {
        "rehearsal": options.rehearse,
        "commit": commit,
        "card": "none" if options.rehearse else gpus[0]["name"],
        "num_gpus": 0 if options.rehearse else len(gpus),
        "gpus": [] if options.rehearse else gpus,
        "versions": versions_of(place),
        "machine": processor(),
        "cores": os.cpu_count(),
    }
    # The folder $OUT is empty at each start: what ran before is in the other one.
    results = Results((work / RESULTS, output / RESULTS), committed=COMMITTED)
    chosen = [line for line in LINES if not names or line.name in names]
    if not options.all and not names:
        chosen = [line for line in chosen if not results.has(line, facts)]
    within_s = options.within or (3600.0 if options.rehearse else 560.0)
    left_s = within_s - (time.monotonic() - began)  # unpacking takes a part of it
    is_well = run_lines(chosen, place, results, facts=facts, within_s=left_s)
    keep_logs(work, output / "gpu_evidence_logs.tar.gz")
    print(f"{len(chosen)} lines in {output / RESULTS}")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
