"""Train: the tiny model learns to ask the calculator, on a CPU, with every service of a real run.

    .venv/bin/python client/examples/04_train_tiny.py

This is a smaller `make demo`, with the transformers engine and the queue in memory. It takes two to
three minutes. The run stays in runs/example-tiny until the next one replaces it;
`dialoop show runs/example-tiny --best --tokens` shows it.
"""

import dialoop_ops

CONFIG = {
    "run": "example-tiny",
    "engine": "transformers",
    "store": "memory",
    "warm_start": {"num_steps": 150},
    "train": {"num_steps": 10, "groups_per_train_step": 8, "loss": "grpo"},
    "evaluation": {"num_tasks": 64, "every": 0},
}


def show(row: dict) -> None:
    """Print the reward of each train step as it ends."""
    if row["kind"] == "train":
        print(f"train step {row['train_step']}: reward {row.get('reward', 0):.2f}")


def main() -> None:
    """Run the job to its end and read its summary."""
    result = dialoop_ops.train(CONFIG, on_metrics=show, fresh=True)
    for when in ("before", "after"):
        accuracy = result.summary[f"heldout_sampled_{when}"]
        calls = result.summary[f"tool_call_rate_{when}"]
        print(f"{when}: held-out accuracy {accuracy:.2f}, tool-call rate {calls:.2f} (sampled)")
    versions, seconds = result.summary["num_policy_versions"], result.summary["wall_s"]
    print(f"{versions} policy versions in {seconds:.0f} s, in {result.run_dir}")
    if not result.succeeded:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
