"""`python -m dialoop_services.trainer.learner.launch 4`: four trainer processes, by torchrun.

Over several machines the same line runs on each, with its number; they meet at the first one:

    ... launch 8 --num-nodes 2 --node 0 --rendezvous 10.0.0.5:29400

The processes of all nodes end together. On a signal to stop, the first one finishes its step and
saves. When one is lost, this one ends the others and exits non-zero, so that its caller can start
all again; it exits with 2 for a wrong setting, which no restart mends.

Processes of one machine meet in a file that only this user can read. Those of several meet in a
store of torch's, after the nodes have compared what they are (`meeting.py`).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]
from dialoop.errors import Unavailable
from dialoop.reasons import Reason
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dialoop_services.runtime.exit_reason import CONFIG_ERROR
from dialoop_services.runtime.process import PARENT_VARIABLE, run_blocking
from dialoop_services.runtime.settings import load
from dialoop_services.trainer.learner.meeting import (
    RENDEZVOUS_VARIABLE,
    NodePlace,
    meet,
    part,
)
from dialoop_services.trainer.settings import TrainerSettings

_HERE = "127.0.0.1"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_MEET_S = 90.0
"""Below the 120 s that the stack gives the trainer to be ready, so that the error is ours."""


class Launch:
    """The processes of this node, from their start to their end."""

    def __init__(self, command: Sequence[str], place: NodePlace) -> None:
        self._command = tuple(command)
        self._place = place
        self._is_stopping = False

    def run(self) -> int:
        """Start them, wait until all have ended, and return the exit code of the launch."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        # Its own words come with a traceback; what has failed is said below.
        logging.getLogger("torch.distributed.elastic").propagate = False
        logging.getLogger("torch.distributed.elastic").addHandler(logging.NullHandler())
        with tempfile.TemporaryDirectory(prefix="dialoop-ranks-") as folder:
            os.environ |= self._variables(Path(folder))
            agent = elastic_launch(self._config(Path(folder)), self._command[0])
            try:
                agent(*self._command[1:])
            except ChildFailedError as error:
                return self._code_of(error.failures)
            except DistError as error:  # the first node has ended, and its store with it
                self._report(f"Node {self._place.node} lost the others: {error}")
                return 0 if self._is_stopping else 1
        return 0

    def _variables(self, folder: Path) -> dict[str, str]:
        """Return what the processes get beside what the agent says."""
        variables = {
            PARENT_VARIABLE: str(os.getpid()),
            # What is set stays.
            **{name: os.environ.get(name, self._place.interface) for name in _INTERFACES},
        }
        if self._place.num_nodes == 1:  # and torch's store, which listens everywhere, is not made
            store = f"file://{folder / 'store'}"
            variables |= {RENDEZVOUS_VARIABLE: store, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return variables

    def _config(self, folder: Path) -> LaunchConfig:
        place = self._place
        # Several nodes know their numbers. The agent's c10d meeting would number them by name, and
        # unpickle what anyone has put into its store.
        meeting: dict[str, object] = {"rank": place.node, "timeout": int(_MEET_S)}
        if place.num_nodes == 1:
            meeting = {"store_type": "file", "join_timeout": int(_MEET_S)}
        return LaunchConfig(
            min_nodes=place.num_nodes,
            max_nodes=place.num_nodes,
            nproc_per_node=place.num_processes,
            run_id="trainer",
            rdzv_backend="c10d" if place.num_nodes == 1 else "static",
            rdzv_endpoint=place.rendezvous or str(folder / "nodes"),
            rdzv_configs=meeting,
            max_restarts=0,  # whoever started this starts it again, on all nodes
            local_addr=place.address,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
            signals_to_handle="SIGQUIT",  # the others are handled here
        )

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Tell the processes, of which all but the first ignore it; end where there are none."""
        self._is_stopping = True
        children = psutil.Process().children()
        if not children:
            sys.exit(0)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.terminate()

    def _code_of(self, failures: Mapping[int, ProcessFailure]) -> int:
        """Return the exit code of a launch in which these have failed; say who was killed."""
        first = min(failures.values(), key=lambda each: (each.timestamp, _was_told(each)))
        codes = {each.local_rank: each.exitcode for each in failures.values()}
        if self._is_stopping and codes.get(0, 0) in (0, -signal.SIGTERM):
            return 0
        if first.exitcode < 0:
            rank = self._place.node * self._place.num_processes + first.local_rank
            self._report(f"Rank {rank} was ended by signal {-first.exitcode}.")
        return CONFIG_ERROR if CONFIG_ERROR in codes.values() else 1

    def _report(self, what: str) -> None:
        sys.stderr.write(
            f"dialoop trainer: {what} The others were ended with it. "
            "Resume all ranks from the last checkpoint.\n"
        )


def _was_told(failure: ProcessFailure) -> bool:
    """Return whether the agent may have ended it, since another one had failed."""
    return bool(failure.exitcode == -signal.SIGTERM)


def interface_towards(host: str) -> tuple[str, str]:
    """Return the address and the name of the interface by which this machine reaches a host.

    Raises Unavailable (NODE_MISSING) for a host without an address or a route by now.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise Unavailable(
            f"This machine does not reach {host}: {error.strerror}.",
            reason=Reason.NODE_MISSING,
            remedy="Give an address that all machines of the job reach.",
        ) from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return address, name
    raise Unavailable(
        f"No interface of this machine has the address {address}.",
        reason=Reason.NODE_MISSING,
        remedy="Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """The options of the command."""

    num_processes: int
    num_nodes: int
    node: int
    rendezvous: str

    @classmethod
    def read(cls, words: Sequence[str]) -> _Words:
        """Read the options; end the process for wrong ones."""
        plain = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
        parser.add_argument("num_processes", type=int, help="processes on each node")
        parser.add_argument("--num-nodes", type=int, default=1, help="machines that train")
        parser.add_argument("--node", type=int, default=0, help="which of them this is, from 0")
        parser.add_argument("--rendezvous", default="", help="HOST:PORT, a port of node 0")
        said = cls(**vars(parser.parse_args(words)))
        if not 0 <= said.node < said.num_nodes or said.num_processes < 1:
            parser.error(f"there is no node {said.node} of {said.num_nodes}, counted from 0")
        if said.num_nodes > 1 and urlsplit(f"//{said.rendezvous}").port is None:
            parser.error("several nodes need --rendezvous HOST:PORT")
        return said


def main() -> None:
    """Run as many processes as the first argument says."""
    words = _Words.read(sys.argv[1:])

    def work() -> None:
        settings = load(TrainerSettings)
        peers = [words.rendezvous] if words.rendezvous else settings.inference_addresses
        hosts = [urlsplit(f"//{peer}").hostname or _HERE for peer in peers]
        found = [(_HERE, interface_towards(_HERE)[1])]
        for host in hosts:
            # The first rank speaks with replicas of other machines by NCCL too. One that has no
            # address yet is met later, and the nodes of the trainer are met now.
            with suppress(*([Unavailable] if not words.rendezvous else [])):
                found.append(interface_towards(host))
        address, interface = max(found, key=lambda at: at[0] != _HERE)
        place = NodePlace(
            num_processes=words.num_processes,
            num_nodes=words.num_nodes,
            node=words.node,
            rendezvous=words.rendezvous,
            address=address,
            interface=interface,
        )
        store = meet(place, settings, timeout_s=_MEET_S) if place.num_nodes > 1 else None
        command = (sys.executable, "-m", "dialoop_services.trainer")
        code = Launch(command, place).run()
        if store is not None:
            part(store, place)
        sys.exit(code)

    run_blocking(work, name="trainer")


if __name__ == "__main__":
    main()
