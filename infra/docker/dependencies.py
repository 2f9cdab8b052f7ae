"""Print what a service's package needs, for pip: python dependencies.py trainer.

An image installs that before the source, so that a changed line of ours does not install it again.
Without a name: what every service needs, and what builds the two packages.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

_SPECIFIERS = "<>=!~;[ "


def requirements(folder: Path, extra: str = "") -> list[str]:
    """Return the requirements of an extra, or those of both packages without their extras."""
    services = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    if extra:
        return list(services["project"]["optional-dependencies"][extra])
    sdk = tomllib.loads((folder / "client" / "pyproject.toml").read_text("utf-8"))
    ours = sdk["project"]["name"]
    return [
        each
        for file in (sdk, services)
        for each in (*file["build-system"]["requires"], *file["project"]["dependencies"])
        if _name(each) != ours
    ]


def _name(requirement: str) -> str:
    return min((requirement.split(each)[0] for each in _SPECIFIERS), key=len)


if __name__ == "__main__":
    # One a line, as a list of requirements: some have spaces and quotes, which a shell would split.
    sys.stdout.write("".join(f"{each}\n" for each in requirements(Path(), *sys.argv[1:])))
