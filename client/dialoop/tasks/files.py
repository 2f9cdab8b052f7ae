"""Rows of a data set on disk: JSON lines, Parquet, or a folder that Hugging Face datasets saved.

rows_of("gsm8k/train.jsonl")
rows_of("gsm8k/train.parquet")        # extra: pip install "dialoop[datasets]"
rows_of("gsm8k", split="train")       # datasets.save_to_disk, or a folder of Parquet files

Rows stay on disk and become Python values one at a time, as they are asked for.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, overload
from weakref import finalize

from dialoop.environments.tasks.row_tasks import Collate, RowTasks, text_to_query
from dialoop.environments.tasks.source import require_share, share_of
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

Row = Mapping[str, Any]

_ROWS_PER_BATCH = 1024


def file_tasks(
    path: str | Path,
    *,
    heldout_path: str | Path | None = None,
    heldout_fraction: float = 0.0,
    split: str = "train",
    heldout_split: str = "test",
    collate: Collate = text_to_query,
) -> RowTasks:
    """Return tasks with split "train" and perhaps "heldout": another file or split, or a share.

    A hash of the row's number decides which rows are in the share. If a folder has a split named
    `heldout_split`, that is "heldout" by default.
    """
    require_share(heldout_fraction, heldout_path)
    path = Path(path)
    train = list(rows_of(path, split=split))
    heldout: list[Row] = []
    if heldout_path:
        heldout = list(rows_of(Path(heldout_path), split=heldout_split))
    elif heldout_fraction:
        kept = [share_of(str(number)) >= heldout_fraction for number in range(len(train))]
        heldout = [row for row, keep in zip(train, kept, strict=True) if not keep]
        train = [row for row, keep in zip(train, kept, strict=True) if keep]
    elif path.is_dir() and heldout_split in splits_of(path):
        heldout = list(rows_of(path, split=heldout_split))
    return RowTasks({"train": train, **({"heldout": heldout} if heldout else {})}, collate=collate)


class StoredRows(Sequence[Row]):
    """The rows of one file or split, read from disk one at a time."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns; of JSON lines, those of the first row."""

    @abstractmethod
    def place(self, index: int) -> str:
        """Return where a row stands, for an error: "row 3 of train.parquet", counted from 0."""

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


def rows_of(path: str | Path, *, split: str = "train") -> StoredRows:
    """Return the rows of a file or of a folder's split; InvalidConfig if they cannot be read."""
    path = Path(path)
    if path.is_dir():
        return _folder(path, split)
    if path.suffix in (".jsonl", ".json"):
        return _JsonLines(path)
    if path.suffix == ".parquet":
        return _ParquetRows(path)
    raise InvalidConfig(
        f"{path} is neither a folder nor a .jsonl, .json or .parquet file.",
        reason=Reason.DATA_UNREADABLE,
        remedy="Give a .jsonl or .parquet file, or a folder written by datasets.save_to_disk.",
    )


def joined_rows(paths: Iterable[str | Path], *, split: str = "train") -> StoredRows:
    """Return the rows of several files, one after the other."""
    parts = [rows_of(path, split=split) for path in paths]
    return parts[0] if len(parts) == 1 else _JoinedRows(parts)


class _JsonLines(StoredRows):
    """Lines of a file that is read through once; memory holds where each line begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets, self._numbers = array("Q"), array("I")
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            finalize(self, os.close, self._file)
            offset = 0
            # By newlines alone, since JSON strings may hold every other line separator.
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        self._offsets.append(offset)
                        self._numbers.append(number)
                    offset += len(line)
        except OSError as error:
            raise _unreadable(path, type(error).__name__) from error
        self._offsets.append(offset)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.read(0)) if len(self) else ()

    def place(self, index: int) -> str:
        return f"line {self._numbers[index]} of {self._path}"

    def read(self, index: int) -> Row:
        begin, end = self._offsets[index], self._offsets[index + 1]
        line = os.pread(self._file, end - begin, begin).partition(b"\n")[0]
        number = self._numbers[index]
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise _unreadable(self._path, f"line {number} is not JSON") from None
        if not isinstance(row, dict):
            raise _unreadable(self._path, f"line {number} is not a JSON object")
        return row


class _ParquetRows(StoredRows):
    """Rows of a Parquet file, unpacked batch by batch into a file that is mapped into memory.

    The mapped file has no name and takes the data's unpacked size on disk (TMPDIR). A single row of
    a Parquet file could be read only with the whole row group that it is in.
    """

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise _missing("pyarrow") from error
        self._path = path
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
                self._table: Any = pyarrow.ipc.open_stream(mapped).read_all()
        except (OSError, pyarrow.ArrowException) as error:
            raise _unreadable(path, type(error).__name__) from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._table.column_names)

    def place(self, index: int) -> str:
        return f"row {index} of {self._path}"

    def read(self, index: int) -> Row:
        row: Row = self._table.slice(index, 1).to_pylist()[0]
        return row

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.to_batches(max_chunksize=_ROWS_PER_BATCH):
            yield from batch.to_pylist()


class _SavedRows(StoredRows):
    """Rows of a split that Hugging Face datasets saved, which it maps into memory."""

    def __init__(self, path: Path, saved: Any) -> None:
        self._path, self._saved = path, saved

    def __len__(self) -> int:
        return len(self._saved)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._saved.column_names)

    def place(self, index: int) -> str:
        return f"row {index} of {self._path}"

    def read(self, index: int) -> Row:
        row: Row = self._saved[index]
        return row

    def __iter__(self) -> Iterator[Row]:
        return iter(self._saved)


class _JoinedRows(StoredRows):
    """Several files as one."""

    def __init__(self, parts: Sequence[StoredRows]) -> None:
        self._parts = parts
        self._begins = list(accumulate((len(part) for part in parts), initial=0))

    def __len__(self) -> int:
        return self._begins[-1]

    @property
    def columns(self) -> tuple[str, ...]:
        every = (set(part.columns) for part in self._parts)
        shared = set.intersection(*every) if self._parts else set()
        return tuple(name for name in self._parts[0].columns if name in shared) if shared else ()

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


def _folder(path: Path, split: str) -> StoredRows:
    parquet = sorted(path.glob(f"{split}*.parquet")) or sorted(path.glob(f"*/{split}*.parquet"))
    if parquet:
        return joined_rows(parquet)
    try:
        import datasets
    except ImportError as error:
        raise _missing("datasets") from error
    try:
        saved: Any = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise _unreadable(path, type(error).__name__) from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise InvalidConfig(
                f"{path} has no split {split!r}.",
                reason=Reason.SPLIT_NOT_FOUND,
                remedy=f"Choose one of {', '.join(saved)}.",
            )
        saved = saved[split]
    return _SavedRows(path, saved)


def splits_of(path: Path) -> set[str]:
    """Return the names of the splits in a folder, from its file list or its file names."""
    listing = path / "dataset_dict.json"
    if listing.is_file():
        return set(json.loads(listing.read_text("utf-8")).get("splits", []))
    return {file.name.split("-")[0].removesuffix(".parquet") for file in path.rglob("*.parquet")}


def _missing(package: str) -> InvalidConfig:
    return InvalidConfig(
        f"Reading Parquet and Hugging Face data sets needs the `{package}` package.",
        reason=Reason.PACKAGE_MISSING,
        remedy='Run: pip install "dialoop[datasets]"',
    )


def _unreadable(path: Path, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"The data set {path} cannot be read: {why}.",
        reason=Reason.DATA_UNREADABLE,
        remedy="Give UTF-8 JSON lines, Parquet, or a folder written by datasets.save_to_disk.",
    )
