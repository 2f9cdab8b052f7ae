"""Trackers get the rows of metrics.jsonl, and none of them can end a training."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dialoop.errors import InvalidConfig
from dialoop.sequences import PolicyVersion
from dialoop_services.trainer.records.records import RunRecords
from dialoop_services.trainer.records.trackers import GuardedTracker, numbers_of, trackers_of
from dialoop_services.trainer.settings import TrainerSettings

VERSION = PolicyVersion(lineage="main", number=3)


class FakeTracker:
    def __init__(self, *, breaks: bool = False) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.is_closed = False
        self._breaks = breaks

    def log(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)
        if self._breaks:
            raise ConnectionError("away")

    def close(self) -> None:
        self.is_closed = True


def write(records: RunRecords) -> None:
    records.metric("train", train_step=1, policy_version=VERSION, reward=0.25)
    records.metric("evaluation", train_step=2, policy_version=VERSION, label="running", x=1)
    records.close()


def test_a_tracker_gets_the_rows_of_the_file(tmp_path: Path) -> None:
    tracker = FakeTracker()
    write(RunRecords(tmp_path, trackers=(tracker,)))
    lines = (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()
    assert tracker.rows == [json.loads(line) for line in lines]
    assert tracker.is_closed


def test_a_tracker_that_fails_is_left_out_and_the_file_is_whole(tmp_path: Path) -> None:
    tracker = FakeTracker(breaks=True)
    write(RunRecords(tmp_path, trackers=(GuardedTracker(lambda: tracker),)))
    assert len(tracker.rows) == 1
    assert len((tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()) == 2


def test_a_tracker_that_hangs_holds_up_nobody_and_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    tracker = FakeTracker()
    tracker.log = lambda row: release.wait(60)  # type: ignore[method-assign]
    guarded = GuardedTracker(lambda: tracker, patience_s=0.05)
    records = RunRecords(tmp_path, trackers=(guarded,))
    for step in range(50):
        records.metric("train", train_step=step, policy_version=VERSION, reward=0.25)
        time.sleep(0.002)
    records.close()
    release.set()
    assert len((tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()) == 50
    assert [record.message for record in caplog.records] == [
        "A tracker took more than 0.05 s for a row and is left out from now on.",
        "A tracker is not closed after 0.05 s and is left behind.",
    ]


def test_a_trackers_rows_come_from_one_thread_in_order(tmp_path: Path) -> None:
    """Some libraries, such as sqlite3's, refuse an object of another thread."""
    threads: set[int] = set()

    class Own(FakeTracker):
        def __init__(self) -> None:
            super().__init__()
            threads.add(threading.get_ident())

        def log(self, row: Mapping[str, Any]) -> None:
            threads.add(threading.get_ident())
            super().log(row)

        def close(self) -> None:
            threads.add(threading.get_ident())
            super().close()

    guarded = GuardedTracker(Own)
    records = RunRecords(tmp_path, trackers=(guarded,))
    for step in range(20):
        records.metric("train", train_step=step, policy_version=VERSION)
    records.close()
    assert len(threads - {threading.get_ident()}) == len(threads) == 1
    assert [row["train_step"] for row in guarded.tracker().rows] == list(range(20))  # type: ignore


def test_a_tracker_is_not_told_the_secrets_of_an_environments_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def init(**options: Any) -> Any:
        opened.append(options)
        return SimpleNamespace(log=lambda row: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    options = {"api_key": "tell-nobody", "judge": {"url": "http://me:tell-nobody@host"}, "n": 3}
    settings = TrainerSettings(
        run_dir=tmp_path, trackers={"trackio": True}, environment={"options": options}
    )
    trackers_of(settings)
    assert "tell-nobody" not in str(opened)
    told = opened[0]["config"]["environment"]["options"]
    assert told["n"] == 3
    assert told["judge"]["url"].endswith("@host")


def test_numbers_are_named_by_kind_label_and_what_they_are_in() -> None:
    row = {
        "time": 1.0,
        "kind": "train",
        "train_step": 7,
        "policy_version": 3,
        "lineage": "main",
        "reward": 0.5,
        "by_staleness": {0: {"ratio": 1.0}},
    }
    assert numbers_of(row) == {
        "train/policy_version": 3.0,
        "train/reward": 0.5,
        "train/by_staleness/0/ratio": 1.0,
    }
    assert list(numbers_of({"kind": "evaluation", "label": "running", "x": 1})) == [
        "evaluation/running/x"
    ]


def test_tensorboard_event_files_hold_every_number(tmp_path: Path) -> None:
    settings = TrainerSettings(run_dir=tmp_path, trackers={"tensorboard": True})
    write(RunRecords(tmp_path, trackers=trackers_of(settings)))
    (file,) = (tmp_path / "tensorboard").iterdir()
    scalars = {
        value.tag: (event.step, value.simple_value)
        for event in events_of(file)
        for value in event.summary.value
    }
    assert scalars["train/reward"] == (1, 0.25)
    assert scalars["evaluation/running/x"] == (2, 1.0)


def events_of(file: Path) -> Iterator[Any]:
    from tensorboardX.proto.event_pb2 import Event

    data = file.read_bytes()
    while data:  # a record: its length in 8 bytes, a checksum in 4, the event, a checksum in 4
        size = int.from_bytes(data[:8], "little")
        yield Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]


def write_and_resume(run_dir: Path, trackers: Callable[[], tuple[Any, ...]]) -> None:
    """A warm start and train steps 1 to 3; a kill; a start that goes on from step 1; another."""

    def step(records: RunRecords, number: int, reward: float) -> None:
        records.metric("train", train_step=number, policy_version=None, reward=reward)

    records = RunRecords(run_dir, trackers=trackers())
    records.metric("warm_start", train_step=100, policy_version=None, loss=9.0)
    for number in (1, 2, 3):
        step(records, number, 0.0)
    records.close()
    for first in (1, 3):
        records = RunRecords(run_dir, trackers=trackers())
        records.rewind(num_train_steps=first, num_warm_start_steps=100)
        step(records, first + 1, 1.0)
        if first == 1:
            step(records, 3, 1.0)
        records.close()


def test_tensorboard_forgets_steps_that_were_taken_back(tmp_path: Path) -> None:
    """As its reader does: a start at a step drops what had that step or a later one."""
    settings = TrainerSettings(run_dir=tmp_path, trackers={"tensorboard": True})
    write_and_resume(tmp_path, lambda: trackers_of(settings))
    folder, shown = tmp_path / "tensorboard", []
    (warm_up,) = (folder / "warm_start").iterdir()
    assert [value.tag for e in events_of(warm_up) for value in e.summary.value] == [
        "warm_start/loss"
    ]
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for event in (event for file in files for event in events_of(file)):
        if event.HasField("session_log"):
            shown = [point for point in shown if point[0] < event.step]
        shown += [(event.step, value.simple_value) for value in event.summary.value]
    assert shown == [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0)]


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_hosted_run_whose_steps_are_taken_back_goes_on_in_another(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: dict[str, list[tuple[int, float]]] = {}

    def init(*, name: str, **_: Any) -> Any:
        points = runs.setdefault(name, [])

        def log(row: dict[str, float]) -> None:
            if "train/reward" in row:
                points.append((int(row["train_step"]), row["train/reward"]))

        return SimpleNamespace(log=log, finish=lambda: None)

    monkeypatch.setitem(sys.modules, package, SimpleNamespace(init=init))
    settings = TrainerSettings(run_dir=tmp_path, run="mine", trackers={package: True})
    write_and_resume(tmp_path, lambda: trackers_of(settings))
    assert runs == {
        "mine": [(1, 0.0), (2, 0.0), (3, 0.0)],
        "mine-2": [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0)],
    }


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_hosted_run_is_given_numbers_and_no_secret(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict[str, float]] = []
    opened: list[dict[str, Any]] = []
    run = SimpleNamespace(log=logged.append, finish=lambda: logged.append({"end": 1.0}))

    def init(**options: Any) -> Any:
        opened.append(options)
        return run

    monkeypatch.setitem(sys.modules, package, SimpleNamespace(init=init))
    monkeypatch.setenv("DIALOOP_TOKEN", "tell-nobody")
    settings = TrainerSettings(run_dir=tmp_path, run="mine", trackers={package: True})
    write(RunRecords(tmp_path, trackers=trackers_of(settings)))
    assert (opened[0]["project"], opened[0]["name"]) == ("dialoop", "mine")
    assert "tell-nobody" not in str(opened)
    # A job that is started again goes on in the run it has.
    assert (opened[0]["resume"], opened[0].get("id")) == (
        "allow",
        "mine" if package == "wandb" else None,
    )
    assert logged[0] == {"train/policy_version": 3.0, "train/reward": 0.25, "train_step": 1}
    assert logged[-1] == {"end": 1.0}


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_tracker_that_lets_nobody_in_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> Any:
        raise ConnectionError("api_key not configured")

    monkeypatch.setitem(sys.modules, package, SimpleNamespace(init=init))
    settings = TrainerSettings(run_dir=tmp_path, trackers={package: True})
    with pytest.raises(InvalidConfig, match=rf"{package} in \[trackers\]") as caught:
        trackers_of(settings)
    assert caught.value.reason == "TRACKER_REFUSED"
    assert package in caught.value.remedy


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_without_its_package_is_refused(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tensorboardX" if package == "tensorboard" else package
    monkeypatch.setitem(sys.modules, name, None)
    settings = TrainerSettings(run_dir=tmp_path, trackers={package: True})
    with pytest.raises(InvalidConfig, match=f"pip install {name}"):
        trackers_of(settings)


OWN = """
import asyncio, json

class Lines:
    def __init__(self, run):
        self._file = open(run.directory / "own.jsonl", "w", encoding="utf-8")
        self._file.write(json.dumps([run.project, run.name, run.settings["learning_rate"]]) + "\\n")

    def log(self, row):
        self._file.write(json.dumps([row["kind"], row["train_step"]]) + "\\n")

    def close(self):
        self._file.close()

def opened(run): return Lines(run)

class Unfinished:
    def __init__(self, run): pass
    def log(self, row): pass

def refusing(run): raise PermissionError("a secret of the tracker")
nothing = None

class Later(Lines):
    loop = None
    async def log(self, row):
        await asyncio.sleep(0)
        self.loop = self.loop or asyncio.get_running_loop()
        if self.loop is asyncio.get_running_loop():  # a session of its own lives on one loop
            super().log(row)
    async def close(self):
        await asyncio.sleep(0)
        super().close()

async def opened_later(run): return Later(run)
"""


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_trackers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_file")
@pytest.mark.parametrize("name", ["Lines", "opened", "Later", "opened_later"])
def test_a_tracker_of_ones_own_is_named_by_its_import_path(name: str, tmp_path: Path) -> None:
    settings = TrainerSettings(
        run_dir=tmp_path, run="mine", trackers={"use": [f"own_trackers:{name}"]}
    )
    write(RunRecords(tmp_path, trackers=trackers_of(settings)))
    lines = (tmp_path / "own.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        ["dialoop", "mine", settings.learning_rate],
        ["train", 1],
        ["evaluation", 2],
    ]


@pytest.mark.usefixtures("own_file")
@pytest.mark.parametrize(
    ("path", "problem", "reason"),
    [
        ("tensorbord", "no tracker 'tensorbord'", "TRACKER_NOT_FOUND"),
        ("no_such_module:T", "tracker 'no_such_module:T' cannot be loaded", "TRACKER_NOT_FOUND"),
        ("own_trackers:Unfinished", "has no method `close`", "TRACKER_NOT_FOUND"),
        ("own_trackers:nothing", r"cannot start a run \(TypeError\)", "TRACKER_REFUSED"),
        (
            "own_trackers:refusing",
            r"cannot start a run \(PermissionError at own_trackers.py, line 21\)",
            "TRACKER_REFUSED",
        ),
    ],
)
def test_what_is_no_tracker_is_refused_at_the_start(
    path: str, problem: str, reason: str, tmp_path: Path
) -> None:
    settings = TrainerSettings(run_dir=tmp_path, trackers={"use": [path]})
    with pytest.raises(InvalidConfig, match=problem) as caught:
        trackers_of(settings)
    assert caught.value.reason == reason
    assert caught.value.remedy
    assert "secret" not in str(caught.value)
