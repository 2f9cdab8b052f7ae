"""Each kind of use of another package's private name is found in a small source."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import check_private

OWN_POOL = """
import redis

class Pool(redis.Pool[int]):
    def __init__(self):
        self._own = []

    def _close(self):
        return self._own, self.__dict__

class Small(Pool):
    def close(self):
        return self._own, super()._close(), self._close()
"""


def found_in(root: Path, source: str) -> set[str]:
    """Return what is found in a file of ours, as `kind name`."""
    place = root / "services/dialoop_services/replay/store.py"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(source, "utf-8")
    uses = check_private.find(check_private.read(root))
    return {f"{use.kind} {use.name}" for use in uses}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from uvicorn import _types", {"import uvicorn._types"}),
        ("from grpc._cython import cygrpc", {"import grpc._cython.cygrpc"}),
        ("def late():\n    import grpc._cython.cygrpc as core", {"import grpc._cython.cygrpc"}),
        (
            "import torch\ntorch._C._has_mkldnn",
            {"attribute torch._C", "attribute torch._C._has_mkldnn"},
        ),
        ("import torch.nn as nn\nnn.functional._pad", {"attribute torch.nn.functional._pad"}),
        ("from redis import Redis as R\nR._x()", {"attribute redis.Redis._x"}),
        ("import torch\ngetattr(torch, '_C')", {"attribute torch._C"}),
        ("def of(pool):\n    return pool._available", {"attribute ?._available"}),
        ("def of(pool):\n    return pool.get()._available", {"attribute ?._available"}),
        ("def of(pool):\n    return getattr(pool, '_available', None)", {"attribute ?._available"}),
        ("import uvicorn\nuvicorn.main = None", {"assignment uvicorn.main"}),
        ("from uvicorn import Server\nServer.main = None", {"assignment uvicorn.Server.main"}),
        ("import uvicorn\nsetattr(uvicorn, 'main', 1)", {"assignment uvicorn.main"}),
        ("import uvicorn\ndel uvicorn.main", {"assignment uvicorn.main"}),
    ],
)
def test_a_use_of_anothers_private_name_is_found(
    tmp_path: Path, source: str, expected: set[str]
) -> None:
    assert found_in(tmp_path, source) == expected


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("return self._available", "_available"),
        ("self._available.pop()", "_available"),
        ("return getattr(self, '_available')", "_available"),
        ("return super()._release()", "_release"),
        ("return type(self)._own, cls._made", "_made"),
    ],
)
@pytest.mark.parametrize("base", ["redis.Pool", "redis.Pool[int]", "Between"])
def test_a_private_name_of_a_base_of_another_package_is_found(
    tmp_path: Path, base: str, method: str, name: str
) -> None:
    source = (
        "import redis\nclass Between(redis.Pool): pass\n"
        f"class Small({base}):\n    _own = 1\n    def _release(self, cls):\n        {method}\n"
    )
    assert found_in(tmp_path, source) == {f"self Small.{name}"}


@pytest.mark.parametrize(
    "source",
    [
        OWN_POOL,
        "import torch\ntorch.__version__, torch.nn.Module.__init__",
        "import os, sys, asyncio\nos._exit(1)\nsys._getframe()\nasyncio._get_running_loop()",
        "from dialoop.chat import _merge\nimport dialoop.chat\ndialoop.chat._merge = None",
        "from . import _near",
        "class A:\n    _x = 1\ndef of(a: A):\n    return a._x, a._x._replace(b=1)",
        "class A:\n    def late(self):\n        return self._set_elsewhere",
        "_, _x = 1, 2",
    ],
)
def test_what_is_ours_documented_or_of_the_standard_library_is_no_use(
    tmp_path: Path, source: str
) -> None:
    assert found_in(tmp_path, source) == set()


def test_an_exception_excuses_its_file_alone_and_an_idle_one_is_an_error() -> None:
    use = check_private.Use("services/a/store.py", 3, "attribute", "torch._C")
    excused = {("services/*/store.py", "torch._"): "why"}
    assert check_private.complaints({use}, {}) == ["services/a/store.py:3 attribute torch._C"]
    assert check_private.complaints({use}, excused) == []
    elsewhere = use._replace(path="services/a/engine.py")
    lines = check_private.complaints({elsewhere}, excused)
    assert lines[0] == "services/a/engine.py:3 attribute torch._C"
    assert lines[1].startswith("services/*/store.py torch._ is in the table")
