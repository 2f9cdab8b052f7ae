"""The built wheels: they hold every file, and work from any folder without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECTS = {path.parent.name: path.parent for path in ROOT.glob("*/dialoop*/pyproject.toml")}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("hatchling", reason="`make setup` installs it")
    into = tmp_path_factory.mktemp("wheels")
    for project in PROJECTS.values():
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(into)]
        subprocess.run(command, cwd=project, check=True, capture_output=True)
    return {name: next(into.glob(f"{name}-*.whl")) for name in PROJECTS}


@pytest.fixture(scope="module")
def site_folder(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


def run(site_folder: Path, folder: Path, *words: str, typed: str = "") -> str:
    """Run python with the wheels alone of all that is Dialoop's."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(site_folder)},
        input=typed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PROJECTS)
def test_a_wheel_holds_every_file_of_its_package(name: str, wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels[name]) as archive:
        held = {entry for entry in archive.namelist() if ".dist-info/" not in entry}
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", name],
        cwd=PROJECTS[name].parent,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = listed.stdout.splitlines()
    files = {line for line in lines if (PROJECTS[name].parent / line).is_file()}
    assert held == files - {f"{name}/pyproject.toml"}
    assert {Path(file).suffix for file in files} >= {".py"}


def test_the_wheel_of_operations_brings_the_command(wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels["dialoop_ops"]) as archive:
        (entry,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "dialoop = dialoop_ops.cli.main:main" in archive.read(entry).decode()


def test_everything_is_imported_from_the_wheels_in_an_empty_folder(
    site_folder: Path, tmp_path: Path
) -> None:
    where = "import dialoop, dialoop_services; print(dialoop.__file__, dialoop_services.__file__)"
    for path in run(site_folder, tmp_path, "-c", where).split():
        assert Path(path).is_relative_to(site_folder)


def test_the_commands_run_in_a_folder_that_has_services_of_its_own(
    site_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "job.toml").write_text('engine = "transformers"\nstore = "memory"\n')
    cli = ("-m", "dialoop_ops.cli.main")
    assert "no mistake found" in run(site_folder, tmp_path, *cli, "config", "check", "job.toml")
    played = run(site_folder, tmp_path, *cli, "play", "arithmetic", typed="Result=1<submit>\n")
    assert "reward" in played


def test_what_modules_read_beside_their_code_is_there(site_folder: Path, tmp_path: Path) -> None:
    code = (
        "from dialoop.templates.registry import TemplateRegistry\n"
        "for info in TemplateRegistry().list():\n"
        "    TemplateRegistry().get(info.name)\n"
        "from dialoop_services.rest.schema import comments\n"
        "assert comments()\n"
        "import dialoop_services.replay.redis_store.store\n"
    )
    run(site_folder, tmp_path, "-c", code)


def test_every_dependency_has_an_upper_bound() -> None:
    unbound = []
    for path in PROJECTS.values():
        project = tomllib.loads((path / "pyproject.toml").read_text("utf-8"))
        extras = project["project"].get("optional-dependencies", {})
        needed = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
        for line in (*needed, *(line for lines in extras.values() for line in lines)):
            requirement = line.partition(";")[0]
            if "<" not in requirement and "==" not in requirement:
                unbound.append(f"{path.name}: {line}")
    assert unbound == []
