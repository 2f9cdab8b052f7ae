"""Small groups for the scorer's tests."""

from __future__ import annotations

from dialoop.chat import History
from dialoop.sequences import PolicyVersion, Sequence, Source, sequence_of
from dialoop.trajectory import DoneReason, Group, Reward, SamplingParams, Task, Trajectory, Turn

MAIN_0 = PolicyVersion(lineage="main", number=0)


def make_sequence(prompt=(5, 8, 2), sampled=(11, 12), logprobs=(-0.5, -1.25)) -> Sequence:
    model = {"source": Source.MODEL, "policy_version": MAIN_0}
    return sequence_of([(prompt, {"source": Source.PROMPT}), (sampled, model)], logprobs=logprobs)


def make_trajectory(name: str, reward: float, **given) -> Trajectory:
    fields = {
        "history": History.from_chats(
            [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
        ),
        "turns": (
            Turn(message_start=1, num_messages=1, rewards=(Reward(name="r", value=reward),)),
        ),
        "sequences": (make_sequence(),),
        "sampling": SamplingParams(temperature=1.0),
        "terminated": True,
        "done_reason": DoneReason.SUBMITTED,
    }
    return Trajectory(
        trajectory_id=name,
        group_id="t#1",
        task_key="1+2",
        seed=0,
        environment="arithmetic",
        environment_version="1",
        **fields | given,
    )


def make_group(*rewards: float, task_id: str = "t", size: int | None = None, **given) -> Group:
    task = Task(
        task_id=task_id,
        environment="arithmetic",
        split="train",
        key="1+2",
        num_trajectories=size or len(rewards),
    )
    trajectories = (make_trajectory(f"t{i}", r, **given) for i, r in enumerate(rewards))
    return Group(group_id=f"{task_id}#1", task=task, trajectories=tuple(trajectories))
