"""What the container `job` looks at before anything starts, and how it follows the trainer."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dialoop.clients.trainer import Phase, TrainerStatus
from dialoop.errors import InvalidConfig, Unauthenticated, Unavailable
from dialoop.reasons import Reason
from dialoop_ops.launch import compose, compose_job
from dialoop_ops.launch.compose_job import follow, remember_start, trainer_end
from dialoop_ops.runs.run_config import flat_config
from dialoop_services.runtime.exit_reason import ENDS_FOR_GOOD_VARIABLE, ExitReason

USER = 10001
IS_ROOT = os.geteuid() == 0
JOB = '[environment]\nuse = "mine.rows:environment"\n'


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folders of a container, where somebody else gets to them too."""
    folder = tmp_path_factory.mktemp("containers")
    # Below the base of all runs, one a worker where tests run in several processes.
    for above in (folder, *folder.parents[:3]):
        if above.owner() == folder.owner() and "pytest" in str(above):
            above.chmod(0o755)
    for name in ("code", "model", "runs", "tmp"):
        (folder / name).mkdir()
    for name in ("runs", "tmp"):
        (folder / name).chmod(0o777)
    (folder / "code" / "mine").mkdir()
    (folder / "code" / "mine" / "rows.py").touch()
    (folder / "job.toml").write_text(JOB)
    yield folder
    for path in (folder, *folder.rglob("*")):  # or pytest could not remove it
        if not path.is_symlink():
            path.chmod(0o700)


@contextmanager
def as_a_container() -> Iterator[None]:
    """As a user who is not root, which may read and write everything; others stay who they are."""
    if not IS_ROOT:
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setresgid(USER, USER, 0)
    os.setresuid(USER, USER, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.setgroups(groups)


@pytest.fixture
def check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs `check` as a container does; returns the one line of its error, or ""."""

    def run(**variables: str) -> str:
        own = {
            "DIALOOP_TOKEN": "secret",
            "DIALOOP_CONFIG": str(folder / "job.toml"),
            "DIALOOP_COMPOSE_FOLDER": str(folder),
        }
        with monkeypatch.context() as patch, as_a_container():
            for name, value in (own | variables).items():
                patch.setenv(name, value)
            code = compose.main(["check"])
        text = capsys.readouterr().err
        assert (code, text.count("\n")) == ((2, 1) if text else (0, 0))
        return text

    return run


def closed_model(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (folder / "model" / name).write_text("{}")
    (folder / "model" / "model.safetensors").chmod(0o600 if IS_ROOT else 0)


def linked_model(folder: Path) -> None:
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").symlink_to("../blobs/of-a-cache")


def closed_model_folder(folder: Path) -> None:
    (folder / "model").chmod(0o700 if IS_ROOT else 0)


def runs_of_another(folder: Path) -> None:
    (folder / "runs").chmod(0o755 if IS_ROOT else 0o555)


def run_of_another(folder: Path) -> None:
    run = folder / "runs" / "default"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    run.chmod(0o777)
    (run / "metrics.jsonl").chmod(0o644 if IS_ROOT else 0o444)


def closed_job(folder: Path) -> None:
    (folder / "job.toml").chmod(0o600 if IS_ROOT else 0)


def closed_code(folder: Path) -> None:
    (folder / "code").chmod(0o700 if IS_ROOT else 0)


def closed_module(folder: Path) -> None:
    (folder / "code" / "mine" / "rows.py").chmod(0o600 if IS_ROOT else 0)


def closed_rows(folder: Path) -> None:
    for name in ("rows.jsonl", "rewards.py"):
        (folder / "code" / name).touch()
    (folder / "code" / "rewards.py").chmod(0o600 if IS_ROOT else 0)
    options = '{dataset = "rows.jsonl", reward_funcs = ["rewards.py:near"]}'
    (folder / "job.toml").write_text(f'[environment]\nuse = "trl"\noptions = {options}\n')


def closed_tasks(folder: Path) -> None:
    (folder / "code" / "rows.jsonl").touch()
    (folder / "code" / "rows.jsonl").chmod(0o600 if IS_ROOT else 0)
    (folder / "job.toml").write_text('[environment]\ntask_file = "rows.jsonl"\n')


MINE = {
    "DIALOOP_COMPOSE_JOB": "./job.toml",
    "DIALOOP_COMPOSE_MODEL": "./model",
    "DIALOOP_COMPOSE_CODE": "./code",
    "DIALOOP_COMPOSE_RUNS": "./runs",
}


@pytest.mark.parametrize(
    ("close", "says", "remedy"),
    [
        (closed_model, "MODEL_DIR is ./model", "may not read model.safetensors"),
        (linked_model, "model.safetensors there is a link", "`cp -rL ./model COPY`"),
        (closed_model_folder, "MODEL_DIR is ./model", "`chmod -R a+rX ./model`"),
        (runs_of_another, "RUNS_DIR is ./runs", "`sudo chown -R "),
        (run_of_another, "may not write default/metrics.jsonl", "`sudo chown -R "),
        (closed_job, "JOB is ./job.toml", "`chmod -R a+rX ./job.toml`"),
        (closed_code, "CODE_DIR is code", "`chmod -R a+rX code`"),
        (closed_module, "mine.rows:environment is code/mine/rows.py", "chmod -R a+rX code/mine"),
        (closed_rows, "rewards.py:near is code/rewards.py", "a+rX code/rewards.py`"),
        (closed_tasks, "environment.task_file is code/rows.jsonl", "a+rX code/rows.jsonl`"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_the_containers_may_not_read_or_write_is_said_with_the_command_that_mends_it(
    close: Callable[[Path], None],
    says: str,
    remedy: str,
    folder: Path,
    check: Callable[..., str],
) -> None:
    (folder / "model" / "config.json").write_text("{}")
    assert not check(**MINE)
    close(folder)
    text = check(**MINE)
    assert says in text
    assert remedy in text


def test_without_a_token_nothing_starts(check: Callable[..., str]) -> None:
    text = check(DIALOOP_TOKEN="")
    assert "DIALOOP_TOKEN is not set" in text
    assert "openssl rand" in text


def start_with(**names: str) -> dict[str, str]:
    return {"JOB": "", "CODE_DIR": "", "MODEL_DIR": ""} | names


def test_a_job_that_was_given_for_one_command_alone_is_not_forgotten_in_silence(
    tmp_path: Path,
) -> None:
    mine = start_with(JOB="./job.toml", MODEL_DIR="./model")
    remember_start(tmp_path, start_with())
    remember_start(tmp_path, mine)
    with pytest.raises(InvalidConfig, match=r"had JOB=\./job\.toml MODEL_DIR=\./model, and this"):
        remember_start(tmp_path, start_with())
    with pytest.raises(InvalidConfig, match=r"had MODEL_DIR=\./model, and this"):
        remember_start(tmp_path, start_with(JOB="./job.toml"))
    remember_start(tmp_path, mine)
    remember_start(tmp_path, start_with(JOB="./another.toml"))
    with pytest.raises(InvalidConfig, match=r"JOB=infra/configs/demo\.toml is the demo"):
        remember_start(tmp_path, start_with())
    remember_start(tmp_path, start_with(JOB="infra/configs/demo.toml"))


def test_the_job_marks_its_run_for_the_commands_that_read_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end_at_once(*_: object, **__: object) -> int:
        return 0

    monkeypatch.setattr(compose, "follow", end_at_once)
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
    for name, value in (MINE | {"DIALOOP_TOKEN": "x", "DIALOOP_COMPOSE_MODEL": ""}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DIALOOP_CONFIG", str(folder / "job.toml"))
    monkeypatch.setenv("DIALOOP_COMPOSE_FOLDER", str(folder))
    for _ in range(2):
        assert compose.main(["job"]) == 0
        assert (folder / "tmp" / "dialoop-checked").is_file()
        assert flat_config(folder / "runs" / "default")["environment.use"] == json.dumps(
            "mine.rows:environment"
        )


def status(phase: Phase, num_train_steps: int = 0) -> TrainerStatus:
    return TrainerStatus(
        phase=phase,
        policy_version=None,
        num_train_steps=num_train_steps,
        max_train_steps=2,
        num_warm_start_steps=0,
        max_warm_start_steps=0,
    )


def exit_code_after(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, *seen: TrainerStatus | Exception
) -> int:
    """The exit code of a job whose trainer answers so, look by look."""
    looks = iter(seen)

    async def look(_: object) -> TrainerStatus | None:
        looked = next(looks)
        if isinstance(looked, Exception):
            trainer_end(run_dir).write_text(json.dumps(vars_of(ExitReason.of(looked))))
            return None
        trainer_end(run_dir).unlink(missing_ok=True)
        return looked

    monkeypatch.setattr(compose_job, "_status_of", look)
    monkeypatch.setattr(compose_job, "_EVERY_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as last:
        port = last.getsockname()[1]
        return asyncio.run(follow("127.0.0.1:1", run_dir, last=f"127.0.0.1:{port}", token=str))


WHOLE = {"evaluations": {}, "num_train_steps": 2, "num_steps": 2, "num_refused_updates": 0}
WHOLE |= {"stopped_early": "", "gave_up": False, "alarms": []}


def vars_of(reason: ExitReason) -> dict[str, object]:
    return {"message": reason.message, "reason": reason.reason, "exit_code": reason.exit_code}


def test_the_jobs_exit_code_is_that_of_its_end_however_often_the_trainer_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = {
        "before_greedy": {"mean_reward": 0.039, "num_failed": 1},
        "after_greedy": {"mean_reward": 0.934, "num_failed": 0},
    }
    (tmp_path / "trainer.json").write_text(json.dumps(WHOLE | {"evaluations": pair}))
    training = status(Phase.TRAINING, 1)
    killed = Unavailable("The queue does not answer.")
    assert (
        exit_code_after(tmp_path, monkeypatch, training, killed, training, status(Phase.DONE, 2))
        == 0
    )
    text = capsys.readouterr().out
    assert "The trainer has ended: The queue does not answer." in text
    assert "Held-out reward, greedy: 0.039 before, 0.934 after (1 episodes failed)." in text
    assert "A success: 2 of 2 train steps." in text
    assert text.count("1 of 2 train steps") == 1
    (tmp_path / "trainer.json").write_text(json.dumps(WHOLE | {"num_train_steps": 0}))
    assert exit_code_after(tmp_path, monkeypatch, status(Phase.DONE, 2)) == 1
    assert "Not a success: 0 of 2 train steps." in capsys.readouterr().out


def test_a_job_that_had_ended_before_waits_until_all_have_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    """Or `docker compose up` would take its end for a failure to start."""
    (tmp_path / "trainer.json").write_text(json.dumps(WHOLE))

    async def look(_: object) -> TrainerStatus:
        return status(Phase.DONE, 2)

    async def job() -> int:
        following = asyncio.create_task(
            follow("127.0.0.1:1", tmp_path, last=f"127.0.0.1:{unused_tcp_port}", token=str)
        )
        await asyncio.sleep(0.1)
        assert not following.done()
        async with await asyncio.start_server(lambda _, w: w.close(), "127.0.0.1", unused_tcp_port):
            return await following

    monkeypatch.setattr(compose_job, "_status_of", look)
    monkeypatch.setattr(compose_job, "_EVERY_S", 0.01)
    assert asyncio.run(job()) == 0


def test_a_trainer_that_cannot_start_ends_the_job_with_its_words_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = InvalidConfig("There is no loss 'mine:loss'.")
    assert exit_code_after(tmp_path, monkeypatch, status(Phase.STARTING), wrong) == 2
    assert "The trainer has ended: There is no loss 'mine:loss'." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidConfig("Wrong."), 0),
        (InvalidConfig("Redis is away.", reason=Reason.STORE_UNAVAILABLE), 2),
        (Unauthenticated("Another token."), 2),
        (Unavailable("Not yet."), 1),
    ],
)
def test_what_no_restart_mends_ends_a_container_so_that_docker_leaves_it(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = ExitReason.of(error)
    with pytest.raises(SystemExit) as ended:
        reason.end()
    assert ended.value.code == reason.exit_code
    monkeypatch.setenv(ENDS_FOR_GOOD_VARIABLE, "true")
    with pytest.raises(SystemExit) as ended:
        reason.end()
    assert ended.value.code == code
