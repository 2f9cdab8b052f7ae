"""The PythonInterpreter transform, in an environment."""

from __future__ import annotations

import asyncio
import gc
import tempfile

import pytest
from dialoop.chat import ChatHistory, Message
from dialoop.environments import ChatEnv, TaskData
from dialoop.environments.tasks.arithmetic_tasks import ArithmeticTasks
from dialoop.environments.tools.python_interpreter import PythonInterpreter
from dialoop.errors import InvalidConfig, Unavailable
from dialoop.sandbox import Sandbox
from dialoop.trajectory import DoneReason, Owner

from tests.support.waiting import PATIENCE_S

TASK = TaskData(key="1", question="Compute.")


def environment(**options) -> ChatEnv:
    sandbox = options.pop("sandbox", None) or Sandbox()
    transforms = (PythonInterpreter(sandbox=sandbox, **options),)
    return ChatEnv(name="python", tasks=ArithmeticTasks(), transforms=transforms)


async def step_once(env: ChatEnv, text: str, episode=None):
    episode = episode or env.reset(TASK, 0).episode
    answer = Message(role="assistant", content=text)
    return await env.step(episode, ChatHistory(prompt=episode.history).respond(answer))


def answers_of(outcome) -> list[tuple[str, str]]:
    messages = outcome.episode.history.messages
    last = max(i for i, m in enumerate(messages) if m.role == "assistant")
    return [(m.role, m.text) for m in messages[last + 1 :]]


async def test_each_block_is_answered_by_one_message():
    outcome = await step_once(environment(), "```python\nprint(2**2)\n```\n```py\n1/0```")
    (role, first), (_, second) = answers_of(outcome)
    assert (role, first) == ("tool", "Code block 1 executed successfully:\n4\n")
    assert second.startswith("Code block 2 failed:\nTraceback (most recent call last):\n")
    assert second.endswith("ZeroDivisionError: division by zero\n")
    assert outcome.num_tool_calls == 2
    assert outcome.failures == ()


async def test_no_block_is_no_message():
    assert answers_of(await step_once(environment(), "print(1)")) == []


async def test_the_seeds_example_reads_as_in_the_seed():
    text = (
        "Here is a block of code to be executed in python:\n```python\ndef square(x):\n"
        "    return x * x\nprint('testing the square function with input 2:', square(2))\n```\n"
    )
    (message,) = answers_of(await step_once(environment(), text))
    assert message[1] == (
        "Code block 1 executed successfully:\ntesting the square function with input 2: 4\n"
    )


async def test_the_tools_role_can_be_chosen():
    outcome = await step_once(environment(tool_role="user"), "```python\nprint(1)\n```")
    assert answers_of(outcome)[0][0] == "user"


async def test_blocks_beyond_the_limit_are_not_run():
    outcome = await step_once(environment(max_blocks=1), "```py\nprint(1)\n```\n" * 3)
    assert [text for _, text in answers_of(outcome)] == [
        "Code block 1 executed successfully:\n1\n",
        "Only the first 1 code blocks were run.",
    ]


async def test_without_persistence_nothing_is_remembered():
    outcome = await step_once(environment(), "```py\nx = 1\n```\n```py\nprint(x)\n```")
    assert "NameError" in answers_of(outcome)[1][1]


async def test_persistence_remembers_from_turn_to_turn():
    env = environment(persistent=True)
    outcome = await step_once(env, "```py\nx = 41\n```")
    outcome = await step_once(env, "```py\nprint(x + 1)\n```", outcome.episode)
    assert answers_of(outcome) == [("tool", "Code block 1 executed successfully:\n42\n")]


async def test_printed_markers_desynchronise_nothing():
    env = environment(persistent=True)
    episode = None
    for number in range(4):
        code = f"print('---END---'); print({number}); print('---END---')"
        outcome = await step_once(env, f"```python\n{code}\n```", episode)
        (message,) = answers_of(outcome)
        assert message[1].endswith(f"---END---\n{number}\n---END---\n")
        episode = outcome.episode


async def test_a_reset_and_a_close_touch_one_episode_only():
    env = environment(persistent=True)
    mine = await step_once(env, "```py\nx = 'mine'\n```")
    other = await step_once(env, "```py\nx = 'other'\n```")
    await env.close(other.episode)
    fresh = await step_once(env, "```py\nprint(x)\n```")
    mine = await step_once(env, "```py\nprint(x)\n```", mine.episode)
    assert "NameError" in answers_of(fresh)[0][1]
    assert answers_of(mine)[0][1].endswith("mine\n")


async def test_a_timeout_is_the_policys_and_says_that_the_state_is_lost():
    env = environment(persistent=True, timeout_s=2.0)
    outcome = await step_once(
        env, "```py\nx = 1\nprint('so far', flush=True)\nwhile True: pass\n```"
    )
    (message,) = answers_of(outcome)
    assert message[1].startswith("Code block 1 failed:\nTimed out after 2 s.\n")
    assert "everything defined before is lost" in message[1]
    assert outcome.failures == ()
    after = await step_once(env, "```py\nprint(7)\n```", outcome.episode)
    assert answers_of(after)[0][1].endswith("7\n")


async def test_long_running_code_does_not_hold_up_the_loop():
    env = environment(timeout_s=1.0)
    slow = asyncio.create_task(step_once(env, "```py\nwhile True: pass\n```"))
    gaps, loop = [], asyncio.get_running_loop()
    while not slow.done():
        before = loop.time()
        await asyncio.sleep(0.01)
        gaps.append(loop.time() - before)
    assert len(gaps) > 5
    assert sorted(gaps)[len(gaps) // 2] < 0.2


async def test_a_failing_sandbox_is_the_tools_failure_and_no_answer(monkeypatch):
    env = environment()

    async def fail(*_, **__):
        raise Unavailable("gone", reason="SANDBOX_FAILED")

    monkeypatch.setattr(Sandbox, "run", fail)
    outcome = await step_once(env, "```py\nprint(1)\n```")
    (failure,) = outcome.failures
    assert (failure.owner, failure.reason) == (Owner.TOOL, "SANDBOX_FAILED")
    assert outcome.episode.done_reason is DoneReason.ERROR
    assert answers_of(outcome) == []


def test_the_environment_says_how_it_is_kept_in():
    env = environment(persistent=True)
    assert env.traits.facts["sandbox"] == Sandbox().isolation.level
    assert "network" in env.traits.facts["sandbox_denies"]
    assert env.traits.needs_session
    assert "tool" in env.traits.roles


async def test_dropping_an_episode_ends_its_process():
    env = environment(persistent=True)
    outcome = await step_once(env, "```py\nimport os; print(os.getpid())\n```")
    worker = outcome.episode.state["python_interpreter"]._held.worker
    ended = worker._ended
    del outcome, worker
    gc.collect()
    await asyncio.wait_for(ended, PATIENCE_S)


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"max_blocks": 0}, {"tool_role": ""}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(InvalidConfig):
        PythonInterpreter(**options)


def test_a_timeout_leaves_no_file_behind(tmp_path, monkeypatch):
    env = environment(timeout_s=0.2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    asyncio.run(step_once(env, "```py\nwhile True: pass\n```"))
    assert list(tmp_path.iterdir()) == []
