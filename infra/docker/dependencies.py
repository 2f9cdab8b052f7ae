"""Print what a service's package needs, for pip: python dependencies.py trainer.

An image installs that before the source, so that a changed line of ours does not install it again.
Without a name: what every service needs, and what builds the packages.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

_SPECIFIERS = "<>=!~;[ "


def requirements(folder: Path, extra: str = "") -> list[str]:
    """Return the requirements of a service's extra, or those of all packages without extras."""
    files = [
        tomllib.loads(path.read_text("utf-8"))
        for path in sorted(folder.glob("*/dialoop*/pyproject.toml"))
    ]
    if extra:
        services = next(f for f in files if f["project"]["name"] == "dialoop-services")
        return list(services["project"]["optional-dependencies"][extra])
    ours = {file["project"]["name"] for file in files}
    needed = (
        each
        for file in files
        for each in (*file["build-system"]["requires"], *file["project"]["dependencies"])
        if _name(each) not in ours
    )
    return list(dict.fromkeys(needed))


def _name(requirement: str) -> str:
    return min((requirement.split(each)[0] for each in _SPECIFIERS), key=len)


if __name__ == "__main__":
    # One a line, as a list of requirements: some have spaces and quotes, which a shell would split.
    sys.stdout.write("".join(f"{each}\n" for each in requirements(Path(), *sys.argv[1:])))
