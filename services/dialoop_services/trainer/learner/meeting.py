"""Compare the nodes of a trainer before they start: who came, what they are, what they share.

    store = meet(place, settings, timeout_s=90.0)   # on every node; returns or raises on all alike

Node 0 hosts torch's TCPStore, which the processes use afterwards. It waits for what the others say
of themselves and answers all with one verdict, so that every node ends with the same words.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import dialoop
import torch
from dialoop.errors import DialoopError, InvalidConfig, Unavailable
from dialoop.reasons import Reason
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from dialoop_services.trainer.settings import TrainerSettings

RENDEZVOUS_VARIABLE = "DIALOOP_RENDEZVOUS"
"""Where the processes of one node meet; a launch sets it for them."""
_PROOF, _VERDICT = "dialoop/proof", "dialoop/verdict"
_VERDICT_GRACE_S = 15.0
_SEEN_WITHIN_S, _POLL_S = 10.0, 0.2
"""How long a file may take to be seen elsewhere: clients of NFS keep what a folder has."""
_MUST_BE_EQUAL = {
    "num_processes": "numbers of processes",
    "dialoop_version": "versions of Dialoop",
    "torch_version": "versions of torch",
    "cards": "cards",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """Which node of a trainer this is, and how it reaches the others.

    rendezvous: HOST:PORT of node 0; empty with one node. address and interface: this node's own.
    """

    num_processes: int
    num_nodes: int = 1
    node: int = 0
    rendezvous: str = ""
    address: str
    interface: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node says of itself."""

    node: int
    host: str
    num_processes: int
    dialoop_version: str = dialoop.__version__
    torch_version: str = str(torch.__version__)
    cards: tuple[str, ...] = ()
    needs_cards: bool = False
    sees_folder: bool = True

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"


def meet(place: NodePlace, settings: TrainerSettings, *, timeout_s: float) -> TCPStore:
    """Return the store in which all nodes have said what they are.

    Every node raises the same error for one that did not come in time (Unavailable, NODE_MISSING)
    and for one that cannot train with the others (InvalidConfig, NODES_DIFFER or NEEDS_CUDA).
    """
    deadline = time.monotonic() + timeout_s
    folder = settings.run_dir.resolve()
    store = _store_of(place, timeout_s)
    if place.node == 0:
        proof = folder / f".seen-by-all-nodes-{secrets.token_hex(8)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            proof.touch()
            store.set(_PROOF, str(proof))
            facts = [facts_of(place, settings), *_others(store, place, deadline)]
            verdict = verdict_on(facts, place, folder, timeout_s)
        finally:
            proof.unlink(missing_ok=True)
        store.set(_VERDICT, json.dumps(verdict))
        # After an error the store ends with this process: let the others read it first.
        _wait_for([_heard(each.node) for each in facts[1:]], store)
    else:
        proof = Path(_read(store, _PROOF, deadline, place))
        facts_here = facts_of(place, settings, sees_folder=_appears(proof))
        store.set(_said(place.node), json.dumps(asdict(facts_here)))
        verdict = json.loads(_read(store, _VERDICT, deadline + _VERDICT_GRACE_S, place))
        store.set(_heard(place.node), "")
    if verdict is not None:
        raise _error_of(verdict)
    return store


def part(store: TCPStore, place: NodePlace) -> None:
    """Leave the store; node 0, which hosts it, once the others have, or have had time to.

    Ranks that still compute when one has failed read there which one it was.
    """
    if place.node == 0:
        _wait_for([_parted(node) for node in range(1, place.num_nodes)], store)
    else:
        with suppress(DistError):  # node 0 is gone
            store.set(_parted(place.node), "")


def facts_of(place: NodePlace, settings: TrainerSettings, *, sees_folder: bool = True) -> NodeFacts:
    """Return what this node is."""
    on_cards = settings.device == "cuda"
    count = torch.cuda.device_count() if on_cards and torch.cuda.is_available() else 0
    return NodeFacts(
        node=place.node,
        host=socket.gethostname(),
        num_processes=place.num_processes,
        cards=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        needs_cards=on_cards,
        sees_folder=sees_folder,
    )


def verdict_on(
    facts: Sequence[NodeFacts], place: NodePlace, folder: Path, timeout_s: float
) -> dict[str, str] | None:
    """Return why these nodes cannot train together, as an error's parts; None if they can."""
    came = {each.node for each in facts}
    missing = [f"node {node}" for node in range(place.num_nodes) if node not in came]
    if missing:
        return _verdict(
            f"{', '.join(missing)} of the trainer's {place.num_nodes} did not come to "
            f"{place.rendezvous} within {timeout_s:g} s; there were {_names(facts)}.",
            Reason.NODE_MISSING,
            "Start the trainer on every node at about the same time, with one job file, and let "
            "all of them reach that address.",
        )
    for each in facts:
        if each.needs_cards and len(each.cards) < each.num_processes:
            return _verdict(
                f"{each} has {len(each.cards)} CUDA devices for {each.num_processes} processes.",
                Reason.NEEDS_CUDA,
                "Lower num_processes in [train], or take nodes with more cards.",
            )
    for key, name in _MUST_BE_EQUAL.items():
        values = {str(each): getattr(each, key) for each in facts}
        if len(set(values.values())) > 1:
            said = "; ".join(f"{node} has {_text(value)}" for node, value in values.items())
            return _verdict(
                f"The trainer's nodes have different {name}: {said}.",
                Reason.NODES_DIFFER,
                "Use one environment and one kind of machine for all nodes.",
            )
    blind = [each for each in facts if not each.sees_folder]
    if blind:
        return _verdict(
            f"The run's directory {folder} is another one on {_names(blind)}: a file that "
            f"{facts[0]} wrote there is not to be seen.",
            Reason.NODES_DIFFER,
            "Put the run's directory (--runs) on a file system that all nodes share.",
        )
    return None


def _store_of(place: NodePlace, timeout_s: float) -> TCPStore:
    host, _, port = place.rendezvous.rpartition(":")
    try:
        return TCPStore(
            host.strip("[]"),
            int(port),
            is_master=place.node == 0,
            # The agent of this process joins the same store.
            multi_tenant=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (DistError, RuntimeError, TimeoutError) as error:
        raise Unavailable(
            f"Node {place.node} of the trainer's {place.num_nodes} cannot "
            f"{'listen at' if place.node == 0 else 'reach node 0 at'} {place.rendezvous} "
            f"within {timeout_s:g} s.",
            reason=Reason.NODE_MISSING,
            remedy="Start the trainer on node 0 too, and name a free port that all nodes reach.",
        ) from error


def _others(store: TCPStore, place: NodePlace, deadline: float) -> list[NodeFacts]:
    """Return what the other nodes said until the deadline."""
    missing, facts = set(range(1, place.num_nodes)), []
    while missing and time.monotonic() < deadline:
        for node in sorted(missing):
            if store.check([_said(node)]):
                said = json.loads(store.get(_said(node)))
                facts.append(NodeFacts(**{**said, "cards": tuple(said["cards"])}))
                missing.discard(node)
        time.sleep(_POLL_S)
    return sorted(facts, key=lambda each: each.node)


def _read(store: TCPStore, key: str, deadline: float, place: NodePlace) -> str:
    """Return what node 0 wrote; Unavailable (NODE_MISSING) if it says nothing until then."""
    try:
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(_POLL_S)
        return store.get(key).decode()
    except (DistError, RuntimeError, TimeoutError) as error:
        raise Unavailable(
            f"Node 0 of the trainer's {place.num_nodes} at {place.rendezvous} says nothing to "
            f"node {place.node}.",
            reason=Reason.NODE_MISSING,
            remedy="See the log of node 0.",
        ) from error


def _wait_for(keys: Sequence[str], store: TCPStore) -> None:
    deadline = time.monotonic() + _VERDICT_GRACE_S
    while not store.check(list(keys)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _said(node: int) -> str:
    return f"dialoop/node/{node}"


def _heard(node: int) -> str:
    return f"dialoop/heard/{node}"


def _parted(node: int) -> str:
    return f"dialoop/parted/{node}"


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _names(facts: Sequence[NodeFacts]) -> str:
    return ", ".join(map(str, facts))


def _text(value: Any) -> str:
    return (", ".join(value) or "none") if isinstance(value, tuple) else str(value)


def _verdict(message: str, reason: Reason, remedy: str) -> dict[str, str]:
    return {"message": message, "reason": str(reason), "remedy": remedy}


def _error_of(verdict: Mapping[str, str]) -> DialoopError:
    """Return the error; that a node is missing may pass, what the nodes are does not."""
    kind = Unavailable if verdict["reason"] == Reason.NODE_MISSING else InvalidConfig
    return kind(verdict["message"], reason=Reason(verdict["reason"]), remedy=verdict["remedy"])
