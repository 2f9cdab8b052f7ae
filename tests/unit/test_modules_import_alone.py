"""Every module can be the first that a process imports: no order of imports is asked of anybody.

Of the services only packages: nothing but a package's own imports could ask for an order there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A process that has loaded what is not ours forks for each module, and for each module of a package
# once more when the package is there: Python imports the package first, whoever asks. Torch and its
# like are shut out, so that nothing slow is loaded.
IMPORT_EACH = """
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
        if (missing or "").partition(".")[0] in ("dialoop", "dialoop_services"):
            error = f"There is no {missing}."
        os.write(1, json.dumps([name, error, missing]).encode() + b"\\n")
        import_in_forks(f"{name}.")
        os._exit(0)

import_in_forks("")
"""


def modules() -> list[str]:
    """List the SDK's modules and the services' packages; leave out what only a sandbox runs."""
    paths = [
        path.relative_to(ROOT / folder).with_suffix("")
        for folder, pattern in (("client", "dialoop/**/*.py"), ("services", "**/__init__.py"))
        for path in sorted((ROOT / folder).glob(pattern))
    ]
    named = [p for p in paths if p.name != "__main__" and "confined" not in p.parts]
    return [".".join(p.parts).removesuffix(".__init__") for p in named]


@pytest.fixture(scope="module")
def import_results() -> dict[str, tuple[str, str]]:
    """Return per module the error, and the package that is not installed or shut out."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH],
        input="\n".join(modules()),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    rows = map(json.loads, done.stdout.splitlines())
    return {name: (error, missing) for name, error, missing in rows}


@pytest.mark.parametrize("module", [name for name in modules() if ".v1" not in name])
def test_a_process_can_import_it_first(module, import_results):
    error, missing = import_results[module]
    assert not error
    if missing:
        pytest.skip(f"needs {missing}")
