"""Run `dialoop doctor`: what this machine can run, what is missing, and how to install it.

It imports no library. It looks for each one, and asks the GPU's driver and the container engine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from dialoop.errors import InvalidConfig
from dialoop_services.replay.redis_program import redis_program
from rich.text import Text

from dialoop_ops.cli.console import rich_console, say
from dialoop_ops.stack.gpus import driver_lists
from dialoop_ops.stack.processes.redis_server import is_listening

_MIN_MEMORY_GIB = 4.0
_MIN_DISK_GIB = 5.0
_ANSWERS_IN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCheck:
    """One line of the report. `value` is empty for what is missing; `remedy` says what to do.

    MachineCheck(name="vllm", value="", need="the vLLM engine", remedy="make setup")
    """

    name: str
    value: str
    need: str = ""
    remedy: str = ""
    is_required: bool = False


def doctor(arguments: argparse.Namespace) -> int:
    """Print the report; return 0 when training can start here, 1 when a requirement is missing."""
    console = rich_console()
    findings = examine()
    is_ready = all(f.value or not f.is_required for f in findings)
    if arguments.json:
        say(json.dumps([asdict(finding) for finding in findings], indent=2))
        return 0 if is_ready else 1
    for finding in findings:
        console.print(_line(finding), soft_wrap=True)
    if not is_ready:
        missing = [f.name for f in findings if f.is_required and not f.value]
        console.print(Text(f"Training cannot start: {', '.join(missing)}.", style="bold red"))
        return 1
    console.print(Text(_verdict(findings), style="bold green"))
    return 0


def examine() -> list[MachineCheck]:
    """Return everything that is checked, in the order in which it is shown."""
    libraries, gpu = _libraries(), _gpu()
    engine = _recommended_engine(
        has_vllm=any(f.name == "vllm" and f.value for f in libraries), has_gpu=bool(gpu.value)
    )
    return [
        *(_python(), _cores(), _memory(), _disk(), *libraries),
        *(gpu, engine, _redis(), *_tools()),
    ]


def _verdict(findings: list[MachineCheck]) -> str:
    names = {f.name for f in findings if f.value}
    engines = [name for name in ("vllm", "transformers") if name in names]
    return f"Training can start here: engine {' or '.join(engines)}."


def _line(finding: MachineCheck) -> Text:
    mark, style = ("ok", "green") if finding.value else ("--", "yellow")
    if finding.is_required and not finding.value:
        mark, style = "NO", "bold red"
    line = Text(f"{mark:<4}", style=style).append(f"{finding.name:<18}", style="default")
    if finding.value:
        return line.append(finding.value, style="default")
    return line.append(f"missing, for {finding.need}: {finding.remedy}", style="default")


def _python() -> MachineCheck:
    enough = sys.version_info >= (3, 11)
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return MachineCheck(
        name="python",
        value=version if enough else "",
        need="everything",
        remedy="install Python 3.11 or later",
        is_required=True,
    )


def _cores() -> MachineCheck:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return MachineCheck(name="cores", value=str(allowed))


def _memory() -> MachineCheck:
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return MachineCheck(
        name="memory",
        value=f"{gib:.1f} GiB" if gib >= _MIN_MEMORY_GIB else "",
        need=f"the demo with vLLM ({gib:.1f} GiB are here)",
        remedy='set engine = "transformers" in the config',
    )


def _disk() -> MachineCheck:
    gib = shutil.disk_usage(Path.cwd()).free / 2**30
    return MachineCheck(
        name="disk",
        value=f"{gib:.0f} GiB free" if gib >= _MIN_DISK_GIB else "",
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
        (
            "openai",
            "openai",
            'engine = "openai", and policies behind an endpoint',
            False,
            'pip install "dialoop[endpoint]"',
        ),
        ("fastapi", "fastapi", "REST", False, "pip install fastapi uvicorn"),
    )
    return [
        MachineCheck(
            name=name, value=_version(name, module), need=need, remedy=remedy, is_required=needed
        )
        for name, module, need, needed, remedy in rows
    ]


def _recommended_engine(*, has_vllm: bool, has_gpu: bool) -> MachineCheck:
    """Return which engine to take; the figures are those of benchmarks/inference_tokens."""
    if not has_vllm:
        value = "transformers, since vllm is not installed"
    elif has_gpu:
        value = "vllm"
    else:
        value = (
            "vllm from 64 samples in flight on (1.1 to 1.2 times the tokens a second), else "
            "transformers (as many with 16, 1.3 times as many with one, and half the CPU time to "
            "start), as measured with 3M parameters on two cores"
        )
    return MachineCheck(name="engine to take", value=value)


def _version(distribution: str, module: str) -> str:
    """Return the installed version without importing; empty when the library cannot be imported."""
    if importlib.util.find_spec(module) is None:
        return ""
    for name in (distribution, f"{distribution}-cpu"):
        try:
            return f"{importlib.metadata.version(name)}{' (CPU)' if name != distribution else ''}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "from this folder"


def _gpu() -> MachineCheck:
    """Return the NVIDIA GPUs that the driver lists, with their free memory."""
    gpus = ""
    remedy = "the tiny model trains on the CPU; for others, a machine with an NVIDIA driver"
    try:
        gpus = "; ".join(f"{gpu}: {gpu.room}" for gpu in driver_lists() or ())
    except InvalidConfig as error:
        remedy = f"{error.message} {error.remedy}"
    return MachineCheck(
        name="gpu",
        value=gpus,
        need="models of more than some million parameters",
        remedy=remedy,
    )


def _redis() -> MachineCheck:
    place, remedy = _redis_place()
    return MachineCheck(
        name="redis",
        value=place,
        need="the queue",
        remedy=remedy,
        is_required=True,
    )


def _redis_place() -> tuple[str, str]:
    """Return the Redis that a stack would use, and how to get one where there is none."""
    url = os.environ.get("REDIS_URL", "")
    if url:
        # The part before the @ may hold a password.
        shown = re.sub(r"//[^@/]*@", "//", url)
        return f"REDIS_URL {shown}, {'answers' if is_listening(url) else 'DOES NOT ANSWER'}", ""
    try:
        return redis_program(), ""
    except InvalidConfig as error:
        return "", str(error.remedy)


def _tools() -> list[MachineCheck]:
    isolation = next((tool for tool in ("bwrap", "nsjail", "unshare") if shutil.which(tool)), "")
    return [
        MachineCheck(
            name="loopback ports",
            value=_free_port(),
            need="every service",
            is_required=True,
            remedy="allow listening on 127.0.0.1",
        ),
        MachineCheck(
            name="tool sandbox",
            value=isolation,
            need="running tool code that is not trusted",
            remedy="apt-get install bubblewrap",
        ),
        _containers(),
    ]


def _containers() -> MachineCheck:
    """Return the container engine that answers: a program alone runs no container."""
    programs = [tool for tool in ("docker", "podman") if shutil.which(tool)]
    running = next((f"{tool} {version}" for tool in programs if (version := _version_of(tool))), "")
    remedy = "install Docker with the compose plugin, or use `dialoop up`"
    if programs:
        remedy = f"{programs[0]} is installed, and its daemon does not answer: start it"
    return MachineCheck(name="containers", value=running, need="docker compose up", remedy=remedy)


def _version_of(engine: str) -> str:
    """Return the version of the engine's server; empty when none answers."""
    form = "{{.ServerVersion}}" if engine == "docker" else "{{.Version.Version}}"
    try:
        process = subprocess.run(
            [engine, "info", "--format", form],
            capture_output=True,
            text=True,
            timeout=_ANSWERS_IN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""


def _free_port() -> str:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen(1)
    except OSError:
        return ""
    return "free ones on 127.0.0.1"
