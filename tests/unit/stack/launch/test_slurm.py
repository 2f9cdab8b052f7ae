"""What is handed to Slurm: the script, the arithmetic of nodes, and the steps of the replicas."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from dialoop.errors import DialoopError, InvalidConfig, Unavailable
from dialoop_ops.cli.main import main
from dialoop_ops.launch import slurm
from dialoop_ops.launch.plan import Needs
from dialoop_ops.launch.site import ClusterNode, components_of, require_room
from dialoop_ops.launch.slurm import SlurmStep
from dialoop_services.config.file import parse_config

CONFIG: dict[str, Any] = {
    "run": "golden",
    "train": {"device": "cuda", "num_processes": 4},
    "inference": {"num_replicas": 2, "tensor_parallel_size": 2},
    "resources": {
        "gpus_per_node": 8,
        "trainer": {"processors": 16, "memory_gib": 64},
        "collector": {"processors": 2},
        "inference": {"processors": 8},
    },
    "launch": {
        "on": "slurm",
        "slurm": {"partition": "gpu", "time_limit_min": 60, "setup": ["module load cuda"]},
    },
}


def directives(script: str) -> list[list[str]]:
    """The options of each component."""
    components: list[list[str]] = [[]]
    for line in script.splitlines():
        if line == "#SBATCH hetjob":
            components.append([])
        elif line.startswith("#SBATCH "):
            components[-1].append(line.removeprefix("#SBATCH "))
    return components


def test_each_component_asks_for_what_its_processes_need(tmp_path: Path) -> None:
    script = slurm.script_of(parse_config(CONFIG, source="job.toml"), ["train", "a b"], tmp_path)
    head, *replicas = directives(script)
    common = ["--partition=gpu", "--nodes=1", "--ntasks=1"]
    assert head == [
        "--job-name=dialoop-golden",
        f"--output={tmp_path / '.golden.slurm.log'}",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@120",
        "--time=60",
        *common,
        "--cpus-per-task=18",
        "--mem=65536M",
        "--gres=gpu:4",
    ]
    each = ["--job-name=dialoop-golden", "--time=60", *common, "--cpus-per-task=8", "--gres=gpu:2"]
    assert replicas == [each, each]
    assert script.index("module load cuda") < script.index("-m dialoop_ops.stack train 'a b'")
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize(("code", "requeued"), [(143, True), (0, False), (1, False)])
def test_a_job_that_was_stopped_by_its_time_limit_goes_back_in_the_queue(
    code: int, requeued: bool, tmp_path: Path
) -> None:
    config = parse_config({"launch": {"on": "slurm"}}, source="job.toml")
    script = slurm.script_of(config, ["train", "x"], tmp_path)
    job = f"trap 'exit {code}' TERM; touch {tmp_path}/started; while :; do sleep 0.05; done"
    (tmp_path / "job").write_text(job)
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/requeued\n')
    (tmp_path / "scontrol").chmod(0o755)
    lines = [
        f"bash {tmp_path}/job &" if line.endswith("x &") else line for line in script.splitlines()
    ]
    batch = subprocess.Popen(
        ["bash", "-c", "\n".join(lines)],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"},
        start_new_session=True,
    )
    try:
        while not (tmp_path / "started").exists():
            assert batch.poll() is None
        batch.send_signal(signal.SIGUSR1)
        assert batch.wait(20) == code
    finally:
        with suppress(ProcessLookupError):  # nobody is left where all went well
            os.killpg(batch.pid, signal.SIGKILL)
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"


NODES = [ClusterNode(processors=8, memory_gib=16, gpus=2)] * 2
FITS = Needs(gpus=2, processors=8, memory_gib=16)
REFUSED = {
    "gpus": (Needs(gpus=3), "GPUs: trainer 2 + inference 3 = 5 of 4, 2 at most on one node"),
    "processors": (Needs(processors=9), "processors: trainer 8 + inference 9 = 17 of 16"),
    "memory": (Needs(memory_gib=17), "GiB: trainer 16 + inference 17 = 33 of 32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_larger_than_the_cluster_is_refused_with_its_arithmetic(name: str) -> None:
    needs, says = REFUSED[name]
    require_room({"trainer": FITS, "inference": FITS}, NODES)
    with pytest.raises(InvalidConfig, match="does not fit") as caught:
        require_room({"trainer": FITS, "inference": needs}, NODES)
    assert says in caught.value.message
    assert caught.value.reason == "PLAN_TOO_LARGE"


def test_a_process_larger_than_a_node_is_refused_before_slurm_is_asked() -> None:
    values = {**CONFIG, "resources": {"gpus_per_node": 2}}
    with pytest.raises(InvalidConfig, match="GPUs: trainer 4 of 2"):
        components_of(parse_config(values, source="job.toml"))


def test_a_job_of_more_components_than_nodes_would_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm.shutil, "which", lambda name: name)
    monkeypatch.setattr(slurm, "_ask", lambda *words: "n1|64|512000|gpu:8\nn2|64|512000|gpu:8\n")
    with pytest.raises(InvalidConfig, match="takes 3 nodes") as caught:
        slurm.submit(parse_config(CONFIG, source="job.toml"), ["train"], tmp_path / "runs")
    assert "2 answer" in caught.value.message


def test_without_slurm_nothing_is_started_and_the_remedy_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="sbatch is not on PATH") as caught:
        slurm.submit(parse_config(CONFIG, source="job.toml"), ["train"], tmp_path / "runs")
    assert caught.value.reason == "NO_SLURM"
    assert not (tmp_path / "runs").exists()


def test_in_a_job_without_a_component_for_each_replica_nothing_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse_config({"launch": {"on": "slurm"}}, source="job.toml")
    monkeypatch.setattr(slurm, "_ask", lambda *words: "n1\n")
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1"}
    with pytest.raises(Unavailable, match="no component 1"):
        slurm.slurm_site(config, inside)


def test_head_and_replicas_know_each_other_by_the_addresses_of_their_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DIALOOP_TOKEN", raising=False)
    config = parse_config({"launch": {"on": "slurm"}, "engine": "transformers"}, source="job.toml")

    def ask(*words: str) -> str:
        is_node = words[:3] == ("scontrol", "show", "node")
        return f"NodeName={words[-1]} NodeAddr={words[-1]}.cluster Port=1" if is_node else words[-1]

    monkeypatch.setattr(slurm, "_ask", ask)
    inside = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_ID_HET_GROUP_1": "8",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n2",
    }
    site = slurm.slurm_site(config, inside)
    assert (site.hosts["trainer"], site.hosts["inference"]) == ("n1.cluster", "n2.cluster")
    assert site.starters.keys() == {"inference"}
    assert len(os.environ["DIALOOP_TOKEN"]) > 20, "services of several machines need a token"


def test_a_replica_is_a_step_in_its_own_component(tmp_path: Path) -> None:
    needs = Needs(gpus=2, processors=8)
    step = SlurmStep(name="inference-1", group=2, needs=needs, job="9")
    command = step.command(("python", "-m", "dialoop_services.inference"), tmp_path)
    assert command == (
        "srun",
        "--het-group=2",
        "--ntasks=1",
        "--job-name=inference-1",
        "--unbuffered",
        f"--chdir={tmp_path}",
        "--cpus-per-task=8",
        "--gres=gpu:2",
        "env",
        "--unset=DIALOOP_PARENT_PID",
        "python",
        "-m",
        "dialoop_services.inference",
    )


def on_two_nodes(**launch: Any) -> dict[str, Any]:
    train = {"device": "cuda", "num_nodes": 2, "num_processes": 4}
    return {**CONFIG, "train": train, "launch": {**CONFIG["launch"], **launch}}


def test_a_trainer_of_two_nodes_has_both_in_the_heads_component(tmp_path: Path) -> None:
    config = parse_config(on_two_nodes(), source="job.toml")
    head, *replicas = directives(slurm.script_of(config, ["train", "x"], tmp_path))
    assert head[-6:] == [
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=18",
        "--mem=65536M",
        "--gres=gpu:4",
    ]
    assert len(replicas) == 2
    too_few = [ClusterNode(processors=32, memory_gib=64, gpus=4)] * 2
    with pytest.raises(InvalidConfig, match=r"trainer 4 \+ trainer-1 4 \+ inference 2"):
        require_room(slurm.components_in(config), too_few)


SRUN = """#!/bin/bash
# Stands for Slurm: runs the command as often as there are tasks, each with its number.
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && tasks=${1#*=}; shift; done
for ((task = 0; task < tasks; task++)); do SLURM_PROCID=$task "$@"; done
"""


def test_the_step_of_two_nodes_numbers_them_and_unsets_the_parent(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    step = SlurmStep(name="trainer", group=0, needs=Needs(gpus=4), job="9", num_nodes=2)
    command = step.command(("echo", "launch 4", "--rendezvous", "n1:29400"), tmp_path)
    assert command[:6] == (
        "srun",
        "--het-group=0",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [
        f"launch 4 --rendezvous n1:29400 --node {node}" for node in (0, 1)
    ]


def test_the_lines_for_each_machine_start_torchruns_agent_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed text is run, with a stub in place of Python, which has the stack's variables."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(
        'engine = "transformers"\nstore = "memory"\n[train]\nnum_nodes = 2\nnum_processes = 2\n'
        "[resources]\nnum_nodes = 2\ngpus_per_node = 0\n[resources.trainer]\nprocessors = 4\n"
    )
    assert main(["train", "job.toml", "--print"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "python").write_text(
        '#!/bin/sh\necho "$DIALOOP_TRAINER_REPLAY_ADDRESS $DIALOOP_TRAINER_HOST" '
        '"$OMP_NUM_THREADS $*"\n'
    )
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "runs" / "default").mkdir(parents=True)
    script = printed.replace(sys.executable, str(tmp_path / "python"))
    ran = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, check=True)
    lines = [line.split() for line in ran.stdout.splitlines() if "learner.launch" in line]
    host = socket.gethostname()
    assert [line[1:7] for line in lines] == [
        ["0.0.0.0", "2", "-m", "dialoop_services.trainer.learner.launch", "2", "--num-nodes"]
    ] * 2
    assert [line[-2:] for line in lines] == [["--node", "0"], ["--node", "1"]]
    assert lines[0][-3] == lines[1][-3]
    assert lines[0][-3].startswith(f"{host}:")
    assert lines[0][0].startswith(f"{host}:"), "the queue, where all machines reach it"


def test_this_machine_alone_does_not_start_a_trainer_of_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('engine = "transformers"\n[train]\nnum_nodes = 2\n')
    assert main(["train", str(tmp_path / "job.toml")]) == 2
    said = capsys.readouterr().err
    assert "The trainer is for 2 machines (num_nodes in [train]), and this is one." in said
    assert "--print" in said


def test_a_job_that_slurm_starts_again_goes_on_if_it_has_a_checkpoint(tmp_path: Path) -> None:
    first, again = {"SLURM_RESTART_COUNT": "0"}, {"SLURM_RESTART_COUNT": "1"}
    assert slurm.is_fresh(first, tmp_path, fresh=True)
    assert not slurm.is_fresh(first, tmp_path, fresh=False)
    assert slurm.is_fresh(again, tmp_path, fresh=False)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest.json").write_text("{}")
    assert not slurm.is_fresh(again, tmp_path, fresh=True)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"placement": "shared", "train": {"pipeline_depth": 0}}, 'on is "slurm" in [launch]'),
        ({"launch": {"shared_folder": False}}, 'set data_plane = "chunks"'),
        (
            {"launch": {"shared_folder": False}, "inference": {"data_plane": "chunks"}},
            "set directory in [model]",
        ),
    ],
)
def test_what_several_machines_cannot_share_is_refused(values: dict[str, Any], says: str) -> None:
    launch = {**values.get("launch", {}), "on": "slurm"}
    with pytest.raises(DialoopError) as caught:
        parse_config({**values, "launch": launch}, source="job.toml")
    assert says in caught.value.message


def test_print_shows_the_script_and_the_local_plan_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('engine = "transformers"\nstore = "memory"\n')
    words = ["train", "job.toml", "--print"]
    assert main([*words, "--on", "slurm"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=dialoop-default\n")
    assert "dialoop_ops.stack train job.toml --on slurm &\n" in script, "without --print"
    assert main(words) == 0
    printed = capsys.readouterr().out
    heads = [line for line in printed.splitlines() if line.startswith("# ")]
    assert "# scorer: 0 GPUs, after replay, environment, trainer, inference" in heads
    assert "# inference: 0 GPUs, after the model" in heads
    assert printed.count(" -m dialoop_services.") == len(heads) == 6
    assert not (tmp_path / "runs").exists()
