"""What a session does stands in one place: the engine in dialoop.environments.sessions."""

from __future__ import annotations

import ast
from pathlib import Path

from dialoop.environments import refusals

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "client" / "dialoop" / "environments" / "sessions"
# The refusals of a session's order; to raise one is to decide it.
ORDER = {
    "episode_done",
    "needs_session",
    "no_capacity",
    "no_room",
    "session_busy",
    "session_conflict",
    "session_expired",
    "session_lost",
    "step_conflict",
    "step_gap",
}
# Reasons a session gives a step or a reset; the refusals' own are read from their module.
REASONS = {"OPEN_FAILED", "OPEN_TIMEOUT", "STEP_CANCELLED", "STEP_FAILED", "STEP_TIMEOUT"}

# These compare reasons that the engine gave, and give none themselves.
READERS = {
    "client/dialoop/clients/errors.py": {"OPEN_FAILED", "OPEN_TIMEOUT"},
    "services/dialoop_ops/conformance/environment/play.py": {"STEP_TIMEOUT"},
}


def decisions(source: str) -> set[str]:
    """Return the refusals and reasons of sessions that the code uses."""
    names: set[str] = set()
    if not any(word in source for word in ORDER | REASONS):
        return names  # parsing is slow
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("refusals"):
            names |= {node.attr} & ORDER
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Reason":
            names |= {node.attr} & REASONS
        elif isinstance(node, ast.ImportFrom) and (node.module or "").endswith("refusals"):
            names |= {alias.name for alias in node.names} & ORDER
    return names


def test_the_engine_alone_decides_what_a_session_does():
    by_file = {
        path.relative_to(ROOT): decisions(path.read_text("utf-8"))
        for folder in ("client/dialoop", "services")
        for path in (ROOT / folder).rglob("*.py")
    }
    elsewhere = {
        str(path): names
        for path, names in by_file.items()
        if names and ENGINE not in (ROOT / path).parents
    }
    assert elsewhere == READERS
    used = set().union(*by_file.values())
    assert used == ORDER | REASONS  # each is raised by the engine, or this test guards nothing


def test_every_order_refusal_exists():
    assert {name for name in ORDER if not callable(getattr(refusals, name, None))} == set()
