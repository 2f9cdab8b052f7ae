"""Say what a run was started with: origins of its settings, the code, the installed packages.

`open_run` writes it into run.json under "started_with", so that a run can be told from another that
has the same config.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import dialoop

_GIT_S = 5.0


def started_with(
    command: Sequence[str], origins: Mapping[str, str], *, branch_of: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return what run.json keeps beside the config.

    `origins` has where each value not at its default is from; `branch_of` the run, step and policy
    that the run starts from, None without one.
    """
    return {
        "command": list(command),
        "origins": dict(origins),
        "branch_of": None if branch_of is None else dict(branch_of),
        "code": _code(),
        "packages": _packages(),
    }


def _code() -> dict[str, Any]:
    """Return Dialoop's version, and the commit where it runs from a git checkout."""
    code = {"version": dialoop.__version__, "commit": "", "is_changed": False}
    folder = Path(dialoop.__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return code
    commit = _git(folder, "rev-parse", "HEAD")
    changed = bool(commit) and bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    return code | {"commit": commit, "is_changed": changed}


def _git(folder: Path, *words: str) -> str:
    """Return what git prints; "" where git is missing or refuses."""
    try:
        answer = subprocess.run(
            ("git", "-C", str(folder), *words),
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def _packages() -> dict[str, Any]:
    """Return how many packages are installed, and the SHA-256 of their names and versions."""
    names = {f"{d.name.lower()}=={d.version}" for d in metadata.distributions() if d.name}
    digest = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()
    return {"number": len(names), "sha256": digest}
