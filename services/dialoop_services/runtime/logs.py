"""Logs on stderr, as text or JSON, with the service, the run and any ids as fields.

configure_logs("collector")
with log_fields(group_id="addition/0"):
    log.info("Group appended.", extra={"num_trajectories": 8})
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

from pydantic_settings import BaseSettings, SettingsConfigDict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dialoop.waits import Waits

log = logging.getLogger(__name__)

_STALLS_EVERY_S = 5.0
# On a CPU a step or an answer of a real model takes longer than a stall, and is none.
_WARN_AFTER_S = 60.0
# What another library warns of at each normal start.
_EXPECTED = {"vllm.triton_utils.importing": "doesn't include CPU backend"}
_MAX_TEXT = 4000  # characters of a message, or of one field
_OURS = (
    *("dialoop", "dialoop_extras", "dialoop_learning", "dialoop_services", "dialoop_ops"),
    "__main__",  # the module that a service runs as
)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_fields: ContextVar[Mapping[str, object]] = ContextVar("log_fields", default={})  # noqa: B039


class LogSettings(BaseSettings):
    """Settings of the log, the same for all services."""

    model_config = SettingsConfigDict(env_prefix="DIALOOP_", use_attribute_docstrings=True)

    log: Literal["text", "json"] = "text"
    """Format of log records: one line of text, or one JSON object each."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest severity of Dialoop's own records; those of other libraries start at WARNING."""
    run: str = ""
    """Run id in every log record."""


@contextmanager
def log_fields(**fields: object) -> Iterator[None]:
    """Add fields to every record made inside the block, in this task and its children."""
    token = _fields.set({**_fields.get(), **fields})
    try:
        yield
    finally:
        _fields.reset(token)


def add_log_fields(fields: Mapping[str, object]) -> None:
    """Add fields to all later records of this task, which answers one call."""
    _fields.set({**_fields.get(), **fields})


def configure_logs(service: str, settings: LogSettings | None = None) -> None:
    """Send all logs to stderr. A service's entry point calls this once."""
    settings = settings or LogSettings()
    identity = {"service": service} | ({"run": settings.run} if settings.run else {})
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonFormatter(identity) if settings.log == "json" else _TextFormatter(identity)
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    handler.addFilter(RepeatFilter())
    for ours in _OURS:
        logging.getLogger(ours).setLevel(settings.log_level)


async def log_stalls(waits: Waits, *, every_s: float = _STALLS_EVERY_S) -> None:
    """Log every wait that is a stall, again whenever its age has doubled, and its end.

    One that takes no more than twice as long as the last of its kind is the rule: it is not told.
    It is a warning once it has taken a minute.
    """
    due_s: dict[tuple[str, str], float] = {}  # of those that were told
    lasts_s: dict[tuple[str, str], float] = {}  # of those that go on
    last_s: dict[tuple[str, str], float] = {}  # of the last of each kind that has ended
    while True:
        await asyncio.sleep(every_s)
        stalls = {(w.target, w.what): w for w in waits.current() if w.is_stall}
        for kind in lasts_s.keys() - stalls.keys():
            last_s[kind] = lasts_s.pop(kind)
            if (due := due_s.pop(kind, None)) is not None:
                facts = {"target": kind[0], "seconds": round(last_s[kind], 1)}
                log.log(_level(due / 2), "Goes on, after a wait for %s.", kind[1], extra=facts)
        for kind, wait in stalls.items():
            lasts_s[kind] = max(wait.seconds, lasts_s.get(kind, 0.0))
            if wait.seconds >= due_s.get(kind, 2 * last_s.get(kind, 0.0)):
                due_s[kind] = 2 * wait.seconds
                log.log(
                    _level(wait.seconds),
                    "Waits for %s.",
                    wait.what,
                    extra={
                        "target": wait.target,
                        "waits": wait.count,
                        "seconds": round(wait.seconds, 1),
                    },
                )


def _level(seconds: float) -> int:
    return logging.WARNING if seconds >= _WARN_AFTER_S else logging.INFO


class _FieldsFormatter(logging.Formatter):
    """Collects the fields of a record: identity, context, then its own `extra`."""

    def __init__(self, identity: Mapping[str, object]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._identity = identity

    def fields_of(self, record: logging.LogRecord) -> dict[str, object]:
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        return {**self._identity, **_fields.get(), **extra}


class _TextFormatter(_FieldsFormatter):
    """Writes a record as one line, and a traceback as lines that look like no record.

    Ids, messages and errors may hold what a caller sent: a line break in one would begin a line
    that looks like a record of ours, and an escape sequence would be the terminal's.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        fields = " ".join(f"{k}={_shortened(str(v))}" for k, v in self.fields_of(record).items())
        return escape_controls(f"{_shortened(super().formatMessage(record))} [{fields}]")

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return _indent(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - logging's name
        return _indent(super().formatStack(stack_info))


def escape_controls(text: str) -> str:
    """Return the text on one line, without characters that move the cursor or turn the text."""
    return text if text.isprintable() else "".join(map(_escape, text))


def _shortened(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_MAX_TEXT]}... ({len(text) - _MAX_TEXT} more characters)"


def _escape(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def _indent(text: str) -> str:
    return "\n".join(f"    {escape_controls(line)}" for line in text.splitlines())


class RepeatFilter(logging.Filter):
    """Let through the first records of a kind in each minute, and say how many were left out.

    For those of other libraries, such as asyncio's for each connection that it cannot accept, and
    far later for ours: neither a loop of errors nor a caller shall fill the disk. A kind is a place
    in the code.
    """

    def __init__(
        self, *, max_records: int = 20, max_own_records: int = 2000, every_s: float = 60.0
    ) -> None:
        super().__init__()
        self._max_records, self._max_own_records = max_records, max_own_records
        self._every_s = every_s
        self._kinds: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        is_own = record.name.partition(".")[0] in _OURS
        if record.name in _EXPECTED and _EXPECTED[record.name] in record.getMessage():
            return False
        most = self._max_own_records if is_own else self._max_records
        kind = (record.pathname, record.lineno)
        begin, count = self._kinds.get(kind, (record.created, 0))
        if record.created - begin >= self._every_s:
            if count > most:
                record.num_left_out = count - most
            begin, count = record.created, 0
        self._kinds[kind] = (begin, count + 1)
        return count < most


class _JsonFormatter(_FieldsFormatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": _shortened(record.getMessage()),
            **{
                k: _shortened(v) if isinstance(v, str) else v
                for k, v in self.fields_of(record).items()
            },
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)
