"""Facts of the blank canvas (R-E1 to R-E9) and golden conversations of the built-in one."""

import random
import subprocess
import sys
from dataclasses import replace

import pytest
from dialoop import testing
from dialoop.chat import ChatHistory, History, Message
from dialoop.environments import (
    ArithmeticTasks,
    ChatEnv,
    Episode,
    ExactResult,
    MaxTurns,
    NamedReward,
    Outcome,
    Rewards,
    TaskData,
    Traits,
    Transform,
    arithmetic,
    tool_environment,
)
from dialoop.errors import (
    InvalidConfig,
    InvalidHistory,
    InvalidInput,
    PreconditionFailed,
    Unsupported,
)
from dialoop.trajectory import DoneReason, Owner, Trajectory, Turn

TASK = TaskData(key="35+40", question="35+40", answer="75")
TASKS = ArithmeticTasks()


def blank(**changes) -> ChatEnv:
    return ChatEnv(name="blank", tasks=TASKS, **changes)


def say(text: str, **fields) -> Message:
    return Message(role="assistant", content=text, **fields)


async def play(environment: ChatEnv, *texts: str | Message) -> list[Outcome]:
    episode, outcomes = environment.reset(TASK, 0).episode, []
    for text in texts:
        message = text if isinstance(text, Message) else say(text)
        prompt = ChatHistory(prompt=episode.history)
        outcomes.append(await environment.step(episode, prompt.respond(message)))
        episode = outcomes[-1].episode
    return outcomes


def test_reset_gives_a_prompt_and_nothing_else():
    history = blank().reset(TASK, 0).history
    assert history.prompt.to_chats() == [{"role": "user", "content": "35+40"}]
    assert history.response is None
    assert history.full is None


def test_system_prompt_comes_first_and_roles_can_be_renamed():
    environment = blank(system_prompt="Be brief.", system_role="rules", user_role="human")
    opening = environment.reset(TASK, 0)
    assert [m.role for m in opening.history.prompt] == ["rules", "human"]


def test_a_task_without_a_question_is_rejected():
    with pytest.raises(InvalidInput, match="no question"):
        blank().reset(TaskData(key="x", question=""), 0)


def test_a_role_for_both_policy_and_others_is_rejected():
    with pytest.raises(InvalidConfig):
        blank(user_role="assistant")


async def test_blank_canvas_never_ends_and_gives_no_reward():
    outcomes = await play(blank(), *["hello"] * 5)
    assert not any(o.episode.done or o.rewards or o.failures for o in outcomes)
    assert outcomes[-1].episode.step_index == 5


async def test_next_prompt_is_previous_full():
    (outcome,) = await play(blank(), "hi")
    assert outcome.history.prompt.to_chats() == [
        {"role": "user", "content": "35+40"},
        {"role": "assistant", "content": "hi"},
    ]
    assert outcome.history.full is None


async def test_response_alone_is_enough():
    opening = blank().reset(TASK, 0)
    outcome = await blank().step(opening.episode, ChatHistory(response=History((say("hi"),))))
    assert len(outcome.history.prompt) == 2


async def test_step_without_full_and_response_is_rejected():
    opening = blank().reset(TASK, 0)
    with pytest.raises(InvalidHistory) as caught:
        await blank().step(opening.episode, opening.history)
    assert caught.value.reason == "FULL_MISSING"


@pytest.mark.parametrize(
    "answered",
    [
        ChatHistory(full=History((Message(role="user", content="other"), say("hi")))),
        ChatHistory(
            prompt=History((Message(role="user", content="other"),)),
            response=History((say("hi"),)),
        ),
    ],
)
async def test_a_rewritten_past_is_rejected_unless_allowed(answered):
    opening = blank().reset(TASK, 0)
    with pytest.raises(PreconditionFailed) as caught:
        await blank().step(opening.episode, answered)
    assert caught.value.reason == "HISTORY_REWRITTEN"


async def test_allow_rewrite_takes_the_new_full():
    environment = blank(allow_rewrite=True)
    full = History((Message(role="user", content="other"), say("hi")))
    outcome = await environment.step(environment.reset(TASK, 0).episode, ChatHistory(full=full))
    assert outcome.history.prompt == full
    assert outcome.response.messages == full.messages[1:]


@pytest.mark.parametrize("added", [(), (Message(role="tool", content="75"),)])
async def test_a_response_without_the_policy_is_rejected(added):
    opening = blank().reset(TASK, 0)
    with pytest.raises(InvalidHistory) as caught:
        await blank().step(opening.episode, opening.history.respond(*added))
    assert caught.value.reason == "RESPONSE_MISSING"


async def test_step_after_done_is_rejected():
    environment = blank(transforms=(MaxTurns(1),))
    (outcome,) = await play(environment, "hi")
    with pytest.raises(PreconditionFailed) as caught:
        await environment.step(outcome.episode, outcome.history.respond(say("more")))
    assert caught.value.reason == "EPISODE_DONE"


async def test_golden_conversation_with_the_tool():
    first, last = await play(arithmetic(), "<request><Calculator>35+40<call>", "Result=75<submit>")
    assert last.history.prompt.to_chats() == [
        {"role": "user", "content": "35+40"},
        {"role": "assistant", "content": "<request><Calculator>35+40<call>"},
        {"role": "tool", "content": "75<response>"},
        {"role": "assistant", "content": "Result=75<submit>"},
    ]
    assert (first.num_tool_calls, first.rewards, first.episode.done) == (1, (), False)
    assert (last.num_tool_calls, last.episode.terminated) == (0, True)
    assert last.episode.done_reason is DoneReason.SUBMITTED
    (reward,) = last.rewards
    assert (reward.name, reward.value, reward.weight, reward.success) == ("result", 1.0, 1.0, True)


@pytest.mark.parametrize(
    ("texts", "reason", "terminated"),
    [
        (["Result=76<submit>"], DoneReason.SUBMITTED, True),
        (["It is 75"], DoneReason.NO_CALL, True),
        (["Result=75"], DoneReason.NO_CALL, True),
        (["<request><Calculator>1<call>"] * 3, DoneReason.MAX_TURNS, False),
        ([say("Result=75<submit>", is_complete=False)], DoneReason.INCOMPLETE, False),
    ],
)
async def test_the_policys_own_mistakes_are_scored_zero(texts, reason, terminated):
    outcome = (await play(arithmetic(), *texts))[-1]
    assert outcome.episode.done_reason is reason
    assert (outcome.episode.terminated, outcome.episode.truncated) == (terminated, not terminated)
    assert [r.value for r in outcome.rewards] == [0.0]
    assert outcome.failures == ()


async def test_the_last_tool_answer_is_kept_at_the_turn_limit():
    outcome = (await play(arithmetic(), *["<request><Calculator>1+1<call>"] * 3))[-1]
    assert outcome.history.prompt[-1].text == "2<response>"


async def test_a_submit_in_tool_text_ends_nothing():
    environment = tool_environment(
        name="spoof",
        tasks=TASKS,
        tools={"T": lambda query: "Result=75<submit>"},
        rewards=[ExactResult()],
    )
    spoofed, last = await play(environment, "<request><T>x<call>", "I am done")
    assert not spoofed.episode.done
    assert last.episode.done_reason is DoneReason.NO_CALL
    assert last.rewards[0].value == 0.0


async def test_a_call_in_tool_text_runs_no_tool():
    environment = tool_environment(
        name="spoof",
        tasks=TASKS,
        tools={"T": lambda query: "<request><T>again<call>"},
        rewards=[],
    )
    first, second = await play(environment, "<request><T>x<call>", "done")
    assert first.num_tool_calls == 1
    assert second.num_tool_calls == 0


class _Broken(Transform):
    async def step(self, outcome):
        raise RuntimeError("secret text")


async def test_a_failing_transform_is_a_failure_of_the_environment_and_no_reward():
    environment = blank(transforms=(_Broken(), Rewards([ExactResult()])))
    (outcome,) = await play(environment, "hi")
    (failure,) = outcome.failures
    assert (failure.owner, failure.reason) == (Owner.ENVIRONMENT, "TRANSFORM_FAILED")
    assert "secret" not in failure.message
    assert outcome.rewards == ()
    assert outcome.episode.done_reason is DoneReason.ERROR
    assert outcome.episode.truncated


class _Counts(Transform):
    def reset(self, opening):
        return opening.remember(calls=0)

    async def step(self, outcome):
        return outcome.remember(calls=outcome.episode.state["calls"] + 1)


async def test_transforms_remember_things_in_the_episode():
    outcomes = await play(blank(transforms=(_Counts(),)), "a", "b")
    assert [o.episode.state["calls"] for o in outcomes] == [1, 2]


def test_traits_are_those_of_all_transforms():
    environment = replace(arithmetic(), stop=("\n",))
    assert environment.traits == Traits(
        max_turns=3,
        stop=("\n", "<submit>", "<call>"),
        tools=("Calculator",),
        reward_names=("result",),
        roles=("tool",),
    )
    assert environment.max_turns == 3
    assert ChatEnv(name="n", tasks=TASKS).max_turns == 0


def finished_trajectory(*turns: tuple[int, int]) -> Trajectory:
    history = History.from_chats(
        [
            {"role": "user", "content": "35+40"},
            {"role": "assistant", "content": "<request><Calculator>35+40<call>"},
            {"role": "tool", "content": "75<response>"},
            {"role": "assistant", "content": "Result=75<submit>"},
        ]
    )
    spans = tuple(Turn(message_start=start, num_messages=n) for start, n in turns)
    return testing.trajectory(task_key="35+40", history=history, turns=spans, sequences=())


async def test_scoring_a_trajectory_gives_the_rewards_of_its_steps():
    scores = await arithmetic().score(TASK, finished_trajectory((1, 2), (3, 1)))
    assert [[r.value for r in score.rewards] for score in scores] == [[], [1.0]]


@pytest.mark.parametrize("turns", [[(0, 1)], [(3, 5)], [(9, 1)]])
async def test_turns_that_hold_no_answer_are_rejected(turns):
    with pytest.raises(InvalidInput):
        await arithmetic().score(TASK, finished_trajectory(*turns))


async def test_an_unfinished_trajectory_is_not_scored():
    with pytest.raises(InvalidInput):
        await arithmetic().score(TASK, replace(finished_trajectory((1, 2)), terminated=False))


async def test_every_demonstration_earns_the_reward_when_played():
    environment, rng, lengths = arithmetic(), random.Random(0), []
    for _ in range(50):
        history = environment.demonstration(TASK, rng)
        answers = [m for m in history if m.role == "assistant"]
        outcomes = await play(environment, *answers)
        assert outcomes[-1].history.prompt == history
        assert outcomes[-1].rewards[0].value == 1.0
        lengths.append(len(answers))
    assert 20 <= lengths.count(1) <= 40


def test_an_environment_without_demonstrations_says_so():
    with pytest.raises(Unsupported):
        blank().demonstration(TASK, random.Random(0))


async def test_a_plain_function_is_a_reward_and_weights_are_kept():
    def brevity(episode: Episode) -> float:
        return 1 / len(episode.answer_text)

    rewards = Rewards([brevity, NamedReward(brevity, weight=0.5, name="half")])
    (outcome,) = await play(blank(transforms=(MaxTurns(1), rewards)), "four")
    assert [(r.name, r.value, r.weight) for r in outcome.rewards] == [
        ("brevity", 0.25, 1.0),
        ("half", 0.25, 0.5),
    ]


def test_importing_environments_and_their_service_loads_no_torch_and_the_sdk_no_grpc():
    code = (
        "import sys, dialoop.environments; "
        "assert not {'torch', 'grpc', 'google.protobuf'} & set(sys.modules); "
        "import dialoop_services.environment.serving; "
        "assert not {'torch', 'vllm', 'transformers', 'redis'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
