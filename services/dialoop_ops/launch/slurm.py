"""Run a job on Slurm: one heterogeneous job, whose script starts `dialoop train` once more inside.

`submit` is what `dialoop train --on slurm` does. Inside the allocation `slurm_site` takes over: the
trainer and what stays with it run on the first node as in the local stack, and each replica is a
step that srun starts in a component of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dialoop.errors import InvalidConfig, Unavailable
from dialoop.reasons import Reason
from dialoop_services.config.job import JobConfig
from dialoop_services.runtime.process import PARENT_VARIABLE

from dialoop_ops.launch.plan import Needs
from dialoop_ops.launch.site import (
    ClusterNode,
    Site,
    components_of,
    further_nodes,
    require_room,
    spread_site,
)
from dialoop_ops.stack.devices import needs_elsewhere
from dialoop_ops.stack.layout import replica_names, service_of
from dialoop_ops.stack.processes.child import Child, Starter, StartOrder

INSIDE = "DIALOOP_IN_SLURM"
"""Set in the script: `dialoop train --on slurm` then runs the job in this allocation."""
_ASK_S = 30.0
# Of the batch script's component; srun would take them for wishes about a replica's.
_OF_THE_HEAD = ("SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_GRES")


def options_of(needs: Needs, *, num_nodes: int = 1) -> tuple[str, ...]:
    """Return sbatch's options for a component of one task on each of its nodes."""
    return (
        f"--nodes={num_nodes}",
        f"--ntasks={num_nodes}",
        *(("--ntasks-per-node=1",) if num_nodes > 1 else ()),
        *((f"--cpus-per-task={needs.processors}",) if needs.processors else ()),
        *((f"--mem={round(needs.memory_gib * 1024)}M",) if needs.memory_gib else ()),
        *((f"--gres=gpu:{needs.gpus}",) if needs.gpus else ()),
    )


def script_of(config: JobConfig, words: Sequence[str], root: Path) -> str:
    """Return the batch script that runs `dialoop WORDS` in its job."""
    slurm = config.launch.slurm
    common = [
        *((f"--partition={slurm.partition}",) if slurm.partition else ()),
        *((f"--account={slurm.account}",) if slurm.account else ()),
        *slurm.options,
    ]
    components, num_nodes = components_in(config), config.train.num_nodes
    head = options_of(components["trainer"], num_nodes=num_nodes)
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=dialoop-{config.run}",
        f"#SBATCH --output={log_of(config, root)}",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        f"#SBATCH --signal=B:USR1@{slurm.save_before_s}",
        *((f"#SBATCH --time={slurm.time_limit_min}",) if slurm.time_limit_min else ()),
        *(f"#SBATCH {option}" for option in (*common, *head)),
    ]
    for name in replica_names(config):
        options = (*common, *options_of(components[name]))
        time = (f"--time={slurm.time_limit_min}",) if slurm.time_limit_min else ()
        lines += ["#SBATCH hetjob", f"#SBATCH --job-name=dialoop-{config.run}"]
        lines += [f"#SBATCH {option}" for option in (*time, *options)]
    command = shlex.join((sys.executable, "-m", "dialoop_ops.stack", *words))
    return "\n".join((*lines, *_BODY, *slurm.setup, *_run(command))) + "\n"


_BODY = (
    "",
    "# Component 0 has the trainer and what stays with it; each further one is a replica's.",
    f"export {INSIDE}=1",
    f"cd {shlex.quote(str(Path.cwd()))}",
)


def _run(command: str) -> tuple[str, ...]:
    """Return the lines that run the job, stop it before its time is over and queue it again."""
    return (
        "# USR1 announces the time limit: the trainer saves, and the job goes on later.",
        "trap 'late=1; kill -TERM $!' USR1",
        "trap 'kill -TERM $!' TERM",
        f"{command} &",
        "job=$!",
        "while kill -0 $job 2>/dev/null; do",
        "  wait $job # until the job or a signal ends it",
        "done",
        "wait $job",
        "code=$?",
        'if [ -n "$late" ] && [ $code -gt 128 ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $code",
    )


def log_of(config: JobConfig, root: Path) -> Path:
    """Return the file with the output of the script, beside the run's folder."""
    return root.resolve() / f".{config.run}.slurm.log"


def components_in(config: JobConfig) -> dict[str, Needs]:
    """Return what has to lie on one node each; the nodes of one component are alike in Slurm."""
    components = components_of(config)
    return components | dict.fromkeys(further_nodes(config), components["trainer"])


def submit(config: JobConfig, words: Sequence[str], root: Path) -> str:
    """Hand the job to Slurm and return its number; nothing is handed over that cannot run.

    Raises Unavailable (NO_SLURM) without Slurm, and InvalidConfig (PLAN_TOO_LARGE) with the
    arithmetic where its nodes are too small.
    """
    if shutil.which("sbatch") is None:
        raise Unavailable(
            "There is no Slurm here: sbatch is not on PATH.",
            reason=Reason.NO_SLURM,
            remedy="Run the command on a login node of the cluster, or leave --on out.",
        )
    partition = config.launch.slurm.partition
    nodes = nodes_of_cluster(partition)
    if not nodes:
        raise Unavailable(
            "Slurm names no node that answers.",
            reason=Reason.NO_SLURM,
            remedy="Look at `sinfo`; name another partition in [launch.slurm].",
        )
    components = components_in(config)
    if len(nodes) < len(components):  # it would wait for ever
        raise InvalidConfig(
            f"Slurm gives no node to two components of a job, and this one takes {len(components)}"
            f" nodes: {config.train.num_nodes} for the trainer, and one for each of "
            f"{config.inference.num_replicas} replicas. {len(nodes)} answer.",
            reason=Reason.PLAN_TOO_LARGE,
            remedy="Lower num_nodes in [train] or num_replicas in [inference] (a larger "
            "tensor_parallel_size makes fewer replicas of as many GPUs), or name another one.",
        )
    require_room(components, nodes)
    root.mkdir(parents=True, exist_ok=True)
    script = script_of(config, words, root)
    answer = _ask("sbatch", "--parsable", text=script)
    return answer.split(";")[0].strip()


def nodes_of_cluster(partition: str) -> list[ClusterNode]:
    """Return the nodes of a partition that are not down, or of all partitions."""
    words = ("sinfo", "--noheader", "--Node", "--responding", "--format=%N|%c|%m|%G")
    lines = _ask(*words, *((f"--partition={partition}",) if partition else ())).split("\n")
    nodes = {}
    for name, processors, memory, gres in (line.split("|") for line in lines if line):
        counts = re.findall(r"gpu(?::[^:,(]+)?:(\d+)", gres)
        nodes[name] = ClusterNode(
            processors=int(processors),
            memory_gib=int(memory.rstrip("+")) / 1024,
            gpus=sum(map(int, counts)),
        )
    return list(nodes.values())


def is_inside(environment: Mapping[str, str]) -> bool:
    """Return whether this process runs in the allocation of the job that it belongs to."""
    return bool(environment.get(INSIDE)) and "SLURM_JOB_ID" in environment


def is_fresh(environment: Mapping[str, str], run_dir: Path, *, fresh: bool) -> bool:
    """Return whether to replace the run's folder: as asked for at the first start of the job.

    A job that Slurm starts again goes on from its checkpoint. Without one it begins anew.
    """
    if environment.get("SLURM_RESTART_COUNT", "0") == "0":
        return fresh
    return not (run_dir / "checkpoints" / "latest.json").is_file()


def slurm_site(config: JobConfig, environment: Mapping[str, str]) -> Site:
    """Return the allocation: the head on this node, each replica on that of its component.

    A trainer of several nodes is a step on all nodes of the head's component.
    """
    for name in _OF_THE_HEAD:
        os.environ.pop(name, None)
    names = replica_names(config)
    head = _address_of(_node_of(environment, 0))
    needs = needs_elsewhere(config)
    hosts = {name: head for name in needs if service_of(name) != "inference"}
    starters: dict[str, Starter] = {}
    if config.train.num_nodes > 1:
        step = SlurmStep(
            name="trainer",
            group=0,
            needs=needs["trainer"],
            job=environment["SLURM_JOB_ID"],
            num_nodes=config.train.num_nodes,
        )
        starters["trainer"] = step.start
    for group, name in enumerate(names, start=1):
        hosts[name] = _address_of(_node_of(environment, group))
        job = environment.get(f"SLURM_JOB_ID_HET_GROUP_{group}", environment["SLURM_JOB_ID"])
        starters[name] = SlurmStep(name=name, group=group, needs=needs[name], job=job).start
    return spread_site(config, hosts, starters)


def _node_of(environment: Mapping[str, str], group: int) -> str:
    """Return the first node of a component."""
    names = environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}")
    if names is None:
        raise Unavailable(
            f"This Slurm job has no component {group}.",
            reason=Reason.NO_SLURM,
            remedy="Submit it with `dialoop train CONFIG --on slurm`, which asks for one component "
            "for each replica.",
        )
    return _ask("scontrol", "show", "hostnames", names).split("\n")[0]


def _address_of(node: str) -> str:
    """Return where other nodes reach a node."""
    address = re.search(r"\bNodeAddr=(\S+)", _ask("scontrol", "show", "node", "-o", node))
    return address[1] if address else node


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """A step of the job that runs one process in a component of its own, whose number is `job`.

    On several nodes it is one process of each, which torchrun's agent is and starts.
    """

    name: str
    group: int
    needs: Needs
    job: str
    num_nodes: int = 1

    def command(self, command: tuple[str, ...], folder: Path | None) -> tuple[str, ...]:
        """Return the srun that runs a command as this step."""
        needs = self.needs
        nodes: tuple[str, ...] = ("--ntasks=1",)
        if self.num_nodes > 1:
            several = (f"--nodes={self.num_nodes}", f"--ntasks={self.num_nodes}")
            nodes = (*several, "--ntasks-per-node=1", "--kill-on-bad-exit=1")
            # Slurm numbers the nodes, and the first is the one that has the head.
            command = ("sh", "-c", 'exec "$@" --node "$SLURM_PROCID"', "sh", *command)
        return (
            "srun",
            f"--het-group={self.group}",
            *nodes,
            f"--job-name={self.name}",
            "--unbuffered",
            f"--chdir={(folder or Path.cwd()).resolve()}",
            *((f"--cpus-per-task={needs.processors}",) if needs.processors else ()),
            *((f"--gres=gpu:{needs.gpus}",) if needs.gpus else ()),
            # The stack is the parent on its own node only.
            *("env", f"--unset={PARENT_VARIABLE}"),
            *command,
        )

    async def start(self, order: StartOrder) -> Child:
        """Start the command as this step; what stands for it here is srun."""
        command = self.command(order.command, order.folder)
        child = await Child.start(replace(order, command=command))
        child.also_kill(self.kill)
        return child

    def kill(self) -> None:
        """Kill what runs as this step: srun, killed itself, would leave it behind."""
        steps = _ask("squeue", "--steps", "--noheader", f"--jobs={self.job}", "--format=%i|%j")
        for line in steps.split("\n"):
            step, _, name = line.partition("|")
            if name == self.name:
                _ask("scancel", "--signal=KILL", step)


def _ask(*words: str, text: str | None = None) -> str:
    """Return what a command of Slurm prints; Unavailable (NO_SLURM) in its words if it fails."""
    try:
        answer = subprocess.run(
            words, input=text, capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(
            f"{words[0]} does not answer: {error}.",
            reason=Reason.NO_SLURM,
            remedy="Ask for the cluster's controller with `scontrol ping`.",
        ) from error
    if answer.returncode:
        raise Unavailable(
            f"{words[0]} failed: {answer.stderr.strip()}",
            reason=Reason.NO_SLURM,
            remedy="Correct the options in [launch.slurm], or ask for the controller with "
            "`scontrol ping`.",
        )
    return answer.stdout
