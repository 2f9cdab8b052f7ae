"""A run as a folder or one page that any browser opens, from a disk or a web server, without us.

`export_runs({"demo": RunIndex(Path("runs/demo"))}, Path("out"))` writes the console's page and what
its routes would answer, packed into script files, since a page that is opened from a disk may load
nothing else. The page asks them as it asks the routes (`console/src/exported.ts`).
`report_runs(..., Path("report.html"))` writes the same into one page.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dialoop.errors import AlreadyExists
from dialoop.reasons import Reason
from dialoop.tokens.tokenizer import Tokenizer

from dialoop_ops.console.answers import (
    describe_publishes,
    describe_run,
    describe_trajectory,
    names_of,
    series_of,
    to_json,
)
from dialoop_ops.console.app import page_files
from dialoop_ops.runs import Filters, RunIndex
from dialoop_ops.runs.forks import fork_tree
from dialoop_ops.runs.index import MAX_LIMIT
from dialoop_ops.runs.overview import overview_of
from dialoop_ops.runs.run_config import flat_config, tokenizer_of
from dialoop_ops.runs.summaries import EVALUATION, TrajectorySummary, text_of
from dialoop_ops.runs.token_numbers import token_page

FORMAT = 1
_PART_BYTES = 1 << 20
"""About so much JSON is in one part; the page loads the parts that it shows."""
MAX_REPORTED = 5000
"""So many trajectories of a run are in a report, which a browser reads whole."""
_HEAD = "data/head.js"
# A page from a disk has no headers. 'self' is the folder of a web server, file: that of a disk.
_POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file:; img-src 'self' file:; "
    "base-uri 'none'; form-action 'none'"
)


def export_runs(
    indexes: Mapping[str, RunIndex],
    folder: Path,
    *,
    show: Callable[[str, int, int], object] = lambda *_: None,
) -> int:
    """Write runs into a new or empty folder, and return its size in bytes; AlreadyExists otherwise.

    `show` is called with a run's name, how many of its trajectories are written, and all of them.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AlreadyExists(
            f"{folder} exists already.", reason=Reason.EXPORT_EXISTS, remedy="Name a new directory."
        )
    writer = _Writer(folder)
    head = _export_all(indexes, writer, show=show)
    for path, (content, _) in page_files().items():
        if path != "/":
            writer.write(path.removeprefix("/"), content)
    # The head goes last, so that a folder that has one is whole.
    writer.write("index.html", _page_of(page_files()["/"][0]))
    writer.write(_HEAD, head)
    return writer.num_bytes


def report_runs(indexes: Mapping[str, RunIndex], file: Path) -> int:
    """Write runs into one page that needs no other file, and return its size in bytes.

    It has all evaluations and the newest other trajectories, up to 5,000 in all.
    """
    writer = _PageWriter()
    head = _export_all(indexes, writer, max_trajectories=MAX_REPORTED)
    files = {path.rpartition("/")[2]: content for path, (content, _) in page_files().items()}
    style, icon = files["console.css"].decode(), base64.b64encode(files["icon.svg"]).decode()
    # A text of the script that ends an element would end the script itself.
    scripts = [head.decode(), files["console.js"].decode().replace("</script", "<\\/script")]
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8" />
<meta http-equiv="Content-Security-Policy" content="{_report_policy(style, scripts)}" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<meta name="color-scheme" content="light dark" />
<title>{html.escape(", ".join(indexes))}</title>
<link rel="icon" href="data:image/svg+xml;base64,{icon}" />
<style>{style}</style></head><body><div id="page"></div>
{"".join(writer.elements)}{"".join(f"<script>{script}</script>" for script in scripts)}
</body></html>
"""
    file.parent.mkdir(parents=True, exist_ok=True)
    return file.write_bytes(page.encode())


def _report_policy(style: str, scripts: Sequence[str]) -> str:
    """Return the policy that lets the page run what it was written with, and nothing else."""
    style_hash, *hashes = (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in (style, *scripts)
    )
    return (
        f"default-src 'none'; script-src {' '.join(hashes)}; style-src {style_hash}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _export_all(
    indexes: Mapping[str, RunIndex],
    writer: _Parted,
    *,
    max_trajectories: int | None = None,
    show: Callable[[str, int, int], object] = lambda *_: None,
) -> bytes:
    """Write the parts of all runs, and return the script of the head."""
    runs = []
    for number, (name, index) in enumerate(indexes.items()):
        index.catch_up()
        chosen = _chosen(index, max_trajectories)
        runs.append(_export_run(name, index, writer, f"{number}/", chosen, partial(show, name)))
    head = {"format": FORMAT, "time": time.time(), "runs": runs}
    return b'window.dialoopExport="' + _pack(to_json(head)) + b'";\n'


def _page_of(page: bytes) -> bytes:
    """Return the page with the policy that its headers would set, and the export's head."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}" />'
    text = page.decode().replace('<meta charset="utf-8" />', f'<meta charset="utf-8" />\n{policy}')
    script = '<script defer src="./assets/console.js">'
    return text.replace(script, f'<script src="./{_HEAD}"></script>\n{script}').encode()


def _pack(text: bytes) -> bytes:
    return base64.b64encode(gzip.compress(text, 6, mtime=0))


class _Parted(Protocol):
    """What takes JSON that the page loads by its name."""

    def write_part(self, name: str, text: bytes) -> None:
        """Keep a part."""


class _PageWriter:
    """Parts as elements of a page; a browser runs no script of this type."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def write_part(self, name: str, text: bytes) -> None:
        """Add an element."""
        packed = _pack(text).decode()
        self.elements.append(f'<script type="text/plain" data-part="{name}">{packed}</script>\n')


class _Writer:
    """Files below a folder, and how large they are together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_bytes = 0

    def write(self, path: str, content: bytes) -> None:
        """Write a file, and the folders above it."""
        place = self._folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        self.num_bytes += len(content)

    def write_part(self, name: str, text: bytes) -> None:
        """Write JSON that the page loads by its name."""
        self.write(f"data/{name}.js", b'dialoopPart("%b","%b");\n' % (name.encode(), _pack(text)))


class _Parts:
    """Values in the order of trajectories, in parts; `firsts`: the number each part begins with."""

    def __init__(self, writer: _Parted, name: str) -> None:
        self._writer = writer
        self._name = name
        self._values: list[bytes] = []
        self._num_bytes = 0
        self.firsts: list[int] = []

    def add(self, number: int, value: Any) -> None:
        """Add the value of a trajectory."""
        if not self._values:
            self.firsts.append(number)
        self._values.append(to_json(value))
        self._num_bytes += len(self._values[-1])
        if self._num_bytes >= _PART_BYTES:
            self.close()

    def close(self) -> None:
        """Write what is left."""
        if self._values:
            text = b"[%b]" % b",".join(self._values)
            self._writer.write_part(f"{self._name}{len(self.firsts) - 1}", text)
        self._values, self._num_bytes = [], 0


def _export_run(
    name: str,
    index: RunIndex,
    writer: _Parted,
    folder: str,
    summaries: Iterable[TrajectorySummary],
    show: Callable[[int, int], object],
) -> dict[str, Any]:
    """Write the parts of a run, and return what the head says of it."""
    tokenizer = tokenizer_of(index.run_dir)
    kinds = ("summaries", "texts", "rows")
    parts = {kind: _Parts(writer, f"{folder}{kind}-") for kind in kinds}
    total = index.progress().num_trajectories
    for done, summary in enumerate(summaries, start=1):
        row = index.row(summary.number)
        debug_rows = index.debug_rows(summary.trajectory_id)
        # Fields that are asked for by their place take half of the room.
        parts["summaries"].add(summary.number, list(asdict(summary).values()))
        parts["texts"].add(summary.number, text_of(row))
        parts["rows"].add(summary.number, _whole_row(summary, row, debug_rows, tokenizer))
        show(done, total)
    for kind in kinds:
        parts[kind].close()
    names = names_of(index)
    curves = [series_of(index, each, has_samples=True) for each in names]
    writer.write_part(f"{folder}curves", to_json(curves))
    return {
        **describe_run(name, index),
        "path": "",  # where the run was is nothing for others to know
        "folder": folder,
        "fields": [field.name for field in fields(TrajectorySummary)],
        "parts": {kind: parts[kind].firsts for kind in kinds},
        "overview": asdict(overview_of(index)),
        "choices": index.choices(),
        "metrics": names,
        "publishes": describe_publishes(index),
        "config": flat_config(index.run_dir),
    }


def _chosen(index: RunIndex, most: int | None) -> Iterable[TrajectorySummary]:
    """Return all trajectories in order, or of more than `most` evaluations and the newest."""
    if most is None or index.progress().num_trajectories <= most:
        return _summaries(index, "number")
    newest = _summaries(index, "-number", outcome=EVALUATION)
    chosen = {summary.number: summary for summary in itertools.islice(newest, most)}
    for summary in _summaries(index, "-number"):
        if len(chosen) >= most:
            break
        chosen[summary.number] = summary
    return [chosen[number] for number in sorted(chosen)]


def _summaries(index: RunIndex, sort: str, outcome: str = "") -> Iterator[TrajectorySummary]:
    filters = Filters(outcome=outcome)
    for offset in itertools.count(0, MAX_LIMIT):
        page = index.page(filters, sort=sort, offset=offset, limit=MAX_LIMIT)
        yield from page.summaries
        if len(page.summaries) < MAX_LIMIT:
            return


def _whole_row(
    summary: TrajectorySummary,
    row: Mapping[str, Any],
    debug_rows: list[dict[str, Any]],
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Return all that the page shows of a trajectory."""
    described = describe_trajectory(summary, row)
    del described["summary"]
    num_sequences = len(row["sequences"])
    forks = fork_tree(row, tokenizer=tokenizer) if num_sequences > 1 else []
    return {
        "trajectory": described,
        "tokens": [
            asdict(
                token_page(
                    row, sequence=number, limit=None, tokenizer=tokenizer, debug_rows=debug_rows
                )
            )
            for number in range(num_sequences)
        ],
        "forks": [asdict(fork) for fork in forks],
    }
