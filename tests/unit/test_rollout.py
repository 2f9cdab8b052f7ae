from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from dialoop.chat import ChatHistory, History, Message, as_history
from dialoop.environments import (
    ChatEnv,
    MaxTurns,
    RewardShape,
    RowTasks,
    Score,
    Traits,
    Transform,
)
from dialoop.episode import ResetResult, Sample, StepResult, UpdateMode
from dialoop.errors import InvalidHistory, InvalidInput, NotFound, Unavailable
from dialoop.rollout import play, play_group, sampling_of_member
from dialoop.sequences import ForkCause, PolicyVersion, Source, sequence_of
from dialoop.testing import InMemoryEnvironment, ScriptedPolicy
from dialoop.trajectory import (
    DoneReason,
    Failure,
    Owner,
    Reward,
    SamplingParams,
    StopReason,
    Task,
)

V0 = PolicyVersion(lineage="main", number=0)
TASK = Task(task_id="t", environment="e", split="train", key="k", num_trajectories=3)
MISTAKE = Failure(owner=Owner.POLICY, reason="BAD_CALL", message="")
BROKEN = Failure(owner=Owner.TOOL, reason="SANDBOX_DIED", message="")


class Echo:
    """A policy of two tokens an answer; remembers what context it was sent."""

    def __init__(
        self,
        *,
        fork_at: int = -1,
        stop_reason: StopReason = StopReason.STOP,
        update_modes: tuple[UpdateMode, ...] = (UpdateMode.RECOMPUTE,) * 9,
    ) -> None:
        self.fork_at = fork_at
        self.update_modes = update_modes
        self.stop_reason = stop_reason
        self.contexts = []
        self.seeds = []

    async def generate(
        self, history, *, context=None, num_context_messages=0, sampling=None, turn=0, num_samples=1
    ):
        self.contexts.append((None if context is None else len(context), num_context_messages))
        self.seeds.append(sampling.seed)
        model = {"source": Source.MODEL, "policy_version": V0, "turn": turn}
        sequence = sequence_of(
            [([1, 2], {"source": Source.PROMPT}), ([3, 4], model)], logprobs=[-1.0, -2.0]
        )
        if turn == self.fork_at:
            sequence = replace(sequence, fork_cause=ForkCause.TEMPLATE_REWRITES_PAST)
        answered = ChatHistory(prompt=history).respond(Message(role="assistant", content="hm"))
        return (
            Sample(
                history=answered,
                sequence=sequence,
                stop_reason=self.stop_reason,
                update_mode=self.update_modes[turn],
            ),
        )


class Script:
    """An environment that answers with these outcomes, one a step; its last one ends."""

    def __init__(self, *outcomes: dict) -> None:
        self.outcomes = outcomes
        self.closed = []

    async def create_session(self, session_id, environment):
        return 60.0

    async def reset(self, session_id, *, episode, split, task_key, seed=0):
        return ResetResult(history=ChatHistory(prompt=as_history("q")), environment_version="7")

    async def step(self, session_id, *, episode, step_index, history):
        longer = history.require_full().append(Message(role="tool", content="r"))
        outcome = self.outcomes[min(step_index, len(self.outcomes) - 1)]
        return StepResult(**{"history": ChatHistory(prompt=longer)} | outcome)

    async def close_session(self, session_id):
        self.closed.append(session_id)
        return True


DONE = {
    "terminated": True,
    "done_reason": DoneReason.SUBMITTED,
    "rewards": (Reward(name="r", value=1.0),),
}


async def test_an_episode_is_one_history_one_sequence_and_its_turns():
    policy, script = Echo(), Script({"num_tool_calls": 1}, DONE)
    trajectory = await play(TASK, sessions=script, policy=policy)
    assert [m.role for m in trajectory.history] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    assert [(t.message_start, t.num_messages) for t in trajectory.turns] == [(1, 2), (3, 2)]
    (sequence,) = trajectory.sequences
    assert sequence.token_ids.tolist() == [1, 2, 3, 4] * 2
    assert policy.contexts == [(None, 0), (4, 2)]
    assert (trajectory.reward, trajectory.num_tool_calls) == (1.0, 1)
    assert (trajectory.terminated, trajectory.truncated) == (True, False)
    assert trajectory.done_reason is DoneReason.SUBMITTED
    assert trajectory.environment_version == "7"
    assert trajectory.is_scorable
    assert len(script.closed) == 1


async def test_a_fork_starts_another_sequence_and_owns_only_its_own_tokens():
    trajectory = await play(TASK, sessions=Script({}, DONE), policy=Echo(fork_at=1))
    assert [s.fork_cause for s in trajectory.sequences] == [
        ForkCause.NONE,
        ForkCause.TEMPLATE_REWRITES_PAST,
    ]
    assert trajectory.num_model_tokens == 4


async def test_an_episode_that_never_ends_is_truncated_at_max_turns():
    trajectory = await play(TASK, sessions=Script({}), policy=Echo(), max_turns=3)
    assert len(trajectory.turns) == 3
    assert trajectory.truncated
    assert trajectory.done_reason is DoneReason.MAX_TURNS
    assert trajectory.is_scorable


async def test_the_policys_mistake_does_not_hide_why_the_episode_ended():
    script = Script({"failures": (MISTAKE,)}, DONE)
    trajectory = await play(TASK, sessions=script, policy=Echo())
    assert trajectory.failures == (MISTAKE,)
    assert trajectory.done_reason is DoneReason.SUBMITTED
    assert trajectory.is_scorable


async def test_an_episode_whose_tool_broke_is_not_played_on():
    trajectory = await play(TASK, sessions=Script({"failures": (BROKEN,)}, DONE), policy=Echo())
    assert len(trajectory.turns) == 1
    assert trajectory.done_reason is DoneReason.ERROR
    assert not trajectory.is_scorable


@pytest.mark.parametrize(
    ("method", "owner"),
    [
        ("create_session", Owner.ENVIRONMENT),
        ("reset", Owner.ENVIRONMENT),
        ("step", Owner.ENVIRONMENT),
        ("generate", Owner.INFERENCE),
    ],
)
@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (NotFound("It is gone.", reason="SESSION_LOST"), "SESSION_LOST", "It is gone."),
        (ZeroDivisionError("secret"), "ZeroDivisionError", "ZeroDivisionError at test_rollout.py"),
    ],
)
async def test_whatever_fails_is_a_value_with_its_owner(method, owner, error, reason, message):
    async def fail(*_, **__):
        raise error

    policy, script = Echo(), Script({}, DONE)
    setattr(policy if method == "generate" else script, method, fail)
    trajectory = await play(TASK, sessions=script, policy=policy)
    (failure,) = trajectory.failures
    assert (failure.owner, failure.reason) == (owner, reason)
    assert failure.message.partition(", line ")[0] == message
    assert trajectory.done_reason is DoneReason.ERROR
    assert trajectory.truncated
    assert trajectory.reward == 0
    assert not trajectory.is_scorable


async def test_an_answer_without_full_is_the_inferences_failure():
    class Halfway(Echo):
        async def generate(self, history, **options):
            (sample,) = await super().generate(history, **options)
            return (replace(sample, history=ChatHistory(prompt=history)),)

    trajectory = await play(TASK, sessions=Script(DONE), policy=Halfway())
    assert [f.reason for f in trajectory.failures] == ["FULL_MISSING"]
    assert trajectory.sequences == ()


async def test_a_step_without_prompt_is_the_environments_failure():
    trajectory = await play(TASK, sessions=Script({"history": ChatHistory()}), policy=Echo())
    assert [(f.owner, f.reason) for f in trajectory.failures] == [
        (Owner.ENVIRONMENT, "PROMPT_MISSING")
    ]


async def test_cancelled_sampling_is_a_failure():
    policy = Echo(stop_reason=StopReason.CANCELLED)
    trajectory = await play(TASK, sessions=Script(DONE), policy=policy)
    assert [f.reason for f in trajectory.failures] == ["CANCELLED"]


@pytest.mark.parametrize("error", [Unavailable("gone"), OSError("gone")])
async def test_a_session_that_cannot_be_closed_spoils_nothing(error):
    async def fail(session_id):
        raise error

    script = Script(DONE)
    script.close_session = fail
    assert (await play(TASK, sessions=script, policy=Echo())).is_scorable


async def test_cancelling_closes_the_session():
    script, was_asked = Script(DONE), asyncio.Event()

    async def never(*_, **__):
        was_asked.set()
        await asyncio.Event().wait()

    policy = Echo()
    policy.generate = never
    playing = asyncio.create_task(play(TASK, sessions=script, policy=policy))
    await was_asked.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert len(script.closed) == 1


async def test_a_group_is_as_many_trajectories_as_the_task_says():
    group = await play_group(TASK, sessions=Script(DONE), policy=Echo(), group_id="t#1")
    assert group.num_trajectories == 3
    assert {t.group_id for t in group.trajectories} == {"t#1"}
    assert len({t.trajectory_id for t in group.trajectories}) == 3


async def test_members_of_a_seeded_group_have_different_seeds():
    policy = Echo()
    sampling = SamplingParams(seed=5)
    await play_group(TASK, sessions=Script(DONE), policy=policy, group_id="t#1", sampling=sampling)
    assert sorted(policy.seeds) == [5, 6, 7]
    assert sampling_of_member(SamplingParams(), 3).seed is None


async def test_an_environment_may_shorten_the_past():
    short = ChatHistory(prompt=History())
    trajectory = await play(TASK, sessions=Script({"history": short} | DONE), policy=Echo())
    assert trajectory.turns[0].num_messages == 0


def test_full_that_is_not_prompt_and_response_is_refused():
    prompt, response = as_history("q"), as_history("a")
    with pytest.raises(InvalidHistory) as caught:
        ChatHistory(prompt=prompt, response=response, full=prompt)
    assert caught.value.reason == "FULL_NOT_PROMPT_AND_RESPONSE"


@pytest.mark.parametrize(
    ("modes", "label"),
    [
        ((UpdateMode.RECOMPUTE, UpdateMode.RECOMPUTE), None),
        ((UpdateMode.RECOMPUTE, UpdateMode.WAIT), "WAIT"),
        ((UpdateMode.KEEP_KV, UpdateMode.WAIT), "KEEP_KV"),
    ],
)
async def test_a_trajectory_says_how_loads_treated_its_answers(modes, label):
    policy = Echo(update_modes=modes)
    trajectory = await play(TASK, sessions=Script({}, DONE), policy=policy)
    assert trajectory.labels.get("update_mode") == label


class PerToken(Transform):
    """A reward with `per_token` values for whatever was answered."""

    def __init__(self, per_token):
        self.per_token = per_token

    @property
    def traits(self):
        return Traits(reward_names=("dense",), reward_shape=RewardShape.DENSE)

    async def score(self, episode):
        return Score(rewards=(Reward.dense("dense", self.per_token),))


async def _play_dense(per_token):
    environment = ChatEnv(
        name="e", tasks=RowTasks([{"query": "q"}]), transforms=(MaxTurns(1), PerToken(per_token))
    )
    task = Task(task_id="t", environment="e", split="train", key="0")
    sessions = InMemoryEnvironment(environment)
    return await play(task, sessions=sessions, policy=ScriptedPolicy(["ab"]))


async def test_a_trajectory_keeps_a_reward_for_each_token():
    trajectory = await _play_dense((0.5, 1.0, -0.25))  # "a", "b" and the end of the turn
    assert trajectory.turns[0].rewards[0].per_token == (0.5, 1.0, -0.25)
    assert trajectory.reward == 1.25
    assert not trajectory.failures


async def test_a_dense_reward_that_does_not_fit_its_tokens_is_the_rewards_failure():
    trajectory = await _play_dense((0.5,))
    assert trajectory.turns[0].rewards == ()
    (failure,) = trajectory.failures
    assert (failure.owner, failure.reason) == (Owner.REWARD, "RAGGED")
    assert "1 values for 3 sampled tokens" in failure.message


def test_values_per_token_sum_to_the_value():
    with pytest.raises(InvalidInput, match=r"sum to 1\.5"):
        Reward(name="r", value=1.0, per_token=(0.5, 1.0))
