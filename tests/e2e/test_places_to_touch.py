"""The worked examples of CONTRIBUTING.md apply, touch few hand-written files, and work.

Each applies to the product as it is. All are then applied to one copy of it. What `proto/`
generates is generated there, and `tests/support/programs/places_to_touch.py` uses every new thing
in a fresh interpreter.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Some 20 CPU seconds; a machine that is busy is no fault of what is tested.
pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
GENERATED = ("client/dialoop/v1/", "client/dialoop/clients/blocking/twins.pyi")
PRODUCT = ("client/dialoop", "services/dialoop", "proto/")
# The most hand-written product files that an example may touch.
LIMITS = {
    "add_trajectory_field": 4,
    "add_rpc": 6,
    "add_config_key": 2,
    "add_loss": 2,
    "add_template_family": 2,
    "add_wire": 3,
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
    for name in ("client", "services", "proto", "infra"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)


@pytest.fixture(scope="module")
def plain_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The product as it is."""
    folder = tmp_path_factory.mktemp("plain")
    copy_product(folder)
    return folder


def git_apply(patch: str, folder: Path, *options: str) -> None:
    """Apply a diff to a copy of the product."""
    (folder / "example.patch").write_text(patch, encoding="utf-8")
    # Outside any repository: git leaves paths alone that a repository around it does not have.
    ceiling = {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    run("git", "apply", *options, "example.patch", folder=folder, **ceiling)


@pytest.mark.parametrize("example", LIMITS)
def test_an_addition_touches_few_files(example: str, plain_copy: Path) -> None:
    patch = patch_of(example)
    paths = touched_paths(patch)
    assert all(path.startswith(PRODUCT) for path in paths), paths
    assert not any(path.startswith(GENERATED) for path in paths), paths
    assert 0 < len(paths) <= LIMITS[example], paths
    git_apply(patch, plain_copy, "--check")


@pytest.mark.heavy(reason="builds a copy with all additions, a quarter of a minute")
def test_all_additions_work_side_by_side(tmp_path: Path) -> None:
    copy_product(tmp_path)
    shutil.copy(ROOT / "client" / "examples" / "plain_engine.py", tmp_path)
    for example in LIMITS:
        git_apply(patch_of(example), tmp_path)
    run("sh", "infra/generate_protos.sh", folder=tmp_path, PYTHON=sys.executable)
    paths = {path for example in LIMITS for path in touched_paths(patch_of(example))}
    modules = [path for path in paths if path.endswith(".py")]
    ruff = (sys.executable, "-m", "ruff")
    run(*ruff, "check", "--no-cache", *modules, folder=tmp_path)
    run(*ruff, "format", "--no-cache", "--check", *modules, folder=tmp_path)
    search = os.pathsep.join(map(str, (tmp_path / "client", tmp_path / "services", tmp_path, ROOT)))
    program = "tests.support.programs.places_to_touch"
    run(sys.executable, "-m", program, tmp_path, folder=tmp_path, PYTHONPATH=search)


def test_every_example_of_contributing_has_a_limit() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert set(re.findall(r"<!-- test: (\w+) -->\n```diff", text)) == set(LIMITS)
