"""Reasons are members of one enum: none is written out a second time."""

from __future__ import annotations

import ast
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import dialoop_services
import pytest
from dialoop import reasons
from dialoop.errors import NotFound, PreconditionFailed
from dialoop.reasons import DropReason, OtherReason, Reason, reason_of

ROOT = Path(__file__).parents[2]
PRODUCT = [*ROOT.glob("client/dialoop*"), *ROOT.glob("services/dialoop*")]
SCRIPTS = Path(dialoop_services.__path__[0]) / "replay" / "redis_store" / "scripts"


def product_files() -> Iterator[Path]:
    for folder in PRODUCT:
        for path in folder.rglob("*.py"):
            if "v1" not in path.parts and path.name != "reasons.py":
                yield path


def written_reasons(tree: ast.AST) -> Iterator[ast.Constant]:
    """Return texts in the place of a reason, and texts that are a reason of several words."""
    several_words = {reason for reason in Reason if "_" in reason}
    # gRPC's own names of statuses, which two reasons share.
    several_words -= {Reason.DEADLINE_EXCEEDED, Reason.FAILED_PRECONDITION}
    for node in ast.walk(tree):
        places: list[ast.expr] = []
        if (isinstance(node, ast.keyword) and node.arg == "reason") or (
            isinstance(node, ast.Assign) and "default_reason" in map(ast.unparse, node.targets)
        ):
            places = [node.value]
        elif isinstance(node, ast.Compare) and ast.unparse(node.left).endswith(".reason"):
            places = list(node.comparators)
        for place in places:
            # Of `a if b else c` the reasons are a and c.
            branches = [place.body, place.orelse] if isinstance(place, ast.IfExp) else [place]
            yield from (text for text in branches if isinstance(text, ast.Constant) and text.value)
        if isinstance(node, ast.Constant) and node.value in several_words:
            yield node


def test_no_reason_is_written_out_in_product_code() -> None:
    places = [
        f"{path}:{text.lineno}: {text.value!r}"
        for path in product_files()
        for text in written_reasons(ast.parse(path.read_text("utf-8")))
        if isinstance(text.value, str) and re.fullmatch("[A-Za-z]+(_[A-Za-z]+)*", text.value)
    ]
    assert not places


@pytest.mark.parametrize(
    "code",
    ['f(reason="BUSY")', 'f(reason="X" if y else z)', 'e.reason == "BUSY"', 'x = "LEASE_LOST"'],
)
def test_a_written_reason_would_be_found(code: str) -> None:
    assert list(written_reasons(ast.parse(code)))


def test_every_reason_has_a_use_and_a_meaning() -> None:
    files = [*product_files(), Path(reasons.__file__)]  # a function beside the enums uses one
    text = "".join(path.read_text("utf-8") for path in files)
    scripts = "".join(path.read_text("utf-8") for path in SCRIPTS.glob("*.lua"))
    used = set(re.findall(r"\b(?:Reason|DropReason)\.\w+", text))
    for kind in (Reason, DropReason):
        for reason in kind:
            is_counted = re.search(rf"[':]{reason}'", scripts)  # as 'dropped:stale'
            assert f"{kind.__name__}.{reason.name}" in used or is_counted, reason
            assert reason.meaning.endswith("."), reason


def test_the_scripts_know_no_other_reason() -> None:
    refusals, drops = set[str](), set[str]()
    for path in SCRIPTS.glob("*.lua"):
        text = path.read_text("utf-8")
        refusals |= set(re.findall(r"(?:refused\(|return |and |or )'([A-Z]+(?:_[A-Z]+)+)'", text))
        named = r"(?:drop|release|close)\(\w+|(?:redeliver|drop_entry)\(\w+, \w+"
        calls = rf"(?:{named}), '(\w+)'|dropped:(\w+)'"
        drops |= {first or second for first, second in re.findall(calls, text)}
    statuses = {text for text in refusals if text.startswith("EMPTY_REASON_")}
    assert refusals - statuses <= set(Reason)
    assert {"LEASE_LOST", "TOO_LARGE", "DIGEST_MISMATCH", "FUTURE_VERSION"} <= refusals
    assert drops == {
        DropReason.NO_ROOM,
        DropReason.DROPPED_OLDEST,
        DropReason.STALE,
        DropReason.DEAD_LETTER,
        DropReason.DEAD_LETTER_FORGOTTEN,
        DropReason.LEASE_EXPIRED,
        DropReason.MEMBER_FAILED,
        DropReason.MEMBER_RETRIED,
        DropReason.NO_TRAINABLE_TOKEN,
    }


def test_a_reason_is_the_text_that_goes_over_the_wire() -> None:
    assert f"{Reason.SESSION_LOST}" == Reason.SESSION_LOST == "SESSION_LOST"
    assert json.dumps({"reason": Reason.SESSION_LOST}) == '{"reason": "SESSION_LOST"}'
    assert all(reason == reason.name for reason in Reason)
    assert all(reason == reason.name.lower() for reason in DropReason)


def test_a_reason_of_a_newer_service_or_of_an_environment_is_kept() -> None:
    assert reason_of("SESSION_LOST") is Reason.SESSION_LOST
    error = PreconditionFailed("The board is locked.", reason=reason_of("BOARD_LOCKED"))
    assert error.reason == OtherReason("BOARD_LOCKED")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again.reason), again.reason) == (OtherReason, "BOARD_LOCKED")
    assert pickle.loads(pickle.dumps(NotFound("gone"))).reason is Reason.NOT_FOUND
