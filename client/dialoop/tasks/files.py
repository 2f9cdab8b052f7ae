"""Rows of a data set on disk: JSON lines, Parquet, or a folder that Hugging Face datasets saved.

rows_of("gsm8k/train.jsonl")
rows_of("gsm8k/train.parquet")        # extra: pip install "dialoop[datasets]"
rows_of("gsm8k", split="train")       # datasets.save_to_disk, or a folder of Parquet files
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dialoop.environments.tasks.row_tasks import Collate, RowTasks, text_to_query
from dialoop.environments.tasks.source import share_of
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

Row = Mapping[str, Any]


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
    if not 0 <= heldout_fraction < 1 or (heldout_path and heldout_fraction):
        raise InvalidConfig(
            f"heldout_fraction is {heldout_fraction} and heldout_path is {heldout_path!r}.",
            remedy="Use a share from 0 to below 1, and only one of the two.",
        )
    path = Path(path)
    train = list(rows_of(path, split=split))
    heldout: list[Row] = []
    if heldout_path:
        heldout = list(rows_of(Path(heldout_path), split=heldout_split))
    elif heldout_fraction:
        kept = [share_of(str(number)) >= heldout_fraction for number in range(len(train))]
        heldout = [row for row, keep in zip(train, kept, strict=True) if not keep]
        train = [row for row, keep in zip(train, kept, strict=True) if keep]
    elif path.is_dir() and heldout_split in _splits_of(path):
        heldout = list(rows_of(path, split=heldout_split))
    return RowTasks({"train": train, **({"heldout": heldout} if heldout else {})}, collate=collate)


def rows_of(path: str | Path, *, split: str = "train") -> Iterator[Row]:
    """Return the rows of a file or of a folder's split; InvalidConfig if they cannot be read."""
    path = Path(path)
    if path.is_dir():
        return _folder(path, split)
    if path.suffix in (".jsonl", ".json"):
        return _json_lines(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    raise InvalidConfig(
        f"{path} is neither a folder nor a .jsonl, .json or .parquet file.",
        reason=Reason.DATA_UNREADABLE,
        remedy="Give a .jsonl or .parquet file, or a folder written by datasets.save_to_disk.",
    )


def _json_lines(path: Path) -> Iterator[Row]:
    try:
        # Split by newlines alone, since JSON strings may hold every other line separator.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, type(error).__name__) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise _unreadable(path, f"line {number} is not JSON") from None
        if not isinstance(row, dict):
            raise _unreadable(path, f"line {number} is not a JSON object")
        yield row


def _parquet(path: Path) -> Iterator[Row]:
    _require_datasets()
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, type(error).__name__) from error
    return iter(rows)


def _folder(path: Path, split: str) -> Iterator[Row]:
    parquet = sorted(path.glob(f"{split}*.parquet")) or sorted(path.glob(f"*/{split}*.parquet"))
    if parquet:
        return (row for file in parquet for row in _parquet(file))
    _require_datasets()
    import datasets

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
    return iter(saved)


def _splits_of(path: Path) -> set[str]:
    """Return the names of the splits in a folder, from its file list or its file names."""
    listing = path / "dataset_dict.json"
    if listing.is_file():
        return set(json.loads(listing.read_text("utf-8")).get("splits", []))
    return {file.name.split("-")[0].removesuffix(".parquet") for file in path.rglob("*.parquet")}


def _require_datasets() -> None:
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        raise InvalidConfig(
            "Reading Parquet and Hugging Face data sets needs the `datasets` package.",
            reason=Reason.PACKAGE_MISSING,
            remedy='Run: pip install "dialoop[datasets]"',
        ) from error


def _unreadable(path: Path, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"The data set {path} cannot be read: {why}.",
        reason=Reason.DATA_UNREADABLE,
        remedy="Give UTF-8 JSON lines, Parquet, or a folder written by datasets.save_to_disk.",
    )
