"""Train: the tiny model learns to ask the calculator, on a CPU, with every service of a real run.

    .venv/bin/python client/examples/04_train_tiny.py

This is a smaller `make demo`, with the transformers engine and the queue in memory. It takes two to
three minutes. The run stays in runs/example-tiny until the next one replaces it;
`dialoop show runs/example-tiny --best --tokens` shows it.
"""

import json
import subprocess
import sys
from pathlib import Path

CONFIG = """
run = "example-tiny"
engine = "transformers"
store = "memory"

[warm_start]
num_steps = 150

[train]
num_steps = 10
groups_per_train_step = 8
loss = "grpo"

[evaluation]
num_tasks = 64
every = 0
"""


def main() -> None:
    """Write the config, run the job, and read its summary."""
    run_dir = Path("runs", "example-tiny")
    config = Path("runs", "example-tiny.toml")
    config.parent.mkdir(exist_ok=True)
    config.write_text(CONFIG, encoding="utf-8")
    command = [sys.executable, "-m", "dialoop.cli.main", "train", str(config), "--fresh"]
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(code)

    summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
    for when in ("before", "after"):
        accuracy = summary[f"heldout_sampled_{when}"]
        calls = summary[f"tool_call_rate_{when}"]
        print(f"{when}: held-out accuracy {accuracy:.2f}, tool-call rate {calls:.2f} (sampled)")
    print(f"{summary['num_policy_versions']} policy versions in {summary['wall_s']:.0f} s")


if __name__ == "__main__":
    main()
