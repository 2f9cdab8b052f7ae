"""`python -m tests.support.programs.trainer_fork`: trainers that share one import of torch.

Reads {"DIALOOP_TRAINER_...": "..."} and a log's path as one JSON line per trainer, forks, and
prints the new process' id: the child is then what `python -m dialoop_services.trainer` would be.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import transformers.models.qwen2.modeling_qwen2  # noqa: F401 - so that children have it
from dialoop_services.runtime.process import run_blocking
from dialoop_services.trainer.__main__ import main as train


def main() -> None:
    """Fork a trainer per line until there are no more lines."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            _become_trainer(request["environment"], request["log"])
        print(pid, flush=True)  # noqa: T201


def _become_trainer(environment: dict[str, str], log: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    run_blocking(train, name="trainer")
    os._exit(0)


if __name__ == "__main__":
    main()
