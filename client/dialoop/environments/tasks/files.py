"""Rows of a data set on disk: JSON lines, Parquet, or a folder that Hugging Face datasets saved.

rows_of("gsm8k/train.jsonl")
rows_of("gsm8k/train.parquet")        # extra: pip install "dialoop[datasets]"
rows_of("gsm8k", split="train")       # datasets.save_to_disk, or a folder of Parquet files

Rows stay on disk and become Python values one at a time, as they are asked for. `require_columns`
refuses those that have a column which nothing reads.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate
from math import isfinite
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import MappingProxyType
from typing import Any, overload
from weakref import finalize

from dialoop.environments.tasks.row_tasks import Collate, RowTasks, text_to_query
from dialoop.environments.tasks.source import require_share, share_of
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.reasons import Reason

Row = Mapping[str, Any]

_JSON = (".jsonl", ".json", ".ndjson")
_ROWS_PER_BATCH = 1024
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_HALVES = re.compile("[\ud800-\udfff]")
_NO_CAUSES: Mapping[str, str] = MappingProxyType({})
QUESTIONS = ("query", "text", "question")
"""Columns that `text_to_query` takes for the question: a row has one of them."""


def file_tasks(  # noqa: PLR0913 - what a file of tasks may be
    path: str | Path,
    *,
    heldout_path: str | Path | None = None,
    heldout_fraction: float = 0.0,
    split: str = "train",
    heldout_split: str = "test",
    collate: Collate = text_to_query,
    questions: Sequence[str] = QUESTIONS,
    known_columns: Collection[str] | None = None,
    ignore_columns: Iterable[str] = (),
) -> RowTasks:
    """Return tasks with split "train" and perhaps "heldout": another file or split, or a share.

    A hash of the row's number decides which rows are in the share. If a folder has a split named
    `heldout_split`, that is "heldout" by default. known_columns: those that rows may have beside
    one of `questions`, InvalidConfig (UNKNOWN_COLUMN) names others; None: all become metadata. A
    malformed row is InvalidConfig (BAD_ROW) with its place.
    """
    require_share(heldout_fraction, heldout_path)
    path = Path(path)

    def read(path: str | Path, split: str) -> list[tuple[str, Row]]:
        rows = rows_of(path, split=split, ignore_columns=ignore_columns)
        if known_columns is not None:
            require_columns(rows, one_of=questions, known=known_columns)
        return [(rows.place(index), row) for index, row in enumerate(rows)]

    train = read(path, split)
    heldout: list[tuple[str, Row]] = []
    if heldout_path:
        heldout = read(heldout_path, heldout_split)
    elif heldout_fraction:
        kept = [share_of(str(number)) >= heldout_fraction for number in range(len(train))]
        heldout = [row for row, keep in zip(train, kept, strict=True) if not keep]
        train = [row for row, keep in zip(train, kept, strict=True) if keep]
    elif path.is_dir() and heldout_split in splits_of(path):
        heldout = read(path, heldout_split)
    splits = {"train": train, **({"heldout": heldout} if heldout else {})}
    return RowTasks(
        {split: [row for _, row in rows] for split, rows in splits.items()},
        collate=collate,
        places={split: [place for place, _ in rows] for split, rows in splits.items()},
    )


class StoredRows(Sequence[Row]):
    """The rows of one file or split, read from disk one at a time, without ignored columns."""

    has_all_fields = True
    """Whether a struct has the fields of every row's, null where its own row has none."""

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, int]:
        """Return the columns that a row has, each with the index of the first one."""

    @abstractmethod
    def place(self, index: int) -> str:
        """Return where a row stands, for an error: "row 3 of train.parquet", counted from 0."""

    def number(self, index: int) -> int:
        """Return the number of a row's line, from 1, or of the row in its file, from 0."""
        return index

    @abstractmethod
    def read(self, index: int) -> Row:
        """Return a row from 0 to len - 1; InvalidConfig where it cannot be read."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self.read(number) for number in range(len(self))[index]]
        return self.read(range(len(self))[index])


def rows_of(
    path: str | Path, *, split: str = "train", ignore_columns: Iterable[str] = ()
) -> StoredRows:
    """Return the rows of a file or of a folder's split; InvalidConfig if they cannot be read.

    Each line of JSON is read once: the first that is none is told with the cause.
    """
    path, ignored = Path(path), _names(ignore_columns)
    if path.is_dir():
        return _folder(path, split, ignored)
    if path.suffix in _JSON:
        return _JsonLines(path, ignored)
    if path.suffix == ".parquet":
        return _ParquetRows(path, ignored)
    what = f"is no {', '.join(_JSON)} or .parquet file" if path.exists() else "is not there"
    raise InvalidConfig(
        f"The data set {path} {what}.",
        reason=Reason.DATA_UNREADABLE,
        remedy="Give a .jsonl or .parquet file, or the folder of a saved data set. One of the Hub "
        f"is saved by datasets.load_dataset({str(path)!r}).save_to_disk(folder).",
    )


def joined_rows(
    paths: Iterable[str | Path], *, split: str = "train", ignore_columns: Iterable[str] = ()
) -> StoredRows:
    """Return the rows of several files, one after the other."""
    ignored = _names(ignore_columns)
    parts = [rows_of(path, split=split, ignore_columns=ignored) for path in paths]
    return parts[0] if len(parts) == 1 else _JoinedRows(parts)


def require_columns(  # noqa: PLR0913 - what a column may be
    rows: StoredRows,
    *,
    needed: Iterable[str] = (),
    one_of: Iterable[str] = (),
    known: Collection[str] = (),
    is_wanted: Callable[[str], bool] | None = None,
    causes: Mapping[str, str] = _NO_CAUSES,
    table: str = "the options of [environment]",
) -> None:
    """Raise InvalidConfig where rows lack a column (BAD_ROW) or have others (UNKNOWN_COLUMN).

    Others are neither needed, nor known to the format, nor wanted by a function, or are one of
    `causes`, each with why it cannot be read. `table` is where `ignore_columns` belongs.
    """
    needed, choices = tuple(needed), [name for name in one_of if name in rows.columns]
    missing = [name for name in needed if len(rows) and name not in rows.columns]
    if missing:
        raise InvalidConfig(
            f"The data set has no column {', '.join(map(repr, missing))}: {rows.place(0)} has "
            f"{', '.join(map(repr, rows.columns))}.",
            reason=Reason.BAD_ROW,
            remedy=f"A row needs {' and '.join(map(repr, needed))}, and ignore_columns must not "
            "list it.",
        )
    if len(choices) > 1:
        causes = dict.fromkeys(choices[1:], f"{choices[0]!r} says the same") | dict(causes)
    known = {*needed, *choices, *known}
    others = {
        name: index
        for name, index in rows.columns.items()
        if name in causes or (name not in known and not (is_wanted is not None and is_wanted(name)))
    }
    if others:
        raise _unknown_columns(rows, others, known, causes, table)


def _unknown_columns(
    rows: StoredRows,
    others: Mapping[str, int],
    known: Collection[str],
    causes: Mapping[str, str],
    table: str,
) -> InvalidConfig:
    """Return the error that names every column which nothing reads, with a line to paste."""
    firsts: dict[int, list[str]] = defaultdict(list)
    for name, index in others.items():
        firsts[index].append(name)
    places = "; ".join(
        f"{', '.join(map(repr, names))} ({rows.place(index)})" for index, names in firsts.items()
    )
    why = "".join(f" {name!r}: {causes[name]}." for name in others if name in causes)
    absent = [name for name in known if name not in rows.columns]
    near = {name: get_close_matches(name, absent, n=1) for name in others}
    hints = "".join(f"Is {name!r} {match[0]!r}? " for name, match in near.items() if match)
    line = f"ignore_columns = {json.dumps([*others], ensure_ascii=False)}"
    return InvalidConfig(
        f"Nothing reads the columns {places}.{why}",
        reason=Reason.UNKNOWN_COLUMN,
        remedy=f"{hints}To leave them out, write {line} in {table}.",
    )


class _JsonLines(StoredRows):
    """Lines of a file that is read through once; memory holds where each line begins.

    A copy or a pickle opens the file again by its name.
    """

    has_all_fields = False

    def __init__(self, path: Path, ignored: Collection[str]) -> None:
        self._path, self._ignored = path, ignored
        self._offsets, self._numbers = array("Q"), array("I")
        self._columns: dict[str, int] = {}
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            finalize(self, os.close, self._file)
            offset = 0
            # By newlines alone, since JSON strings may hold every other line separator.
            with os.fdopen(os.dup(self._file), "rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        for name in self._parse(line, number):
                            self._columns.setdefault(name, len(self._numbers))
                        self._offsets.append(offset)
                        self._numbers.append(number)
                    offset += len(line)
        except OSError as error:
            raise _unreadable(path, error.strerror or type(error).__name__) from error
        self._offsets.append(offset)

    def __reduce__(self) -> Any:
        return (type(self), (self._path.absolute(), self._ignored))

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def columns(self) -> Mapping[str, int]:
        return self._columns

    def place(self, index: int) -> str:
        return f"line {self._numbers[index]} of {self._path}"

    def number(self, index: int) -> int:
        return self._numbers[index]

    def read(self, index: int) -> Row:
        begin, end = self._offsets[index], self._offsets[index + 1]
        line = os.pread(self._file, end - begin, begin).partition(b"\n")[0]
        return self._parse(line, self._numbers[index])

    def _parse(self, line: bytes, number: int) -> Row:
        try:
            row = _row_of(line)
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
            raise InvalidConfig(
                f"Line {number} of {self._path} cannot be read: {why}.",
                reason=Reason.DATA_UNREADABLE,
                remedy="Write one JSON object on each line, in UTF-8.",
            ) from error
        return {name: value for name, value in row.items() if name not in self._ignored}


def _row_of(line: bytes) -> Row:
    """Return the object of a line; ValueError with the cause where it is none in UTF-8."""
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if line.startswith(_UTF_16):
            raise ValueError("the file is UTF-16, and has to be UTF-8") from None
        byte = f"byte {error.start + 1} is {line[error.start]:#04x}"
        raise ValueError(f"{byte}, which is not UTF-8") from None
    if text.lstrip().startswith("["):
        raise ValueError("a JSON list begins there, and each line has to be a row")
    try:
        row = json.loads(text, object_pairs_hook=different_keys)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"it is not JSON at character {error.pos + 1} ({error.msg}): {text.strip():.60}"
        ) from None
    if not isinstance(row, dict):
        raise ValueError(f"it is no JSON object: {text.strip():.60}")
    # Only an escape makes half a character, which no tokenizer takes.
    half = half_in(row, "") if "\\u" in text else ""
    if half:
        raise ValueError(f"{half} has half a character (an escape from \\ud800 to \\udfff)")
    return row


def text_of(row: Row, *columns: str) -> str:
    """Return the text or number in the first of some columns that a row has; InvalidInput if none.

    It is without blanks at its ends, and not empty.
    """
    column = next((name for name in columns if row.get(name) is not None), columns[0])
    value = row.get(column)
    is_number = isinstance(value, (int, float)) and type(value) is not bool and isfinite(value)
    if not (isinstance(value, str) or is_number) or not str(value).strip():
        raise wrong_value(column, value, "a text or a number")
    return str(value).strip()


def wrong_value(column: str, value: Any, wanted: str) -> InvalidInput:
    """Return the error for a value of the wrong type."""
    is_there = value is not None
    what = f"is {value!r:.60} (a {type(value).__name__})" if is_there else "is missing or null"
    return InvalidInput(
        f"column {column!r} {what}.", reason=Reason.BAD_ROW, remedy=f"Give {wanted}."
    )


def different_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; ValueError where a key stands twice. For `json.loads`."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def half_in(value: Any, path: str) -> str:
    """Return where a text has half of a surrogate pair: "messages[0].content"; "" if nowhere."""
    if isinstance(value, str):
        return path if _HALVES.search(value) else ""
    if isinstance(value, dict):
        if any(map(_HALVES.search, value)):
            return f"a key of {path or 'the row'}"
        parts = [(inner, f"{path}.{name}" if path else name) for name, inner in value.items()]
    elif isinstance(value, list):
        parts = [(inner, f"{path}[{index}]") for index, inner in enumerate(value)]
    else:
        return ""
    return next(filter(None, (half_in(inner, where) for inner, where in parts)), "")


class _ArrowRows(StoredRows):
    """Rows of a schema, read as Python values by `_load`."""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        self._path, self._columns = path, dict.fromkeys(names, 0)

    @property
    def columns(self) -> Mapping[str, int]:
        return self._columns

    def place(self, index: int) -> str:
        return f"row {index} of {self._path}"

    def read(self, index: int) -> Row:
        try:
            return self._load(index)
        except UnicodeDecodeError as error:
            raise InvalidConfig(
                f"Row {index} of {self._path} cannot be read: a text of it is not UTF-8.",
                reason=Reason.DATA_UNREADABLE,
                remedy="Write its texts in UTF-8.",
            ) from error

    @abstractmethod
    def _load(self, index: int) -> Row: ...


class _ParquetRows(_ArrowRows):
    """Rows of a Parquet file, unpacked batch by batch into a file that is mapped into memory.

    The mapped file has no name and takes the data's unpacked size on disk (TMPDIR). A single row of
    a Parquet file could be read only with the whole row group that it is in. A copy or a pickle
    unpacks the file again.
    """

    def __init__(self, path: Path, ignored: Collection[str]) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise _missing("pyarrow") from error
        self._ignored = ignored
        try:
            with (
                parquet.ParquetFile(path, memory_map=True) as file,
                NamedTemporaryFile(prefix="dialoop-rows-") as unpacked,
            ):
                with pyarrow.ipc.new_stream(unpacked, file.schema_arrow) as writer:
                    for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH):
                        writer.write_batch(batch)
                unpacked.flush()
                mapped = pyarrow.memory_map(unpacked.name)
                table: Any = pyarrow.ipc.open_stream(mapped).read_all()
        except (OSError, pyarrow.ArrowException) as error:
            raise _unreadable(path, str(error)) from error
        names = table.column_names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise _unreadable(path, f"it has two columns {twice!r}")
        self._table: Any = table.drop_columns([name for name in names if name in ignored])
        super().__init__(path, self._table.column_names)

    def __reduce__(self) -> Any:
        return (type(self), (self._path.absolute(), self._ignored))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def _load(self, index: int) -> Row:
        row: Row = self._table.slice(index, 1).to_pylist()[0]
        return row

    def __iter__(self) -> Iterator[Row]:
        for begin in range(0, len(self), _ROWS_PER_BATCH):
            try:
                yield from self._table.slice(begin, _ROWS_PER_BATCH).to_pylist()
            except UnicodeDecodeError:
                yield from self[begin : begin + _ROWS_PER_BATCH]


class _SavedRows(_ArrowRows):
    """Rows of a split that Hugging Face datasets saved, which it maps into memory."""

    def __init__(self, path: Path, saved: Any) -> None:
        self._saved = saved
        super().__init__(path, saved.column_names)

    def __len__(self) -> int:
        return len(self._saved)

    def _load(self, index: int) -> Row:
        row: Row = self._saved[index]
        return row


class _JoinedRows(StoredRows):
    """Several files as one."""

    def __init__(self, parts: Sequence[StoredRows]) -> None:
        self._parts = parts
        self._begins = list(accumulate((len(part) for part in parts), initial=0))
        self.has_all_fields = any(part.has_all_fields for part in parts)

    def __len__(self) -> int:
        return self._begins[-1]

    @property
    def columns(self) -> Mapping[str, int]:
        columns: dict[str, int] = {}
        for part, begin in zip(self._parts, self._begins, strict=False):
            for name, index in part.columns.items():
                columns.setdefault(name, begin + index)
        return columns

    def place(self, index: int) -> str:
        part, number = self._find(index)
        return part.place(number)

    def read(self, index: int) -> Row:
        part, number = self._find(index)
        return part.read(number)

    def __iter__(self) -> Iterator[Row]:
        for part in self._parts:
            yield from part

    def _find(self, index: int) -> tuple[StoredRows, int]:
        part = bisect_right(self._begins, index) - 1
        return self._parts[part], index - self._begins[part]


def _folder(path: Path, split: str, ignored: Collection[str]) -> StoredRows:
    parquet = sorted(path.glob(f"{split}*.parquet")) or sorted(path.glob(f"*/{split}*.parquet"))
    if parquet:
        return joined_rows(parquet, ignore_columns=ignored)
    try:
        import datasets
    except ImportError as error:
        raise _missing("datasets") from error
    try:
        saved: Any = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise InvalidConfig(
                f"{path} has no split {split!r}.",
                reason=Reason.SPLIT_NOT_FOUND,
                remedy=f"Choose one of {', '.join(saved)}.",
            )
        saved = saved[split]
    return _SavedRows(
        path, saved.remove_columns([name for name in saved.column_names if name in ignored])
    )


def splits_of(path: Path) -> set[str]:
    """Return the names of the splits in a folder, from its file list or its file names."""
    listing = path / "dataset_dict.json"
    if listing.is_file():
        return set(json.loads(listing.read_text("utf-8")).get("splits", []))
    return {file.name.split("-")[0].removesuffix(".parquet") for file in path.rglob("*.parquet")}


def _names(columns: Iterable[str]) -> frozenset[str]:
    return frozenset([columns] if isinstance(columns, str) else columns)


def _missing(package: str) -> InvalidConfig:
    return InvalidConfig(
        f"Reading Parquet and Hugging Face data sets needs the `{package}` package.",
        reason=Reason.PACKAGE_MISSING,
        remedy='Run: pip install "dialoop[datasets]"',
    )


def _unreadable(path: Path, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"The data set {path} cannot be read: {why.partition(chr(10))[0].rstrip('.'):.200}.",
        reason=Reason.DATA_UNREADABLE,
        remedy="Give UTF-8 JSON lines, Parquet, or a folder written by datasets.save_to_disk.",
    )
