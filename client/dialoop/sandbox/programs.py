"""The command lines and rules of confined interpreters."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from dialoop.sandbox.levels import Level
from dialoop.sandbox.limits import Limits

_FOLDER = Path(__file__).parent
# Where the folder of `confined` is inside bubblewrap.
_INSIDE = "/dialoop"
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
_DATA = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def python() -> str:
    """Return the path of this interpreter, outside of any virtual environment."""
    return str(Path(sys.executable).resolve())


def forkserver_program(control_fd: int) -> list[str]:
    """Return the command line of the fork server."""
    return _boot(str(_FOLDER), f"forkserver import main; sys.path.pop(); main({control_fd})")


def rules_of(level: Level, limits: Limits, packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the rules for `confined.confinement.confine`; code can import from `packages`."""
    # If code can write only the outputs, a file limit one byte above the read limit shows excess.
    writes = level is Level.BUBBLEWRAP
    return {
        "level": level.value,
        "readable": [*_interpreter_files(), *_LIBRARIES, *_DATA, *_DEVICES, *packages],
        "packages": list(packages),
        "max_memory_bytes": limits.max_memory_bytes,
        "max_cpu_s": limits.max_cpu_s,
        "max_output_bytes": limits.max_output_bytes,
        "max_file_bytes": limits.max_disk_bytes if writes else limits.max_output_bytes + 1,
        "max_open_files": limits.max_open_files,
        "max_files": limits.max_files,
    }


def bubblewrap() -> str | None:
    """Return the path of bwrap; None when it is not installed."""
    return shutil.which("bwrap")


def bubblewrap_program(bwrap: str, limits: Limits, rules: dict[str, Any]) -> list[str]:
    """Return the command line of an interpreter in its own namespaces, under the same rules."""
    # No devices: bwrap binds them writable, so that code of a service of root could lock /dev/null
    # for the whole machine. With every mount but /tmp read-only no call changes a host's inode.
    binds = [path for path in rules["readable"] if path not in _DEVICES and Path(path).exists()]
    own = json.dumps({name: value for name, value in rules.items() if name != "readable"})
    work = "work import work; sys.path.pop(); import json; work(json.loads(sys.argv[1]))"
    return [
        *(bwrap, "--unshare-all", "--die-with-parent", "--clearenv", "--cap-drop", "ALL"),
        # bwrap's tmpfs has no limit of files: `confine` sets it, and then gives this up too.
        *("--cap-add", "CAP_SYS_ADMIN"),
        *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),
        # This comes before the binds, since one of them may be below /tmp.
        *("--size", str(limits.max_disk_bytes), "--tmpfs", "/tmp"),
        *(part for path in _outermost(binds) for part in ("--ro-bind", path, path)),
        *("--ro-bind", str(_FOLDER / "confined"), f"{_INSIDE}/confined"),
        *("--remount-ro", "/", "--chdir", "/tmp", "--"),
        *_boot(_INSIDE, work),
        own,
    ]


def _boot(folder: str, rest: str) -> list[str]:
    """Return a command line with `-I -S`: no variables, site-packages or working folder."""
    code = f"import sys; sys.path.append({folder!r}); from confined.{rest}"
    return [python(), "-I", "-S", "-B", "-c", code]


def _interpreter_files() -> list[str]:
    names = ("stdlib", "platstdlib")
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    libraries = [sysconfig.get_config_var(name) or "" for name in ("LIBDIR", "INSTSONAME")]
    shared = [os.path.join(*libraries)] if all(libraries) else []  # noqa: PTH118 - two plain strings
    files = [python(), *(sysconfig.get_path(n, vars=base) for n in names), *shared]
    return list(dict.fromkeys(files))


def _outermost(paths: list[str]) -> list[str]:
    """Return the paths without those inside another one, which a bind already covers."""
    return [p for p in paths if not any(p != q and p.startswith(f"{q}/") for q in paths)]
