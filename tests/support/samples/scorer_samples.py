"""Small groups for the scorer's tests."""

from __future__ import annotations

from dialoop.sequences import PolicyVersion, Sequence, Source, sequence_of
from dialoop.testing import group, trajectory
from dialoop.trajectory import Group, SamplingParams, Trajectory

MAIN_0 = PolicyVersion(lineage="main", number=0)


def make_sequence(prompt=(5, 8, 2), sampled=(11, 12), logprobs=(-0.5, -1.25)) -> Sequence:
    model = {"source": Source.MODEL, "policy_version": MAIN_0}
    return sequence_of([(prompt, {"source": Source.PROMPT}), (sampled, model)], logprobs=logprobs)


def make_trajectory(name: str, reward: float, **fields) -> Trajectory:
    usual = {"sequences": (make_sequence(),), "sampling": SamplingParams(temperature=1.0)}
    return trajectory(trajectory_id=name, reward=reward, **usual | fields)


def make_group(*rewards: float, task_id: str = "t", size: int | None = None, **fields) -> Group:
    members = (make_trajectory(f"t{i}", r, **fields) for i, r in enumerate(rewards))
    size = size or len(rewards)
    return group(*members, group_id=f"{task_id}", num_trajectories=size)
