"""TorchRL's ChatEnv, with transforms of theirs, as an environment of ours."""

from __future__ import annotations

import json
import sys
import threading

import pytest
from dialoop.environments import Given, RowTasks
from dialoop.errors import InvalidConfig
from dialoop.trajectory import DoneReason, Owner
from dialoop_extras.foreign.torchrl import torchrl_environment

from tests.goldens.gsm8k_samples import GOLDEN, by_torchrl, samples
from tests.support.environment_doors import at, open_session, play, reason_of, roles, texts

TASKS = RowTasks({"train": [{"question": "What is 3+4?", "answer": "7"}]})


def make_chat_env(**options):
    """Their ChatEnv with a reward of each turn, a hint, an end, and at most three steps."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchrl", reason="torchrl is no part of .venv: see infra/test_compat.sh")
    from torchrl.data.llm import History
    from torchrl.envs import Compose, StepCounter, Transform, TransformedEnv
    from torchrl.envs.llm import ChatEnv

    class Judge(Transform):
        def _step(self, tensordict, next_tensordict):
            last_text = tensordict["history"].full.content[0][-1]
            if last_text == "break":
                raise RuntimeError("secret text")
            is_right = tensordict["answer"][0] in last_text
            reward = float("nan") if last_text == "nan" else float(is_right)
            next_tensordict["reward"] = torch.tensor([[reward]])
            for name in ("done", "terminated"):
                next_tensordict[name] = torch.tensor([[is_right]])
            if not is_right:
                hint = History.from_chats([[{"role": "user", "content": "Again."}]])
                prompt = next_tensordict["history"].prompt.extend(hint, inplace=False, dim=-1)
                next_tensordict["history"].prompt = prompt
            return next_tensordict

    base = ChatEnv(system_prompt="Be brief.", **{"batch_size": (1,)} | options)
    return TransformedEnv(base, Compose(Judge(), StepCounter(max_steps=3)))


def environment(**options):
    made = {"make": make_chat_env, "tasks": TASKS} | options
    return torchrl_environment(name="theirs", **made)


@pytest.fixture(autouse=True)
def installation(request):
    if "package" not in request.node.name:
        pytest.importorskip("torchrl.envs.llm", reason="see infra/test_compat.sh")


@pytest.mark.parametrize("door", ["rest", "in_process"])
async def test_their_environment_is_played_with_its_rewards(door):
    async with at(door, environment()) as client:
        opening = await open_session(client, "theirs", task_key="0")
        assert roles(opening) == ["system", "user"]
        assert texts(opening) == ["Be brief.", "What is 3+4?"]
        wrong, right = await play(client, "8", "It is 7.")
        assert texts(wrong) == ["Be brief.", "What is 3+4?", "8", "Again."]
        assert [(r.name, r.value) for r in wrong.rewards] == [("torchrl", 0.0)]
        assert not wrong.done
        assert (right.terminated, right.rewards[0].value) == (True, 1.0)


async def test_their_step_limit_truncates():
    async with at("sdk", environment()) as client:
        await open_session(client, "theirs", task_key="0")
        *_, last = await play(client, "1", "2", "3")
        assert last.truncated
        assert not last.terminated
        assert last.done_reason is DoneReason.MAX_TURNS


async def test_episodes_have_environments_and_threads_of_their_own():
    before = threading.active_count()
    async with at("sdk", environment()) as client:
        for session in ("a", "b"):
            await open_session(client, "theirs", session, task_key="0")
        (a,) = await play(client, "1", session="a")
        (b,) = await play(client, "2", session="b")
        assert (texts(a)[2], texts(b)[2]) == ("1", "2")
        named = [t for t in threading.enumerate() if t.name.startswith("torchrl")]
        assert len(named) == 2
    for thread in named:
        thread.join(5)
    assert not any(thread.is_alive() for thread in named)
    assert before


async def test_what_of_theirs_fails_is_a_failure_without_its_text():
    async with at("sdk", environment()) as client:
        await open_session(client, "theirs", task_key="0")
        (outcome,) = await play(client, "break")
        (failure,) = outcome.failures
        assert failure.owner is Owner.ENVIRONMENT
        assert "secret" not in failure.message
        await client.reset("s", episode=2, task_key="0")
        (outcome,) = await play(client, "nan", episode=2)
        assert [f.reason for f in outcome.failures] == ["VALUE_NOT_FINITE"]


async def test_a_callers_question_is_played_too():
    async with at("sdk", environment()) as client:
        question = Given(query="What is 1+1?", data={"answer": "2"})
        assert texts(await open_session(client, "theirs", question=question))[1] == "What is 1+1?"
        (outcome,) = await play(client, "2")
        assert outcome.rewards[0].value == 1.0


async def test_a_batch_or_another_mode_is_refused():
    def batch():
        return make_chat_env(batch_size=(2,))

    async with at("sdk", environment(make=batch)) as client:
        await client.create_session("s", "theirs")
        assert await reason_of(client.reset("s", episode=1, task_key="0")) == "BATCH_SIZE"


def test_without_the_package_the_pip_line_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(InvalidConfig, match=r"dialoop-extras\[torchrl\]") as caught:
        environment()
    assert caught.value.reason == "PACKAGE_MISSING"


def test_the_recorded_rewards_of_gsm8k_are_what_torchrl_gives_today() -> None:
    pytest.importorskip("torchrl", reason="torchrl is no part of .venv: see infra/test_compat.sh")
    recorded = json.loads(GOLDEN.read_text("utf-8"))["rows"]
    assert [by_torchrl(*pair) for pair in samples()] == recorded
