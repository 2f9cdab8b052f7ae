"""These need a container engine and minutes: `make compose-test` names the engine's folder."""

from __future__ import annotations

import os

if "COMPOSE_TEST" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
