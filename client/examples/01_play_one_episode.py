"""Play one episode without a server and then, if you name a run, on the services of a stack.

    .venv/bin/python client/examples/01_play_one_episode.py
    .venv/bin/dialoop up --detach
    .venv/bin/python client/examples/01_play_one_episode.py runs/default

The environment asks for a sum and has a calculator. Without a server a script plays the policy; on
a stack the inference service does.
"""

import sys

from dialoop import BlockingDialoop, Trajectory, arithmetic
from dialoop.testing import ScriptedPolicy


def show(trajectory: Trajectory) -> None:
    """Print the messages, the reward, and the tokens that training would see."""
    for message in trajectory.history:
        print(f"  {message.role:<10} {message.text!r}")
    for failure in trajectory.failures:
        print(f"  {failure.owner.name} failed: {failure.message}")
    print(f"  reward {trajectory.reward:g}, {trajectory.done_reason.name}")
    for sequence in trajectory.sequences:
        sources = [f"{segment.source.name} {segment.length}" for segment in sequence.segments]
        print(f"  {len(sequence)} tokens: {', '.join(sources)}")


def main() -> None:
    """Play in this process, then on the stack named by the argument."""
    policy = ScriptedPolicy(["<request><Calculator>22+28<call>", "Result=50<submit>"])
    with BlockingDialoop(environment=arithmetic(), inference=policy) as dialoop:
        task = dialoop.task("arithmetic", "22+28", split="heldout")
        print("in this process:")
        show(dialoop.play(task))

    if len(sys.argv) > 1:
        with BlockingDialoop.of_run(sys.argv[1]) as dialoop:
            print(f"on {sys.argv[1]}:")
            show(dialoop.play(dialoop.task("arithmetic", "22+28", split="heldout")))


if __name__ == "__main__":
    main()
