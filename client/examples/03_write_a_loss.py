"""Train with the loss of client/examples/my_loss.py, which a config names.

    .venv/bin/python client/examples/03_write_a_loss.py

Two answers to one task, one right and one wrong, become a group with advantages. A few updates with
the loss make the right one more likely and the wrong one less likely. It needs
dialoop-services[trainer].
"""

import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

from dialoop import BlockingDialoop, ChatTemplate, Sequence, TokenBuilder, Tokenizer, arithmetic
from dialoop.testing import ScriptedPolicy
from dialoop_learning.loss.loss_loading import load_loss
from dialoop_learning.model.policy import load_policy
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_learning.packing.rows import pack
from dialoop_learning.training import update

CONFIG = """
[train]
loss = "my_loss:reinforce"
loss_options = { scale = 2.0 }
"""
ADVANTAGES = {"Result=50<submit>": 1.0, "Result=51<submit>": -1.0}


def sample(answer: str, tokenizer: Tokenizer) -> Sequence:
    """Return the tokens of an episode in which the policy gives this answer, with its advantage."""
    policy = ScriptedPolicy([answer], builder=TokenBuilder(tokenizer, ChatTemplate.of(tokenizer)))
    with BlockingDialoop(environment=arithmetic(), inference=policy) as dialoop:
        trajectory = dialoop.play(dialoop.task("arithmetic", "22+28", split="heldout"))
    return replace(trajectory.sequences[0], advantage=ADVANTAGES[answer])


def main() -> None:
    """Load the loss as the trainer does, and train on both answers."""
    section = tomllib.loads(CONFIG)["train"]
    loss = load_loss(section["loss"], section["loss_options"])
    with tempfile.TemporaryDirectory() as folder:
        directory = make_tiny_model(Path(folder) / "model", seed=0)
        tokenizer, policy = Tokenizer.from_directory(directory), load_policy(directory)
    row = pack([sample(answer, tokenizer) for answer in ADVANTAGES])
    optimizer = GuardedOptimizer(policy.parameters(), OptimizerSettings(learning_rate=1e-3))

    before = [float(values.detach().sum()) for values in row.split(policy(row).logprobs)]
    for step in range(5):
        report = update(policy, optimizer, [row], loss)
        print(f"update {step}: loss {report.loss:+.3f}, metrics {report.metrics}")
    after = [float(values.detach().sum()) for values in row.split(policy(row).logprobs)]

    for answer, old, new in zip(ADVANTAGES, before, after, strict=True):
        print(f"{answer}: log-prob {old:.2f} -> {new:.2f} (advantage {ADVANTAGES[answer]:+g})")
    assert after[0] - after[1] > before[0] - before[1], "the loss had no effect"


if __name__ == "__main__":
    main()
