"""Facts of rewards: answers are compared in one form, and a failure is never 0."""

import asyncio

import pytest
from dialoop.chat import History, Message
from dialoop.environments import Episode, ExactResult, NamedReward, Rewards, TaskData
from dialoop.environments.rewards.functions import normalise, truth_of
from dialoop.errors import InvalidConfig
from dialoop.trajectory import DoneReason, Owner, Reward


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "no number"])
async def test_a_reward_that_is_no_finite_number_is_a_failure(value):
    score = await Rewards([NamedReward(lambda episode: value, name="odd")]).score(
        finished_episode("x")
    )
    assert (score.rewards, len(score.failures)) == ((), 1)


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
        Reward(name="right", value=1.0, success=True),
        Reward(name="own", value=2.0, weight=0.5),
    )


async def test_rewards_wait_for_the_end_unless_told_otherwise():
    running = Episode(task=TaskData(key="k", question="q"), seed=0, history=History())
    reward = NamedReward(lambda e: 1.0, name="one")
    assert (await Rewards([reward]).score(running)).rewards == ()
    assert len((await Rewards([reward], every_turn=True).score(running)).rewards) == 1


def test_two_rewards_of_one_name_are_rejected():
    with pytest.raises(InvalidConfig):
        Rewards([ExactResult(), ExactResult()])
