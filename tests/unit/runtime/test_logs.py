"""Records as text: what callers sent is shown and is never a record itself."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from dialoop_services.runtime import logs
from dialoop_services.runtime.logs import LogSettings, RepeatFilter, configure_logs, log_fields

FORGED = "a\n2026-11-23 10:00:00,000 ERROR forged"
EVIL = (FORGED, "\x1b[2J\x1b[31mred", "a\rb", "\u202etxt", "\x00", "\u2028x", "\x9b31m", "\ud800")


@pytest.fixture
def formatter() -> logging.Formatter:
    before = logging.root.handlers[:]
    loggers = [logging.getLogger(name) for name in ("root", *logs._OURS)]
    levels = [logger.level for logger in loggers]
    configure_logs("replay", LogSettings(log="text"))
    (handler,) = logging.root.handlers
    logging.root.handlers[:] = before
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    assert any(isinstance(item, RepeatFilter) for item in handler.filters)
    assert handler.formatter is not None
    return handler.formatter


def record(message: str, name: str = "dialoop.x", **extra: object) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.ERROR, "x.py", 1, message, (), None)
    vars(made).update(extra)
    return made


@pytest.mark.parametrize("evil", EVIL)
def test_what_callers_sent_stays_on_the_line_of_its_record(formatter, evil):
    with log_fields(session_id=evil):
        text = formatter.format(record(evil, other=evil))
    assert text.isprintable()
    assert text.count(evil.encode("unicode_escape").decode()) == 3


def test_readable_text_is_left_as_it_is(formatter):
    text = formatter.format(record("größer: 1+2 \U0001f600", path="a\\b"))
    assert text.endswith("größer: 1+2 \U0001f600 [service=replay path=a\\b]")


def test_a_traceback_cannot_forge_a_record(formatter):
    made = record("Internal error.")
    try:
        raise ValueError(FORGED + "\x1b[2J")
    except ValueError:
        made.exc_info = sys.exc_info()
    first, *others = formatter.format(made).split("\n")
    assert "Internal error." in first
    assert others
    assert all(line.startswith("    ") and line.isprintable() for line in others)


def test_what_a_library_says_at_each_start_is_left_out():
    usual = "Triton is installed, but doesn't include CPU backend. Disabling Triton."
    name = "vllm.triton_utils.importing"
    passed = [RepeatFilter().filter(record(text, name)) for text in (usual, "Triton is broken.")]
    assert passed == [False, True]


def test_a_loop_of_other_libraries_errors_is_written_in_part(monkeypatch):
    repeats = RepeatFilter(max_records=3, every_s=60)
    passed = [repeats.filter(record("no", "asyncio", created=float(i))) for i in range(50)]
    assert passed == [True] * 3 + [False] * 47
    later = record("no", "asyncio", created=61.0)
    assert repeats.filter(later)
    assert later.num_left_out == 47


def test_a_caller_can_fill_no_log_with_records_of_ours(formatter):
    repeats = RepeatFilter(max_own_records=50)
    assert sum(repeats.filter(record("ours", created=0.0)) for _ in range(1000)) == 50
    assert len(formatter.format(record("x" * 100_000, session_id="y" * 100_000))) < 10_000


def test_a_line_break_is_escaped():
    assert logs.escape_controls("a\nb") == "a\\nb"


def test_what_the_module_that_runs_as_a_service_logs_is_written(tmp_path):
    script = tmp_path / "service.py"
    script.write_text(
        "import logging\n"
        "from dialoop_services.runtime.logs import configure_logs\n"
        "configure_logs('probe')\n"
        "logging.getLogger(__name__).info('The model is loaded.')\n"
        "logging.getLogger('other').info('Nobody asked.')\n"
    )
    command = [sys.executable, str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "The model is loaded." in ended.stderr
    assert "Nobody asked." not in ended.stderr
