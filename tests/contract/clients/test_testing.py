from __future__ import annotations

from dataclasses import replace

import pytest
from dialoop.chat import History, Message
from dialoop.environments import arithmetic
from dialoop.errors import AlreadyExists, NotFound, PreconditionFailed
from dialoop.rollout import play, play_group
from dialoop.sequences import ForkCause, Source
from dialoop.testing import (
    InMemoryEnvironment,
    ScriptedPolicy,
    byte_builder,
    byte_tokenizer,
    group,
    trajectory,
)
from dialoop.trajectory import DoneReason, Owner, SamplingParams, StopReason, Task

ENVIRONMENT = arithmetic()
KEY = ENVIRONMENT.tasks.keys("train")[0]
ANSWER = ENVIRONMENT.tasks.get("train", KEY).answer
CALL = f"<request><Calculator>{KEY}<call>"
SUBMIT = f"Result={ANSWER}<submit>"
SAMPLING = SamplingParams(stop=("<call>", "<submit>"))
TASK = Task(
    task_id=f"t/{KEY}",
    environment="arithmetic",
    split="train",
    key=KEY,
    num_trajectories=3,
    sampling=SAMPLING,
)
PROMPT = History((Message(role="user", content="é 世界?"),))


async def test_an_episode_is_played_without_a_server():
    policy = ScriptedPolicy([CALL, SUBMIT + " and more"])
    trajectory = await play(TASK, sessions=InMemoryEnvironment(ENVIRONMENT), policy=policy)
    assert [m.role for m in trajectory.history] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.history[-1].text == SUBMIT
    assert (trajectory.reward, trajectory.num_tool_calls) == (1.0, 1)
    assert trajectory.done_reason is DoneReason.SUBMITTED
    (sequence,) = trajectory.sequences
    rendered = byte_builder().template.render(trajectory.history, add_generation_prompt=False)
    assert rendered.startswith(byte_tokenizer().decode(sequence.token_ids))
    assert sequence.num_model_tokens == len(CALL) + len(SUBMIT)
    assert len(sequence.inference_logprobs) == sequence.num_model_tokens


async def test_a_group_is_played_from_one_script():
    policy = ScriptedPolicy(lambda history: CALL if len(history) == 1 else SUBMIT)
    group = await play_group(
        TASK, sessions=InMemoryEnvironment(ENVIRONMENT), policy=policy, group_id="g#1"
    )
    assert [t.reward for t in group.trajectories] == [1.0, 1.0, 1.0]


async def test_a_script_that_ends_is_a_failure_of_inference_and_no_reward():
    trajectory = await play(
        TASK, sessions=InMemoryEnvironment(ENVIRONMENT), policy=ScriptedPolicy([CALL])
    )
    (failure,) = trajectory.failures
    assert (failure.owner, failure.reason) == (Owner.INFERENCE, "SCRIPT_ENDED")
    assert not trajectory.is_scorable


async def test_an_answer_without_a_stop_string_ends_with_the_end_of_turn_token():
    (sample,) = await ScriptedPolicy(["7"]).generate(PROMPT)
    ids = sample.sequence.token_ids.tolist()
    assert ids[-1] == byte_tokenizer().end_of_turn_ids[0]
    assert sample.history.require_full()[-1] == Message(role="assistant", content="7")


async def test_the_first_stop_string_in_the_text_ends_the_answer():
    (sample,) = await ScriptedPolicy([f"a{SUBMIT}{CALL}"]).generate(PROMPT, sampling=SAMPLING)
    assert (sample.stop_string, sample.stop_reason) == ("<submit>", StopReason.STOP)
    assert sample.history.require_full()[-1].text == f"a{SUBMIT}"


async def test_an_answer_that_is_too_long_is_cut_and_incomplete():
    sampling = SamplingParams(max_new_tokens=2)
    (sample,) = await ScriptedPolicy(["abc"]).generate(PROMPT, sampling=sampling)
    assert sample.stop_reason is StopReason.LENGTH
    assert sample.history.require_full()[-1] == Message(
        role="assistant", content="ab", is_complete=False
    )


async def test_several_samples_of_one_prompt():
    assert len(await ScriptedPolicy(["7"]).generate(PROMPT, num_samples=4)) == 4


async def test_a_changed_past_forks_the_sequence():
    policy = ScriptedPolicy(["7", "8"])
    (first,) = await policy.generate(PROMPT)
    changed = PROMPT.append(Message(role="assistant", content="70")).extend(PROMPT)
    (second,) = await policy.generate(
        changed, context=first.sequence, num_context_messages=2, turn=1
    )
    assert second.sequence.fork_cause is ForkCause.HISTORY_REWRITTEN
    assert {s.source for s in second.sequence.segments} >= {Source.PROMPT, Source.MODEL}


async def start() -> tuple[InMemoryEnvironment, History]:
    sessions = InMemoryEnvironment(ENVIRONMENT)
    await sessions.create_session("s", "arithmetic")
    opening = await sessions.reset("s", episode=1, split="train", task_key=KEY)
    return sessions, opening.history.respond(Message(role="assistant", content=CALL))


async def test_a_repeated_step_gets_the_first_answer():
    sessions, answered = await start()
    first = await sessions.step("s", episode=1, step_index=0, history=answered)
    again = await sessions.step("s", episode=1, step_index=0, history=answered)
    assert (first.replayed, again.replayed) == (False, True)
    assert again.history == first.history


@pytest.mark.parametrize(
    ("episode", "step_index", "reason"), [(2, 0, "STEP_GAP"), (1, 1, "STEP_GAP")]
)
async def test_a_step_out_of_order_is_refused(episode, step_index, reason):
    sessions, answered = await start()
    with pytest.raises(PreconditionFailed) as caught:
        await sessions.step("s", episode=episode, step_index=step_index, history=answered)
    assert caught.value.reason == reason


async def test_another_answer_for_the_same_step_is_refused():
    sessions, answered = await start()
    await sessions.step("s", episode=1, step_index=0, history=answered)
    other = answered.respond(Message(role="assistant", content=SUBMIT))
    with pytest.raises(PreconditionFailed) as caught:
        await sessions.step("s", episode=1, step_index=0, history=other)
    assert caught.value.reason == "STEP_CONFLICT"


async def test_a_session_that_is_not_there_is_lost():
    sessions, answered = await start()
    assert await sessions.close_session("s")
    assert not await sessions.close_session("s")
    with pytest.raises(NotFound) as caught:
        await sessions.step("s", episode=1, step_index=0, history=answered)
    assert caught.value.reason == "SESSION_LOST"
    with pytest.raises(NotFound):
        await sessions.create_session("s", "unknown")


async def test_a_session_id_belongs_to_one_environment():
    other = arithmetic(operations="-", num_heldout=10)
    sessions = InMemoryEnvironment(ENVIRONMENT, replace(other, name="minus"))
    await sessions.create_session("s", "arithmetic")
    with pytest.raises(AlreadyExists):
        await sessions.create_session("s", "minus")


async def test_tasks_come_in_pages():
    page = await InMemoryEnvironment(ENVIRONMENT).list_tasks(
        "arithmetic", split="train", page_size=2
    )
    assert page.tasks[0].key == KEY
    assert page.next_page_token


def test_a_trajectory_to_test_with_holds_together_and_takes_any_field():
    sample = trajectory(reward=0.5)
    assert (sample.reward, sample.num_model_tokens, sample.is_scorable) == (0.5, 2, True)
    assert sample.done_reason is DoneReason.SUBMITTED
    cut = trajectory(truncated=True, terminated=False, labels={"a": "b"})
    assert (cut.truncated, cut.terminated, cut.labels) == (True, False, {"a": "b"})
    with pytest.raises(TypeError, match="no_such_field"):
        trajectory(no_such_field=1)


def test_a_group_to_test_with_is_of_one_task():
    made = group(0.0, trajectory(reward=1.0, trajectory_id="own"), group_id="a#2", epoch=3)
    assert [t.reward for t in made.trajectories] == [0.0, 1.0]
    assert [t.trajectory_id for t in made.trajectories] == ["t0", "own"]
    assert {t.group_id for t in made.trajectories} == {made.group_id} == {"a#2"}
    assert (made.task.task_id, made.task.epoch, made.task.num_trajectories) == ("a", 3, 2)
    assert made.task.key == made.trajectories[1].task_key
