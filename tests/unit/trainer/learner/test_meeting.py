"""Nodes of a trainer that compare themselves: all end alike, and the error says who and what."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from dialoop.errors import DialoopError, InvalidConfig, Unavailable
from dialoop_services.trainer.learner.launch import Launch, _Words, interface_towards
from dialoop_services.trainer.learner.meeting import (
    NodeFacts,
    NodePlace,
    facts_of,
    meet,
    part,
    verdict_on,
)
from dialoop_services.trainer.settings import TrainerSettings

FIRST = NodeFacts(node=0, host="a", num_processes=8, cards=("H200",) * 8, needs_cards=True)
SECOND = replace(FIRST, node=1, host="b")
PLACE = NodePlace(
    num_processes=1, num_nodes=2, rendezvous="10.0.0.5:29400", address="10.0.0.5", interface="eth0"
)


def place(node: int, port: int, num_processes: int = 1) -> NodePlace:
    here = f"127.0.0.1:{port}"
    return replace(PLACE, node=node, rendezvous=here, num_processes=num_processes)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_equal_nodes_may_train() -> None:
    assert verdict_on([FIRST, SECOND], PLACE, Path("/runs/a"), 90) is None


@pytest.mark.parametrize(
    ("change", "reason", "says"),
    [
        ({"torch_version": "2.11"}, "NODES_DIFFER", "node 1 (b) has 2.11"),
        ({"dialoop_version": "0.1"}, "NODES_DIFFER", "different versions of Dialoop"),
        ({"cards": ("A100",) * 8}, "NODES_DIFFER", "node 0 (a) has H200, H200"),
        ({"cards": ("H200",) * 4}, "NEEDS_CUDA", "node 1 (b) has 4 CUDA devices for 8 processes"),
        ({"num_processes": 4}, "NODES_DIFFER", "different numbers of processes"),
        ({"sees_folder": False}, "NODES_DIFFER", "/runs/a is another one on node 1 (b)"),
    ],
)
def test_nodes_that_differ_are_named(change: dict[str, object], reason: str, says: str) -> None:
    other = replace(SECOND, **change)  # type: ignore[arg-type]
    verdict = verdict_on([FIRST, other], PLACE, Path("/runs/a"), 90)
    assert verdict is not None
    assert verdict["reason"] == reason
    assert says in verdict["message"]


def test_a_node_that_never_comes_is_named(tmp_path: Path, port: int) -> None:
    settings = TrainerSettings(run_dir=tmp_path)
    with pytest.raises(Unavailable, match="node 1 of the trainer's 2 did not come") as caught:
        meet(place(0, port), settings, timeout_s=0.5)
    assert caught.value.reason == "NODE_MISSING"
    assert not list(tmp_path.iterdir())


def test_without_the_first_node_the_others_say_so(tmp_path: Path, port: int) -> None:
    with pytest.raises(Unavailable, match="cannot reach node 0 at 127"):
        meet(place(1, port), TrainerSettings(run_dir=tmp_path), timeout_s=0.5)


@pytest.mark.parametrize("equal", [True, False])
def test_both_nodes_end_with_one_verdict(tmp_path: Path, port: int, equal: bool) -> None:
    def come(node: int) -> DialoopError | None:
        try:
            where = place(node, port, num_processes=1 if equal else 1 + node)
            meet(where, TrainerSettings(run_dir=tmp_path), timeout_s=30)
        except DialoopError as error:
            return error
        return None

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(come, (0, 1))
    if equal:
        assert (first, second) == (None, None)
    else:
        assert isinstance(second, InvalidConfig)
        assert str(first) == str(second)


def test_the_first_node_keeps_the_store_until_the_others_have_left(
    tmp_path: Path, port: int
) -> None:
    """What rank failed stands in it, and ranks of other nodes may still compute."""

    def leave(node: int) -> float:
        store = meet(place(node, port), TrainerSettings(run_dir=tmp_path), timeout_s=30)
        time.sleep(node)
        started = time.monotonic()
        part(store, place(node, port))
        return time.monotonic() - started

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(leave, (0, 1))
    assert first > 0.5 > second


def test_a_file_that_another_node_does_not_see_is_no_shared_directory(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 looks for node 0's file; here it looks in vain, as on a disk of its own."""
    monkeypatch.setattr("dialoop_services.trainer.learner.meeting._SEEN_WITHIN_S", 0.0)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with ThreadPoolExecutor() as pool:
        settings = TrainerSettings(run_dir=tmp_path)
        ends = [pool.submit(meet, place(n, port), settings, timeout_s=30) for n in (0, 1)]
        texts = [str(end.exception()) for end in ends]
    assert texts[0] == texts[1]
    assert f"{tmp_path} is another one on node 1" in texts[0]


def test_a_node_says_what_it_is(tmp_path: Path) -> None:
    facts = facts_of(PLACE, TrainerSettings(run_dir=tmp_path))
    assert (facts.host, facts.cards, facts.needs_cards) == (socket.gethostname(), (), False)


def test_several_nodes_are_numbered_as_they_are_told_and_read_no_pickle(tmp_path: Path) -> None:
    config = Launch(["python"], replace(PLACE, num_nodes=2, node=1))._config(tmp_path)
    assert (config.rdzv_backend, config.rdzv_configs["rank"]) == ("static", 1)


def test_the_interface_is_the_one_that_reaches_the_others() -> None:
    address, interface = interface_towards("127.0.0.1")
    assert (address, interface[:2]) == ("127.0.0.1", "lo")
    with pytest.raises(Unavailable, match=r"does not reach nowhere\.invalid"):
        interface_towards("nowhere.invalid")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["8", "--num-nodes", "2"], "several nodes need --rendezvous HOST:PORT"),
        (["8", "--node", "1"], "there is no node 1 of 1"),
    ],
)
def test_wrong_options_end_the_command(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _Words.read(words)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err
