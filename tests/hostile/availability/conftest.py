"""One service for all attacks of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.availability.attacked import Service, service


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("attacked"), UNREAD_S="2") as own:
        yield own
