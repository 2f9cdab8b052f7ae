"""Every module can be the first that a process imports: no order of imports is asked of anybody."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# A process that has loaded what is not ours forks for each module, and for each module of a package
# once more when the package is there: Python imports the package first, whoever asks. Torch and its
# like are shut out, so that nothing slow is loaded.
IMPORT_EACH = """
OURS = ("dialoop", "dialoop_extras", "dialoop_learning", "dialoop_services", "dialoop_ops")
import gc, importlib, json, os, sys
names = sys.stdin.read().split()
for name in ("torch", "transformers", "vllm", "safetensors", "peft"):
    sys.modules[name] = None
for name in ("numpy", "jinja2", "tokenizers", "grpc.aio", "google.protobuf.json_format",
             "grpc_health.v1.health", "grpc_reflection.v1alpha.reflection", "rich.table",
             "pydantic_settings", "fastapi", "uvicorn", "prometheus_client", "redis.asyncio",
             *(name for name in names if ".v1." in name)):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
gc.freeze()

def import_in_forks(parent):
    for name in names:
        if name.count(".") != parent.count(".") or not name.startswith(parent) or ".v1" in name:
            continue
        if name in sys.modules:
            os.write(1, json.dumps([name, "", ""]).encode() + b"\\n")
            import_in_forks(f"{name}.")
            continue
        if os.fork():
            os.wait()
            continue
        error = missing = ""
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as found:
            missing = found.name
        except BaseException as found:
            error = f"{type(found).__name__}: {found}"
        if (missing or "").partition(".")[0] in OURS:
            error = f"There is no {missing}."
        os.write(1, json.dumps([name, error, missing]).encode() + b"\\n")
        import_in_forks(f"{name}.")
        os._exit(0)

import_in_forks("")
"""


# A service's module is imported after everything of its room was forgotten. Other rooms stay: the
# import contracts and `infra/check_rooms.py` let none of them lead back. So torch is loaded once.
IMPORT_EACH_IN_ITS_ROOM = """
import importlib, json, sys
OURS = ("dialoop", "dialoop_extras", "dialoop_learning", "dialoop_services", "dialoop_ops")
names = sys.stdin.read().split()
sys.modules["vllm"] = None

def import_module(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as failure:
        if failure.name.partition(".")[0] in OURS:
            return f"There is no {failure.name}.", ""
        return "", failure.name
    except BaseException as failure:
        return f"{type(failure).__name__}: {failure}", ""
    return "", ""

for name in names:
    import_module(name)
for name in names:
    package, _, rest = name.partition(".")
    room = rest.partition(".")[0]
    for other in [*sys.modules]:
        if f"{other}.".startswith(f"{package}.{room}."):
            del sys.modules[other]
    vars(sys.modules[package]).pop(room, None)
    print(json.dumps([name, *import_module(name)]))
"""


def modules(folder: str) -> list[str]:
    """List the modules of a source folder; leave out what only a sandbox runs."""
    paths = [path.relative_to(ROOT / folder) for path in (ROOT / folder).glob("dialoop*/**/*.py")]
    named = [p for p in sorted(paths) if p.name != "__main__.py" and "confined" not in p.parts]
    return [".".join(p.with_suffix("").parts).removesuffix(".__init__") for p in named]


def cases() -> list[Any]:
    """Every hand-written module; those inside the SDK's rooms and the services' are heavy."""
    heavy = pytest.mark.heavy(reason="to import each first takes half a minute")
    return [
        pytest.param(name, marks=[heavy] if folder == "services" or name.count(".") > 1 else [])
        for folder in ("client", "services")
        for name in modules(folder)
        if ".v1" not in name
    ]


@pytest.fixture(scope="module")
def import_results(request: pytest.FixtureRequest) -> dict[str, tuple[str, str]]:
    """Return for each asked module the error, and the package that is missing or shut out."""
    wanted = {
        item.callspec.params["module"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    }
    results = {}
    for program, folder in ((IMPORT_EACH, "client"), (IMPORT_EACH_IN_ITS_ROOM, "services")):
        asked = [name for name in modules(folder) if name in wanted]
        if not asked:
            continue
        # The packages that they lie in come first, though no test that was selected asks for them.
        names = [n for n in modules(folder) if any(f"{a}.".startswith(f"{n}.") for a in asked)]
        done = subprocess.run(
            [sys.executable, "-c", program],
            input="\n".join(names),
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        for name, error, missing in map(json.loads, done.stdout.splitlines()):
            results[name] = error, missing
    return results


@pytest.mark.parametrize("module", cases())
def test_a_process_can_import_it_first(module, import_results):
    error, missing = import_results[module]
    assert not error
    if missing:
        pytest.skip(f"needs {missing}")
