"""A real Ray of several raylets on this machine, in a virtual environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.stack_jobs import ROOT

RAY = "ray==2.60.0"
VENV = "DIALOOP_TEST_RAY_VENV"
"""Names a virtual environment that has Ray already."""
_PROGRAM = """
import sys
from ray.cluster_utils import Cluster
options = {"object_store_memory": 80 << 20, "num_cpus": 4, "num_gpus": 2}
own = {"include_dashboard": False, "memory": 1 << 30}
cluster = Cluster(initialize_head=True, head_node_args={**options, **own})
others = [cluster.add_node(**options, memory=4 << 30) for _ in range(int(sys.argv[1]) - 1)]
nodes = [cluster.head_node, *others]
cluster.wait_for_nodes()
print(cluster.address, *(node.node_id for node in nodes), flush=True)
for line in sys.stdin:
    node = next(each for each in nodes if each.node_id == line.strip())
    cluster.remove_node(node, allow_graceful=False)
    print("killed", flush=True)
cluster.shutdown()
"""


def ray_python(folder: Path) -> str:
    """Return a Python that has Ray and all that this one has; AssertionError without an index."""
    existing = os.environ.get(VENV)
    venv = Path(existing) if existing else folder / "ray"
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run((sys.executable, "-m", "venv", str(venv)), check=True)
        words = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", RAY)
        installed = subprocess.run(
            (str(python), *words), capture_output=True, text=True, check=False
        )
        assert installed.returncode == 0, f"{RAY} cannot be installed: {installed.stderr[-500:]}"
    words = ("-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])")
    own = subprocess.run((str(python), *words), capture_output=True, text=True, check=True)
    paths = (ROOT / "client", ROOT / "services", sysconfig.get_paths()["purelib"])
    # Ray's own packages come first, and ours are found behind them. With one of these jsonschema
    # compiles a grammar in each process of Ray for seconds, and a raylet waits 15 s for its agents.
    lines = (*map(str, paths), "import sys; sys.modules['rfc3987_syntax'] = None")
    Path(own.stdout.strip(), "zz_dialoop.pth").write_text("".join(f"{line}\n" for line in lines))
    return str(python)


@dataclass(slots=True)
class RayCluster:
    """Raylets with four processors and two GPUs each, which only Ray believes in.

    The first, which the driver is connected to, has 1 GiB of memory, and the others have 4.
    """

    python: str
    address: str
    nodes: list[str]
    process: subprocess.Popen[str]

    def kill_node(self, node: str) -> None:
        """Kill a raylet."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{node}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "killed\n"

    def nodes_of_actors(self) -> dict[int, str]:
        """Return the node of each living actor, by the pid of its process."""
        nodes = self._ask(
            "import ray._private.state as state\n"
            "actors = state.actors().values()\n"
            "answer = {a['Pid']: a['Address']['NodeID'] for a in actors if a['State'] == 'ALIVE'}"
        )
        return {int(pid): node for pid, node in nodes.items()}

    def num_groups(self) -> int:
        """Return how many placement groups hold room or wait for it."""
        groups = self._ask("answer = ray.util.placement_group_table()")
        return sum(group["state"] != "REMOVED" for group in groups.values())

    def _ask(self, program: str) -> dict[str, Any]:
        """Return what a driver of its own finds out: its `answer`, a dict that JSON can hold."""
        connect = f"address={self.address!r}, log_to_driver=False, configure_logging=False"
        whole = f"import json, ray\nray.init({connect})\n{program}\nprint(json.dumps(answer))\n"
        answer = subprocess.run(
            (self.python, "-c", whole), capture_output=True, text=True, check=True
        )
        values: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
        return values


@contextmanager
def ray_cluster(folder: Path, num_nodes: int) -> Iterator[RayCluster]:
    """Yield a running cluster."""
    python = ray_python(folder)
    with (folder / "ray.err").open("ab") as errors:
        process = subprocess.Popen(
            (python, "-c", _PROGRAM, str(num_nodes)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout
    try:
        address, *nodes = process.stdout.readline().split() or ("",)
        assert address, (folder / "ray.err").read_text("utf-8", errors="replace")[-3000:]
        yield RayCluster(python, address, nodes, process)
    finally:
        assert process.stdin
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
