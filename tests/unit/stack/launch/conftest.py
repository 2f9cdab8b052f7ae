"""A launcher sets a token for services of several machines: it may not outlive its test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _token_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIALOOP_TOKEN", "")  # so that the end of the test restores what was there
    monkeypatch.delenv("DIALOOP_TOKEN")
