"""Facts of rewards: answers are compared in one form, and a failure is never 0."""

import asyncio

import pytest
from dialoop.chat import History, Message
from dialoop.environments import Episode, ExactResult, NamedReward, Rewards, TaskData
from dialoop.environments.rewards.functions import normalise, truth_of
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.testing import trajectory
from dialoop.trajectory import DoneReason, Owner, Reward, Turn


def finished_episode(
    text: str, truth: str = "75", reason: DoneReason = DoneReason.SUBMITTED
) -> Episode:
    return Episode(
        task=TaskData(key="k", question="q", answer=truth),
        seed=0,
        history=History(),
        answer=Message(role="assistant", content=text),
        terminated=True,
        done_reason=reason,
    )


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (" 75 ", "75"),
        ("75.", "75"),
        ("75.00", "75"),
        ("70", "70"),
        ("1,200.50", "1200.5"),
        ("$5", "5"),
        ("50%", "50"),
        ("72 clips", "72 clips"),
        ("", ""),
    ],
)
def test_answers_are_normalised(text, form):
    assert normalise(text) == form


def test_the_truth_follows_the_marks():
    assert truth_of("3+4=7\n#### 1,007.0") == "1007"
    assert truth_of("75") == "75"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Result=75<submit>", 1.0),
        ("Result= 75.0 <submit>", 1.0),
        ("Result=1 no, Result=75<submit> and Result=3", 1.0),
        ("Result=76<submit>", 0.0),
        ("75<submit>", 0.0),
        ("Result=<submit>", 0.0),
        ("Result=72 clips<submit>", 0.0),
    ],
)
def test_exact_result_compares_the_submitted_result(text, value):
    assert ExactResult()(finished_episode(text)).value == value


@pytest.mark.parametrize(
    "reason", [DoneReason.NO_CALL, DoneReason.MAX_TURNS, DoneReason.INCOMPLETE]
)
def test_exact_result_is_zero_without_a_submit(reason):
    assert ExactResult()(finished_episode("Result=75<submit>", reason=reason)).value == 0.0


async def test_a_failing_reward_is_absent_and_owned_and_leaves_the_others():
    def broken(episode: Episode) -> float:
        raise RuntimeError("secret")

    score = await Rewards([broken, ExactResult()]).score(finished_episode("Result=75<submit>"))
    assert [r.name for r in score.rewards] == ["result"]
    (failure,) = score.failures
    assert (failure.owner, failure.reason) == (Owner.REWARD, "REWARD_FAILED")
    assert "secret" not in failure.message


async def test_a_task_without_an_answer_is_a_failure_and_not_zero():
    score = await Rewards([ExactResult()]).score(finished_episode("Result=75<submit>", truth=""))
    assert score.rewards == ()
    assert score.failures[0].owner is Owner.REWARD


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "REWARD_NOT_FINITE"),
        (float("inf"), "REWARD_NOT_FINITE"),
        (Reward(name="odd", value=float("nan"), weight=0.0), "REWARD_NOT_FINITE"),
        ("no number", "REWARD_FAILED"),
    ],
)
async def test_a_reward_that_is_no_finite_number_is_a_failure(value, reason):
    score = await Rewards([NamedReward(lambda episode: value, name="odd")]).score(
        finished_episode("x")
    )
    assert score.rewards == ()
    assert [(f.owner, f.reason) for f in score.failures] == [(Owner.REWARD, reason)]


async def test_a_hanging_reward_is_a_failure():
    async def slow(episode: Episode) -> float:
        await asyncio.sleep(5)
        return 1.0

    score = await Rewards([slow], timeout_s=0.02).score(finished_episode("x"))
    assert score.failures[0].reason == "REWARD_TIMEOUT"


async def test_none_is_no_reward_and_a_bool_is_a_success():
    score = await Rewards(
        [
            NamedReward(lambda e: None, name="none"),
            NamedReward(lambda e: True, name="right"),
            NamedReward(lambda e: Reward(name="own", value=2.0, weight=0.5), name="made"),
        ]
    ).score(finished_episode("x"))
    assert score.rewards == (
        Reward(name="none", value=0.0, absent=True),
        Reward(name="right", value=1.0, success=True),
        Reward(name="own", value=2.0, weight=0.5),
    )


@pytest.mark.parametrize(
    ("values", "is_unrewarded"),
    [
        ((None, None), True),
        ((None, 0.0), False),
        ((None, Reward(name="n", value=3.0, weight=0.0)), True),
    ],
)
async def test_a_trajectory_without_a_reward_that_counts_is_not_one_of_reward_0(
    values, is_unrewarded
):
    functions = [NamedReward(lambda e, v=v: v, name=f"f{i}") for i, v in enumerate(values)]
    score = await Rewards(functions).score(finished_episode("x"))
    turn = Turn(message_start=0, num_messages=2, rewards=score.rewards)
    played = trajectory(turns=(turn,))
    assert (played.reward, played.is_unrewarded) == (0.0, is_unrewarded)


def test_a_number_of_weight_0_is_recorded_as_it_is():
    assert [Reward(name="n", value=3.0, weight=w).recorded for w in (0.0, 0.5)] == [3.0, 1.5]
    with pytest.raises(InvalidInput):
        Reward(name="n", value=1.0, absent=True)


async def test_rewards_wait_for_the_end_unless_told_otherwise():
    running = Episode(task=TaskData(key="k", question="q"), seed=0, history=History())
    reward = NamedReward(lambda e: 1.0, name="one")
    assert (await Rewards([reward]).score(running)).rewards == ()
    assert len((await Rewards([reward], every_turn=True).score(running)).rewards) == 1


def test_two_rewards_of_one_name_are_rejected():
    with pytest.raises(InvalidConfig):
        Rewards([ExactResult(), ExactResult()])
