"""The worked examples of CONTRIBUTING.md apply, touch few hand-written files, and work.

Each is applied to a copy of the product. What `proto/` and the async clients generate is generated
there, and `tests/support/programs/places_to_touch.py` uses the new thing in a fresh interpreter.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# At most 15 CPU seconds each; a machine that is busy is no fault of what is tested.
pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
GENERATED = ("client/dialoop/v1/", "client/dialoop/clients/blocking/")
PRODUCT = ("client/dialoop/", "services/dialoop_services/", "proto/")
# The most hand-written product files that an example may touch.
LIMITS = {
    "add_trajectory_field": 4,
    "add_rpc": 6,
    "add_config_key": 2,
    "add_loss": 2,
    "add_template_family": 2,
}


def patch_of(example: str) -> str:
    """Return the diff that CONTRIBUTING.md prints under the example's mark."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    (patch,) = re.findall(rf"<!-- test: {example} -->\n```diff\n(.*?)^```", text, re.M | re.S)
    return patch


def touched_paths(patch: str) -> set[str]:
    """Return the paths that a diff changes, adds or removes."""
    return set(re.findall(r"^(?:---|\+\+\+) [ab]/(\S+)$", patch, re.M))


def run(*command: str | Path, folder: Path, **variables: str) -> None:
    """Run a command in a folder; its output is the message where it fails."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def copy_product(folder: Path) -> None:
    """Copy what is written by hand, and what generates the rest."""
    for name in ("client/dialoop", "services/dialoop_services", "proto", "infra"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)


def apply_patch(patch: str, folder: Path) -> None:
    """Apply the diff to a copy of the product, and generate what follows from it."""
    (folder / "example.patch").write_text(patch, encoding="utf-8")
    # Outside any repository: git leaves paths alone that a repository around it does not have.
    run("git", "apply", "example.patch", folder=folder, GIT_CEILING_DIRECTORIES=str(folder.parent))
    paths = touched_paths(patch)
    if any(path.startswith("proto/") for path in paths):
        run("sh", "infra/generate_protos.sh", folder=folder, PYTHON=sys.executable)
    if any(path.startswith("client/dialoop/clients/") for path in paths):
        run(sys.executable, "infra/generate_blocking.py", folder=folder)


def use(example: str, folder: Path) -> None:
    """Use in a fresh interpreter what an example adds to the copy."""
    paths = (folder / "client", folder / "services", folder, ROOT)
    program = "tests.support.programs.places_to_touch"
    search = os.pathsep.join(map(str, paths))
    run(sys.executable, "-m", program, example, folder, folder=folder, PYTHONPATH=search)


@pytest.mark.parametrize("example", LIMITS)
def test_an_addition_touches_few_files_and_works(example: str, tmp_path: Path) -> None:
    patch = patch_of(example)
    paths = touched_paths(patch)
    assert all(path.startswith(PRODUCT) for path in paths), paths
    assert not any(path.startswith(GENERATED) for path in paths), paths
    assert 0 < len(paths) <= LIMITS[example], paths

    copy_product(tmp_path)
    apply_patch(patch, tmp_path)
    modules = [path for path in paths if path.endswith(".py")]
    ruff = (sys.executable, "-m", "ruff")
    run(*ruff, "check", "--no-cache", *modules, folder=tmp_path)
    run(*ruff, "format", "--no-cache", "--check", *modules, folder=tmp_path)
    use(example, tmp_path)


def test_an_engine_is_one_file_of_your_own(tmp_path: Path) -> None:
    copy_product(tmp_path)
    shutil.copy(ROOT / "client" / "examples" / "plain_engine.py", tmp_path)
    use("add_engine", tmp_path)


def test_every_example_of_contributing_has_a_limit() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert set(re.findall(r"<!-- test: (\w+) -->\n```diff", text)) == set(LIMITS)
