"""The index of a run: SQLite beside it, made from the run's files and never the other way round.

`RunIndex(run_dir).catch_up()` makes it or reads on; `page(Filters())` asks it. It holds a summary
of each trajectory, the words of its messages, the numbers of metrics.jsonl, and where each line
lies. Token numbers stay in trajectories.jsonl and are read from there by offset.
"""

from __future__ import annotations

import json
import re
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dialoop.errors import NotFound, Unavailable
from dialoop_services.trainer.records.rows import METRICS, is_kept, numbers_of, trajectory_files

from dialoop_ops.runs.filters import (
    Filters,
    bits_of_owners,
    bits_of_stops,
    owners_of_bits,
    stops_of_bits,
)
from dialoop_ops.runs.line_files import Position, whole_lines
from dialoop_ops.runs.summaries import (
    EVALUATION,
    TrajectorySummary,
    staleness_of,
    summary_of,
    text_of,
    versions_by_step,
)

FILE = "index.sqlite"
DEBUG_TABLE = "debug_table.jsonl"
VERSION = 4
"""Number of the tables' form: an index with another one is made anew."""
MAX_LIMIT = 500
SORTS = ("number", "reward", "advantage", "staleness", "num_sampled", "num_turns", "train_step")

_BUSY_S = 30.0
_CHUNK_BYTES = 16 << 20
_MAX_INT = 2**63 - 1
# Numbers of tokens, which a summary does not need: parsing them takes most of the time. Inside a
# text of JSON the quotation mark before the colon has a backslash, so that no text matches.
_TOKEN_NUMBERS = re.compile(
    rb'"(?:token_ids|inference_logprobs|ref_logprobs|token_advantages)": \[[^\]"]*\]'
)
_TABLES = """
CREATE TABLE source (
  id INTEGER PRIMARY KEY, kind TEXT, name TEXT,
  offset INTEGER, head_bytes INTEGER, head BLOB, tail BLOB
);
CREATE TABLE trajectory (
  number INTEGER PRIMARY KEY AUTOINCREMENT, source INTEGER, offset INTEGER, num_bytes INTEGER,
  trajectory_id TEXT, group_id TEXT, task_key TEXT, environment TEXT, outcome TEXT, label TEXT,
  train_step INTEGER, reward REAL, advantage REAL, done_reason TEXT, stops INTEGER, owners INTEGER,
  num_turns INTEGER, num_tool_calls INTEGER, num_sequences INTEGER, num_tokens INTEGER,
  num_sampled INTEGER, lineage TEXT, oldest INTEGER, newest INTEGER, staleness INTEGER, preview TEXT
);
CREATE INDEX by_id ON trajectory (trajectory_id);
CREATE INDEX by_group ON trajectory (group_id);
-- What filters and sorts ask for: a count or a sort reads this, and not the rows with their texts.
CREATE INDEX by_step ON trajectory (
  train_step, reward, advantage, staleness, num_sampled, num_turns, num_tool_calls, oldest, newest,
  outcome, environment, label, stops, owners
);
CREATE INDEX failed ON trajectory (owners) WHERE owners <> 0;
CREATE INDEX pending ON trajectory (train_step)
  WHERE staleness IS NULL AND oldest IS NOT NULL AND outcome <> 'evaluation';
CREATE VIRTUAL TABLE words USING fts5 (text, content='', tokenize='trigram');
CREATE TABLE metric (
  number INTEGER PRIMARY KEY, kind TEXT, label TEXT, train_step INTEGER, lineage TEXT,
  policy_version INTEGER, time REAL, is_kept INTEGER
);
CREATE TABLE series (id INTEGER PRIMARY KEY, name TEXT UNIQUE);
CREATE TABLE point (series INTEGER, metric INTEGER, value REAL, PRIMARY KEY (series, metric))
  WITHOUT ROWID;
CREATE TABLE debug (trajectory_id TEXT, offset INTEGER, num_bytes INTEGER);
CREATE INDEX debug_by_id ON debug (trajectory_id);
CREATE TABLE bad_line (source INTEGER, offset INTEGER);
"""
_FIELDS = (
    "number, trajectory_id, group_id, task_key, environment, outcome, label, train_step, reward, "
    "advantage, done_reason, stops, owners, num_turns, num_tool_calls, num_sequences, num_tokens, "
    "num_sampled, lineage, oldest, newest, staleness, preview"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How much of a run the index holds. `num_bad_lines`: lines that cannot be read.

    `num_bytes` stays below `num_bytes_of_run` while the last line of a file is being written.
    """

    num_trajectories: int
    num_bad_lines: int
    num_bytes: int
    num_bytes_of_run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some of the trajectories that match, and how many match."""

    total: int
    summaries: tuple[TrajectorySummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A number of a metric: when it was written, after which step, by which policy version.

    Numbers of one line of metrics.jsonl have the same `row`.
    """

    row: int
    time: float
    train_step: int
    lineage: str | None
    policy_version: int | None
    value: float


class RunIndex:
    """The index of one run. Any thread may call it; each call has a connection of its own."""

    def __init__(self, run_dir: Path) -> None:
        """Name the run; the index is made by the first `refresh`.

        Where the run's directory cannot be written to, the index is a temporary file.
        """
        self.run_dir = run_dir
        self._path = run_dir / FILE
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if not _is_writable(run_dir):
            self._temporary = tempfile.TemporaryDirectory(prefix="dialoop-index-")
            self._path = Path(self._temporary.name) / FILE

    def close(self) -> None:
        """Delete the index if it is temporary."""
        if self._temporary is not None:
            self._temporary.cleanup()

    # -- making it

    def refresh(self, max_bytes: int = _CHUNK_BYTES) -> Progress:
        """Read on in the run's files, about `max_bytes` of each, and return how far it is.

        An index that is torn, or of another version, is deleted and begun again.
        """
        try:
            return self._refresh(max_bytes)
        except sqlite3.OperationalError:
            if not self._is_torn():
                raise
        except sqlite3.DatabaseError:
            pass
        self._delete()
        return self._refresh(max_bytes)

    def catch_up(self) -> Progress:
        """Read everything that is there, and return how much that is."""
        progress = self.refresh()
        while (further := self.refresh()).num_bytes != progress.num_bytes:
            progress = further
        return further

    def _is_torn(self) -> bool:
        try:
            with self._connect() as connection:
                return _version(connection) != VERSION
        except sqlite3.DatabaseError:
            return True

    def _delete(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)

    def _refresh(self, max_bytes: int) -> Progress:
        with self._connect() as connection:
            if _version(connection) not in (0, VERSION):
                raise sqlite3.DatabaseError("an index of another version")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")  # it is made anew when it is torn
            connection.execute("BEGIN IMMEDIATE")
            if not _version(connection):
                _make_tables(connection)
            progress = _Refresh(connection, self.run_dir, max_bytes).read_all()
            connection.execute("COMMIT")
        return progress

    # -- asking it

    def page(
        self, filters: Filters, *, sort: str = "-number", offset: int = 0, limit: int = 50
    ) -> Page:
        """Return matching trajectories by a column of SORTS; "-reward" begins with the highest."""
        condition, values = filters.where()
        column = sort.removeprefix("-")
        if column not in SORTS:
            raise NotFound(
                f"There is no column '{column[:40]}' to sort by.", remedy=f"Use {', '.join(SORTS)}."
            )
        direction = "DESC" if sort.startswith("-") else "ASC"
        with self._reading() as connection:
            (total,) = connection.execute(
                f"SELECT count(*) FROM trajectory WHERE {condition}", values
            ).fetchone()
            order = f"ORDER BY {column} {direction} NULLS LAST, number {direction}"
            rows = connection.execute(
                # Numbers are sorted before whole rows are read: that takes a third of the time.
                f"SELECT {_FIELDS} FROM trajectory WHERE number IN (SELECT number FROM trajectory "
                f"WHERE {condition} {order} LIMIT ? OFFSET ?) {order}",
                [*values, min(limit, MAX_LIMIT), offset],
            ).fetchall()
        return Page(total=total, summaries=tuple(map(_summary_of_columns, rows)))

    def summary(self, number: int) -> TrajectorySummary:
        """Return one trajectory's summary; NotFound where the run has none of the number."""
        with self._reading() as connection:
            row = connection.execute(
                f"SELECT {_FIELDS} FROM trajectory WHERE number = ?", (number,)
            ).fetchone()
        if row is None:
            raise _no_trajectory(number)
        return _summary_of_columns(row)

    def row(self, number: int) -> dict[str, Any]:
        """Return the whole line of a trajectory, read from its file."""
        with self._reading() as connection:
            place = connection.execute(
                "SELECT name, trajectory.offset, num_bytes, trajectory_id FROM trajectory "
                "JOIN source ON source.id = source WHERE number = ?",
                (number,),
            ).fetchone()
        if place is None:
            raise _no_trajectory(number)
        name, offset, num_bytes, trajectory_id = place
        row = self._line(name, offset, num_bytes)
        if row is None or row.get("trajectory_id") != trajectory_id:
            raise Unavailable(
                "The run's files have changed since they were indexed.",
                remedy="Ask again; the index is brought up to date.",
            )
        return row

    def debug_rows(self, trajectory_id: str) -> list[dict[str, Any]]:
        """Return the lines of debug_table.jsonl of a trajectory, oldest first."""
        with self._reading() as connection:
            places = connection.execute(
                "SELECT offset, num_bytes FROM debug WHERE trajectory_id = ? ORDER BY offset",
                (trajectory_id,),
            ).fetchall()
        rows = (self._line(DEBUG_TABLE, *place) for place in places)
        return [row for row in rows if row is not None]

    def choices(self) -> dict[str, list[str]]:
        """Return the values that the filters with few values can have, and what the run has."""
        texts, columns = ("environment", "outcome", "label"), "environment, outcome, label"
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT DISTINCT {columns}, stops, owners FROM trajectory"
            ).fetchall()
        listed = {name: {row[place] for row in rows} for place, name in enumerate(texts)}
        listed["stop_reason"] = {name for row in rows for name in stops_of_bits(row[3])}
        listed["owner"] = {name for row in rows for name in owners_of_bits(row[4])}
        return {name: sorted(filter(None, values)) for name, values in listed.items()}

    def progress(self) -> Progress:
        """Return how much of the run the index holds, reading nothing of it."""
        with self._reading() as connection:
            return _progress(connection, self.run_dir)

    def metric_names(self) -> list[str]:
        """Return the names of all series: "train/reward", "evaluation/after_greedy/..."."""
        with self._reading() as connection:
            return [name for (name,) in connection.execute("SELECT name FROM series ORDER BY name")]

    def trained_by_step(self) -> dict[int, tuple[int, float, float | None]]:
        """Return how many trajectories each train step trained, and two means of sampled tokens.

        The first mean is of all that were played for it, the second of those that it trained.
        """
        trained = "CASE outcome WHEN 'trained' THEN num_sampled END"
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT train_step, COUNT({trained}), AVG(num_sampled), AVG({trained}) "
                "FROM trajectory WHERE outcome <> 'evaluation' GROUP BY train_step"
            )
            return {step: (count, played, of_trained) for step, count, played, of_trained in rows}

    def rewards_by_task(
        self, label: str | None, first_step: int, last_step: int
    ) -> dict[str, tuple[int, float]]:
        """Return the mean reward of each task of some train steps, with its first trajectory.

        They are of the evaluations with this label; None: of what was played for training.
        """
        of = "outcome <> :evaluation" if label is None else "outcome = :evaluation AND label = :of"
        named = {"evaluation": EVALUATION, "of": label, "first": first_step, "last": last_step}
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT task_key, min(number), avg(reward) FROM trajectory WHERE {of} "
                "AND train_step BETWEEN :first AND :last AND reward IS NOT NULL "
                "GROUP BY task_key ORDER BY min(number)",
                named,
            )
            return {task: (number, reward) for task, number, reward in rows}

    def count_failures(self) -> dict[str, int]:
        """Return how many trajectories had a failure of each owner."""
        counts: Counter[str] = Counter()
        with self._reading() as connection:
            for bits, count in connection.execute(
                "SELECT owners, count(*) FROM trajectory WHERE owners <> 0 GROUP BY owners"
            ):
                counts.update(dict.fromkeys(owners_of_bits(bits), count))
        return dict(counts)

    def last_time(self) -> float | None:
        """Return when the newest row of metrics.jsonl was written; None before the first."""
        with self._reading() as connection:
            (time,) = connection.execute("SELECT max(time) FROM metric WHERE is_kept").fetchone()
        return None if time is None else float(time)

    def points(self, name: str) -> tuple[Point, ...]:
        """Return a series in the order of writing, without steps that a restore discarded.

        A number that is not finite is NaN.
        """
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT metric, time, train_step, lineage, policy_version, value FROM series "
                "JOIN point ON point.series = series.id JOIN metric ON metric.number = metric "
                "WHERE name = ? AND is_kept ORDER BY metric.number",
                (name,),
            ).fetchall()
        return tuple(
            Point(
                row=row,
                time=time,
                train_step=step,
                lineage=lineage,
                policy_version=version,
                value=float("nan") if value is None else value,
            )
            for row, time, step, lineage, version, value in rows
        )

    def _line(self, name: str, offset: int, num_bytes: int) -> dict[str, Any] | None:
        try:
            with (self.run_dir / name).open("rb") as file:
                file.seek(offset)
                row = json.loads(file.read(num_bytes))
        except (OSError, ValueError):
            return None
        return row if isinstance(row, dict) else None

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
        with closing(connection):
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._connect() as connection:
                yield connection
        except sqlite3.DatabaseError as error:
            raise Unavailable(
                f"The index of {self.run_dir.name} is being made.",
                remedy="Ask again in a moment.",
            ) from error


class _Refresh:
    """One pass over the run's files, inside a transaction."""

    def __init__(self, connection: sqlite3.Connection, run_dir: Path, max_bytes: int) -> None:
        self._connection = connection
        self._run_dir = run_dir
        self._max_bytes = max_bytes
        self._versions = _versions(connection)

    def read_all(self) -> Progress:
        """Read on in every file, and forget those that are gone or were written anew."""
        for kind, name, add in (
            ("metrics", METRICS, self._add_metrics),
            ("debug", DEBUG_TABLE, self._add_debug),
        ):
            path = self._run_dir / name
            self._read(kind, [path] if path.is_file() else [], add)
        self._read("trajectories", list(trajectory_files(self._run_dir)), self._add_trajectories)
        return _progress(self._connection, self._run_dir)

    def _read(self, kind: str, paths: list[Path], add: Any) -> None:
        positions = {
            source: (name, Position(offset=offset, head_bytes=size, head=head, tail=tail))
            for source, name, offset, size, head, tail in self._connection.execute(
                "SELECT id, name, offset, head_bytes, head, tail FROM source WHERE kind = ?",
                (kind,),
            ).fetchall()
        }
        seen: set[int] = set()
        todo: list[tuple[Path, int | None]] = []
        for path in paths:
            source = _source_of(path, {k: p for k, (_, p) in positions.items() if k not in seen})
            todo.append((path, source))
            seen |= {source} if source is not None else set()
        for source in positions.keys() - seen:
            self._forget(kind, source)
        for path, source in todo:
            position = Position() if source is None else positions[source][1]
            self._read_on(kind, path, source, position, add)

    def _read_on(
        self, kind: str, path: Path, source: int | None, position: Position, add: Any
    ) -> None:
        try:
            file = path.open("rb")
        except FileNotFoundError:  # renamed this moment: the next pass finds it
            return
        with file:
            if not position.is_of(file):
                return
            lines = list(whole_lines(file, position.offset, self._max_bytes))
            if source is None:
                if not lines:
                    return
                source = self._connection.execute(
                    "INSERT INTO source (kind) VALUES (?)", (kind,)
                ).lastrowid
            if lines:
                add(source, lines)
                offset, line = lines[-1]
                position = position.move(file, offset + len(line))
        self._connection.execute(
            "UPDATE source SET name = ?, offset = ?, head_bytes = ?, head = ?, tail = ? "
            "WHERE id = ?",
            (
                *(path.name, position.offset, position.head_bytes, position.head, position.tail),
                source,
            ),
        )

    def _forget(self, kind: str, source: int) -> None:
        """Delete what was read from a file. Words of deleted trajectories match no number."""
        execute = self._connection.execute
        if kind == "trajectories":
            execute("DELETE FROM trajectory WHERE source = ?", (source,))
        elif kind == "debug":
            execute("DELETE FROM debug")
        else:
            for table in ("metric", "point", "series"):
                execute(f"DELETE FROM {table}")
            execute("UPDATE trajectory SET staleness = NULL")
            self._versions = {}
        execute("DELETE FROM bad_line WHERE source = ?", (source,))
        execute("DELETE FROM source WHERE id = ?", (source,))

    def _add_trajectories(self, source: int, lines: list[tuple[int, bytes]]) -> None:
        (first,) = self._connection.execute(
            "SELECT coalesce(max(seq), 0) + 1 FROM sqlite_sequence WHERE name = 'trajectory'"
        ).fetchone()
        columns: list[tuple[Any, ...]] = []
        words: list[tuple[int, str]] = []
        for offset, line in lines:
            number = first + len(columns)
            try:
                row = json.loads(_TOKEN_NUMBERS.sub(b'"_":[]', line))
                summary = summary_of(row, number=number, versions=self._versions)
                values = _columns_of(summary)
            except ValueError:
                self._connection.execute("INSERT INTO bad_line VALUES (?, ?)", (source, offset))
                continue
            columns.append((source, offset, len(line), *values))
            words.append((number, _storable(text_of(row))))
        marks = ", ".join("?" * 26)
        self._connection.executemany(
            f"INSERT INTO trajectory (source, offset, num_bytes, {_FIELDS}) VALUES ({marks})",
            columns,
        )
        self._connection.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", words)

    def _add_metrics(self, source: int, lines: list[tuple[int, bytes]]) -> None:
        rows = []
        for offset, line in lines:
            try:
                row = json.loads(line)
                self._add_metric(row)
            except (ValueError, KeyError, TypeError, AttributeError, sqlite3.Error, OverflowError):
                self._connection.execute("INSERT INTO bad_line VALUES (?, ?)", (source, offset))
                continue
            rows.append(row)
        new = versions_by_step(rows)
        self._versions |= new
        steps = sorted({step for _, step in new})
        for step in steps:
            pending = self._connection.execute(
                f"SELECT {_FIELDS} FROM trajectory WHERE train_step = ? AND staleness IS NULL "
                f"AND oldest IS NOT NULL AND outcome <> '{EVALUATION}'",
                (step,),
            ).fetchall()
            summaries = map(_summary_of_columns, pending)
            self._connection.executemany(
                "UPDATE trajectory SET staleness = ? WHERE number = ?",
                [(staleness_of(summary, self._versions), summary.number) for summary in summaries],
            )

    def _add_metric(self, row: Mapping[str, Any]) -> None:
        execute = self._connection.execute
        names = ("kind", "label", "train_step", "lineage", "policy_version", "time")
        if row["kind"] == "restore":
            earlier = execute(
                "SELECT number, kind, label, train_step FROM metric WHERE is_kept"
            ).fetchall()
            discarded = [
                (number,)
                for number, kind, label, step in earlier
                if not is_kept({"kind": kind, "label": label or "", "train_step": step}, row)
            ]
            self._connection.executemany(
                "UPDATE metric SET is_kept = 0 WHERE number = ?", discarded
            )
        number = execute(
            f"INSERT INTO metric ({', '.join(names)}, is_kept) VALUES (?, ?, ?, ?, ?, ?, 1)",
            [row.get(name) for name in names],
        ).lastrowid
        for name, value in numbers_of(row).items():
            execute("INSERT OR IGNORE INTO series (name) VALUES (?)", (name,))
            execute(
                "INSERT INTO point SELECT id, ?, ? FROM series WHERE name = ?",
                (number, value, name),
            )

    def _add_debug(self, source: int, lines: list[tuple[int, bytes]]) -> None:
        for offset, line in lines:
            match = re.search(rb'"trajectory_id": "([^"\\]*)"', line)
            if match is None:
                self._connection.execute("INSERT INTO bad_line VALUES (?, ?)", (source, offset))
                continue
            self._connection.execute(
                "INSERT INTO debug VALUES (?, ?, ?)", (match[1].decode(), offset, len(line))
            )


def _is_writable(run_dir: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=run_dir):
            return True
    except OSError:
        return False


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _make_tables(connection: sqlite3.Connection) -> None:
    for statement in _TABLES.split(";\n"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def _source_of(path: Path, positions: Mapping[int, Position]) -> int | None:
    """Return the source that this file continues."""
    try:
        with path.open("rb") as file:
            return next((k for k, position in positions.items() if position.is_of(file)), None)
    except FileNotFoundError:
        return None


def _versions(connection: sqlite3.Connection) -> dict[tuple[str, int], int]:
    rows = connection.execute(
        "SELECT kind, lineage, train_step, policy_version FROM metric "
        "WHERE lineage IS NOT NULL ORDER BY number"
    )
    names = ("kind", "lineage", "train_step", "policy_version")
    return versions_by_step(dict(zip(names, row, strict=True)) for row in rows)


def _progress(connection: sqlite3.Connection, run_dir: Path) -> Progress:
    (count,) = connection.execute("SELECT count(*) FROM trajectory").fetchone()
    (num_bad,) = connection.execute("SELECT count(*) FROM bad_line").fetchone()
    (num_bytes,) = connection.execute("SELECT coalesce(sum(offset), 0) FROM source").fetchone()
    paths = (*trajectory_files(run_dir), run_dir / METRICS, run_dir / DEBUG_TABLE)
    sizes = Counter({path.name: path.stat().st_size for path in paths if path.is_file()})
    return Progress(
        num_trajectories=count,
        num_bad_lines=num_bad,
        num_bytes=num_bytes,
        num_bytes_of_run=sizes.total(),
    )


def _columns_of(summary: TrajectorySummary) -> tuple[Any, ...]:
    """Return the values of _FIELDS; ValueError for a number that no column can hold."""
    values = asdict(summary)
    values["stops"] = bits_of_stops(values.pop("stop_reasons"))
    values["owners"] = bits_of_owners(values["owners"])
    if any(isinstance(value, int) and abs(value) > _MAX_INT for value in values.values()):
        raise ValueError("a number beyond 64 bits")
    columns = (values[name] for name in _FIELDS.split(", "))
    return tuple(_storable(value) if isinstance(value, str) else value for value in columns)


def _storable(text: str) -> str:
    """Return the text without halves of characters, which UTF-8 cannot spell."""
    return text.encode("utf-8", "replace").decode()


def _summary_of_columns(columns: tuple[Any, ...]) -> TrajectorySummary:
    values = dict(zip(_FIELDS.split(", "), columns, strict=True))
    values["stop_reasons"] = stops_of_bits(values.pop("stops"))
    values["owners"] = owners_of_bits(values["owners"])
    return TrajectorySummary(**values)


def _no_trajectory(number: int) -> NotFound:
    return NotFound(
        f"The run has no trajectory number {number}.", remedy="Choose one from the list."
    )
