"""The trainer's learner over several processes; and the program that starts and ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop.errors import InvalidConfig
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.parallel import group_commands
from dialoop_learning.parallel.ranks import ALONE
from dialoop_services.trainer.learner import ranks as ranks_module
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.learner.ranks import (
    RankSettings,
    join_trainer_ranks,
    learners_of,
    leave_stopping_to_the_first,
    make_learner,
)
from safetensors.torch import load_file

from tests.support.programs.parallel_learner_worker import settings_of, take_steps
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(200)  # processes start slowly on a busy machine

ROOT = Path(__file__).parents[3]
WORKER = ROOT / "tests" / "support" / "programs" / "parallel_learner_worker.py"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> tuple[Path, list[Any]]:
    """What a learner without any ranks exported and said."""
    out = tmp_path_factory.mktemp("alone")
    return out, plain(take_steps(Learner(settings_of(model_dir)), out))


def plain(values: list[Any]) -> list[Any]:
    decoded: list[Any] = json.loads(json.dumps(values))
    return decoded


def test_one_process_learns_as_without_ranks_and_encodes_nothing(
    tmp_path: Path,
    model_dir: Path,
    alone: tuple[Path, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("encode", "decode"):
        monkeypatch.delattr(group_commands, name)
    learner = make_learner(settings_of(model_dir), learners_of(ALONE))
    assert plain(take_steps(learner, tmp_path)) == alone[1]
    names = [out / "model.safetensors" for out in (tmp_path, alone[0])]
    assert names[0].read_bytes() == names[1].read_bytes()


@pytest.mark.heavy(reason="starts two trainers; two ranks of updates stay by default")
def test_two_processes_learn_as_one_and_a_refusal_leaves_them_in_step(
    tmp_path: Path, model_dir: Path, alone: tuple[Path, list[Any]]
) -> None:
    assert alone[1].count("SEQUENCE_TOO_LONG") == alone[1].count("LOSS_INPUT_MISSING") == 1
    status, errors = launch([str(WORKER), str(model_dir), str(tmp_path)], 2)
    damage, consequence = errors.splitlines()  # both of the first rank
    assert (status, "is damaged: model.safetensors" in damage) == (0, True)
    assert consequence.endswith("continues from the checkpoint main-3-000001.")
    results = json.loads((tmp_path / "results.json").read_text())
    for actual, expected in zip(results, alone[1], strict=True):
        assert actual == (expected if isinstance(expected, str) else pytest.approx(expected, 1e-4))
    weights, expected = (load_file(out / "model.safetensors") for out in (tmp_path, alone[0]))
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-4)


TAIL = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def leave(*_):
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
"""


def launcher(command: list[str], size: int) -> subprocess.Popen[str]:
    """A process that launches `python command` so many times."""
    program = (
        "import sys\n"
        "from dialoop_services.trainer.learner.launch import Launch\n"
        "from dialoop_services.trainer.learner.meeting import NodePlace\n"
        "place = NodePlace(num_processes=int(sys.argv[1]), address='127.0.0.1', interface='lo')\n"
        "sys.exit(Launch([sys.executable, *sys.argv[2:]], place).run())"
    )
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("DIALOOP_")}
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "client", ROOT / "services")))
    return subprocess.Popen(
        [sys.executable, "-c", program, str(size), *command],
        env=inherited | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch(command: list[str], size: int) -> tuple[int, str]:
    """Exit code, and what was said beside progress bars."""
    with launcher(command, size) as process:
        _, stderr = process.communicate(timeout=180)
    lines = (line for line in stderr.splitlines() if "Loading weights" not in line)
    return process.returncode, "\n".join(lines).strip()


@pytest.mark.parametrize(
    ("what", "code", "stderr"),
    [
        ("time.sleep(2)\nsys.exit(2 if rank else 1)", 2, ""),
        (
            "time.sleep(2)\nos.kill(os.getpid(), 9) if rank == 1 else time.sleep(600)",
            1,
            "dialoop trainer: Rank 1 was ended by signal 9. The others were ended with it. "
            "Resume all ranks from the last checkpoint.",
        ),
    ],
)
def test_all_end_with_one(what: str, code: int, stderr: str) -> None:
    assert launch(["-c", f"{TAIL}\n{what}"], 2) == (code, stderr)


def test_the_first_is_told_to_stop_and_the_others_leave_with_it() -> None:
    body = f"""{TAIL}
if rank:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b'up\\n')
time.sleep(2 if rank else 600)
"""
    with launcher(["-c", body], 2) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=PATIENCE_S)[1] == ""
    assert process.returncode == 0


@pytest.mark.parametrize("num_here", [1, 10_000])
def test_a_rank_that_is_told_to_stop_stays_unless_one_beside_it_has_died(
    num_here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = threading.Event()
    monkeypatch.setattr("os._exit", lambda code: left.set())
    monkeypatch.setattr(ranks_module, "_LAST_WORDS_S", 0.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        leave_stopping_to_the_first(RankSettings(local_world_size=num_here))
        os.kill(os.getpid(), signal.SIGTERM)
        assert left.wait(PATIENCE_S if num_here > 1 else 0.2) == (num_here > 1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_several_processes_do_not_share_a_device_by_turns(model_dir: Path, tmp_path: Path) -> None:
    settings = settings_of(model_dir).model_copy(update={"device_lock": tmp_path / "lock"})
    with (
        pytest.raises(InvalidConfig, match="2 processes") as caught,
        join_trainer_ranks(RankSettings(rank=0, world_size=2), settings),
    ):
        pass
    assert caught.value.reason == "SHARED_DEVICE"
