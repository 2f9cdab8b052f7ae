"""A real Slurm of two or more nodes on this machine, from Debian's packages, in its own folder."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "sinfo", "squeue", "scontrol", "scancel")
_SBIN = "/usr/sbin"
# Files that are there stand for the device files of two GPUs.
_GPUS = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
_CONFIG = """
ClusterName=dialoop
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,requeue_delay=1
SlurmdTimeout=5
KillWait=20
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldLogFile={folder}/slurmctld.log
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=FORCE:4
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=16000 "
    "Gres=gpu:2\n"
)


def missing_programs() -> list[str]:
    """Return what of Slurm is not installed, or why it cannot run here."""
    path = f"{os.environ['PATH']}:{_SBIN}"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return missing or ([] if os.geteuid() == 0 else ["root, as which the nodes run"])


@dataclass(slots=True)
class SlurmCluster:
    """Nodes n1, n2, ... with eight processors and two GPUs that only Slurm believes in."""

    folder: Path
    nodes: tuple[str, ...]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of a login node of this cluster."""
        path = f"{os.environ['PATH']}:{_SBIN}"
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def ask(self, *words: str) -> str:
        """Return what a command of Slurm prints."""
        return subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self._start(name, "slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """Kill a node: its daemon, and all steps and processes that run on it."""
        spool = f"spool-{name}"
        leaders = [*_pids_of(lambda line: "slurmstepd" in line[0] and _cwd_has(line[1], spool))]
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()
        for pid in leaders:
            _kill_tree(pid)

    def state_of(self, job: str) -> str:
        """Return PENDING, RUNNING, COMPLETED, ...; of a job that is forgotten, UNKNOWN."""
        with suppress(subprocess.CalledProcessError):
            shown = self.ask("scontrol", "show", "job", "-o", job).split("\n")[0]
            return shown.partition("JobState=")[2].split()[0]
        return "UNKNOWN"

    def wait_for_job(self, job: str, *states: str, timeout_s: float = 600.0) -> str:
        """Wait until a job is in one of the states, and return it."""
        return self._wait(lambda: self.state_of(job), states, timeout_s)

    def wait_for_nodes(self) -> None:
        """Wait until all nodes take jobs."""
        idle = f"idle {len(self.nodes)}"
        self._wait(lambda: self.ask("sinfo", "-h", "-o", "%T %D"), (idle,), 60.0)

    def _wait(self, ask: object, wanted: tuple[str, ...], timeout_s: float) -> str:
        assert callable(ask)
        deadline = time.monotonic() + timeout_s
        while (state := ask()) not in wanted:
            assert time.monotonic() < deadline, f"{state} after {timeout_s:g} s, not {wanted}"
            time.sleep(0.5)
        return str(state)

    def _start(self, name: str, program: str, *words: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                (f"{_SBIN}/{program}", *words), env=self.environment, stdout=output, stderr=output
            )

    def start(self) -> None:
        """Start the controller and all nodes."""
        self._start("controller", "slurmctld", "-D", "-i")
        for name in self.nodes:
            self.start_node(name)
        self.wait_for_nodes()

    def stop(self) -> None:
        """End all jobs and daemons."""
        with suppress(subprocess.SubprocessError):
            self.ask("scancel", "--user=root")
            self._wait(lambda: self.ask("squeue", "-h"), ("",), 40.0)
        for daemon in self.daemons.values():
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons.values():
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()


@contextmanager
def slurm_cluster(folder: Path, *, num_nodes: int = 2) -> Iterator[SlurmCluster]:
    """Yield a running cluster whose files are in `folder`."""
    nodes = tuple(f"n{number}" for number in range(1, num_nodes + 1))
    for name in ("state", *(f"spool-{node}" for node in nodes)):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname().partition(".")[0]
    controller, *ports = _free_ports(1 + num_nodes)
    text = _CONFIG.format(host=host, folder=folder, controller=controller)
    named = zip(nodes, ports, strict=True)
    text += "".join(_NODE.format(name=name, host=host, port=port) for name, port in named)
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(_GPUS)
    cluster = SlurmCluster(folder, nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _pids_of(matches: object) -> Iterator[int]:
    """Yield the processes whose command and id match."""
    assert callable(matches)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if matches((command, int(entry.name))):
                    yield int(entry.name)


def _cwd_has(pid: int, text: str) -> bool:
    """Return whether a process has the text in the names of its open files or its folder."""
    with suppress(OSError):
        folder = Path("/proc") / str(pid)
        names = [folder / "cwd", *(folder / "fd").iterdir()]
        return any(text in str(name.readlink()) for name in names)
    return False


def _kill_tree(pid: int) -> None:
    import psutil

    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.Error):
                each.kill()
