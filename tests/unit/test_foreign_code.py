"""Each kind of a user's code, with what may go wrong in it: whose failure it is, and who waits.

What is cancelled within, exits or hangs is the failure of the one that called it; the event loop
goes on meanwhile, and no session or process ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dialoop.agents import AgentConnection, AgentHost, play_agent
from dialoop.chat import Message
from dialoop.environments import (
    AddThinkingPrompt,
    AnswerTagReward,
    FunctionTool,
    KLReward,
    MaxTurns,
    NamedReward,
    Rewards,
    Tokens,
    ToolCalls,
    ToolUse,
    Transform,
)
from dialoop.environments.rewards.rubrics import (
    Gate,
    GroupRelative,
    InOrder,
    WeightedSum,
    each_trajectory,
)
from dialoop.environments.tools.tool_syntaxes import BlockCalls
from dialoop.errors import DialoopError, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.tasks.stored_tasks import RowTask
from dialoop.testing import trajectory
from dialoop.trajectory import Failure, Owner
from dialoop_extras.foreign.driver import ForeignEnvironment, ForeignReset, NumberedTasks
from dialoop_extras.games import Play
from dialoop_extras.importers.trl import TrlReward
from dialoop_extras.importers.verl import ComputeScore
from dialoop_services.config.own_data_plane import OwnDataPlane
from dialoop_services.scorer.estimator import Estimator
from dialoop_services.scorer.rewards import GroupReward, with_reward

from tests.support.samples.scorer_samples import make_group
from tests.unit.test_user_function_errors import (
    cancelled_within,
    cancels_itself,
    exits,
    returns_a_cancelled_one,
)
from tests.unit.test_user_functions import (
    BYTES,
    DONE,
    TASK,
    TASKS,
    Count,
    _sync,
    chat,
    double,
    one,
    step,
)

Function = Callable[..., Any]
LIMIT_S = 30.0  # but for what has to take too long
_RELEASE = threading.Event()


def blocks(*_: Any, **__: Any) -> Any:
    _RELEASE.wait(60)
    return 1.0


async def hangs(*_: Any, **__: Any) -> Any:
    await asyncio.sleep(60)


@pytest.fixture(autouse=True)
def release() -> Iterator[None]:
    _RELEASE.clear()
    yield
    _RELEASE.set()


async def _of_step(*transforms: Transform, text: str = "x") -> Failure:
    outcome = await step(chat(*transforms), text)
    assert not outcome.rewards
    return outcome.failures[0]


async def _of_score(*rewards: Any) -> Failure:
    score = await Rewards(rewards, timeout_s=LIMIT_S).score(DONE)
    assert not score.rewards
    return score.failures[0]


async def text_tool(function: Function) -> Failure:
    tools = ToolCalls({"own": function}, timeout_s=LIMIT_S)
    return await _of_step(tools, text="<request><own>hi<call>")


async def argument_tool(function: Function) -> Failure:
    tool = FunctionTool(lambda number: function(), name="own")
    tools = ToolUse([tool], syntax=BlockCalls(), timeout_s=LIMIT_S)
    return await _of_step(tools, text='<tool>own\n{"number": 2}</tool>')


async def own_tool(function: Function) -> Failure:
    definition = FunctionTool(double, name="own").definition
    tool = SimpleNamespace(definition=definition, run=function, timeout_s=LIMIT_S)
    tools = ToolUse([tool], syntax=BlockCalls())
    return await _of_step(tools, text='<tool>own\n{"number": 2}</tool>')


async def reward(function: Function) -> Failure:
    return await _of_score(function)


async def weighted_part(function: Function) -> Failure:
    rubric = WeightedSum({"one": (one, 1.0), "own": (function, 1.0)})
    return await _of_score(NamedReward(rubric, name="rubric"))


async def gate(function: Function) -> Failure:
    return await _of_score(NamedReward(Gate(function, one), name="rubric"))


async def gated_part(function: Function) -> Failure:
    return await _of_score(NamedReward(Gate(one, InOrder([one, function])), name="rubric"))


async def trl_reward(function: Function) -> Failure:
    own = TrlReward(function=lambda prompts, completions, timeout_s: function(), use="own")
    return await _of_score(_with_row(own, {"prompt": "hi", "timeout_s": 0}))


async def verl_reward(function: Function) -> Failure:
    own = ComputeScore(function=lambda **columns: function(), use="own")
    row = {"data_source": "d", "prompt": [], "reward_model": {"ground_truth": "3"}}
    return await _of_score(_with_row(own, row))


def _with_row(own: Any, row: dict[str, Any]) -> Any:
    task = RowTask(key="0", question="hi", row=row)
    return NamedReward(lambda episode: own(replace(episode, task=task)), name="own")


async def kl_models(function: Function) -> Failure:
    kl = KLReward(policy=function, reference=function, timeout_s=LIMIT_S)
    environment = chat(kl, input_mode="tokens", tokenizer=BYTES)
    opening = environment.reset(TASKS.get("train", "0"), 0)
    return (await environment.step(opening.episode, Tokens(response=(65, 66)))).failures[0]


async def equality(function: Function) -> Failure:
    tags = AnswerTagReward(equal=function, timeout_s=LIMIT_S)
    return await _of_step(MaxTurns(1), tags, text="<answer>3</answer>")


async def condition(function: Function) -> Failure:
    return await _of_step(MaxTurns(1), AddThinkingPrompt(function, timeout_s=LIMIT_S))


async def agent(function: Function) -> Failure:
    closed = trajectory(turns=(trajectory().turns[0],))
    ended: list[Any] = []

    async def close(recording_id: str, *, failures: Any = (), **_: Any) -> Any:
        ended.append(recording_id)
        return replace(closed, failures=tuple(failures))

    recordings = SimpleNamespace(
        create=lambda recording_id, **options: AgentConnection(base_url="http://here"), close=close
    )
    host = AgentHost(recordings=recordings, time_limit_s=LIMIT_S)  # type: ignore[arg-type]
    played = await play_agent(TASK, agent=function, host=host)
    assert len(ended) == 1
    return played.failures[0]


async def group_reward(function: Function) -> Failure:
    own = GroupReward(name="own", function=function, timeout_s=LIMIT_S)
    return await _raised(with_reward(make_group(0.0, 1.0), own))


async def group_part(function: Function) -> Failure:
    ranked = GroupRelative(each_trajectory(function))
    own = GroupReward(name="own", function=ranked, timeout_s=LIMIT_S)
    return await _raised(with_reward(make_group(0.0, 1.0), own))


async def estimator(function: Function) -> Failure:
    return await _raised(
        Estimator(path="own", function=function).estimate(make_group(0.0, 1.0), [0.0, 1.0])
    )


async def _raised(work: Awaitable[Any]) -> Failure:
    with pytest.raises(PreconditionFailed) as caught:
        await work
    return Failure(owner=Owner.REWARD, reason=caught.value.reason, message=str(caught.value))


class Own(Transform):
    def __init__(self, **methods: Function) -> None:
        for name, method in methods.items():
            setattr(self, name, method)


async def transform(function: Function) -> Failure:
    return await _of_step(Own(step=function))


async def scoring_transform(function: Function) -> Failure:
    return await _of_step(MaxTurns(1), Own(score=function))


async def game(function: Function) -> Failure:
    own = Count(_sync)
    own.play = function
    return await _of_step(Play(own), text="1")


async def driver(function: Function) -> Failure:
    own = SimpleNamespace(
        begin=lambda task, seed: ForeignReset(place=1, messages=()), move=function
    )
    environment = ForeignEnvironment(name="e", tasks=NumberedTasks(1), driver=own)  # type: ignore
    opening = await environment.open(environment.tasks.get("train", "0"), 0)
    said = opening.history.respond(Message(role="assistant", content="x"))
    return (await environment.step(opening.episode, said)).failures[0]


async def data_plane(function: Function) -> Failure:
    plane = OwnDataPlane(name="own", plane=SimpleNamespace(get=function))  # type: ignore[arg-type]
    with pytest.raises(DialoopError) as caught:
        await plane.get("there", Path("x"))
    return Failure(owner=Owner.INFERENCE, reason=caught.value.reason, message=str(caught.value))


LATE = {
    text_tool: (Owner.TOOL, Reason.TOOL_TIMEOUT),
    argument_tool: (Owner.TOOL, Reason.TOOL_TIMEOUT),
    own_tool: (Owner.TOOL, Reason.TOOL_TIMEOUT),
    reward: (Owner.REWARD, Reason.REWARD_TIMEOUT),
    weighted_part: (Owner.REWARD, Reason.REWARD_TIMEOUT),
    gate: (Owner.REWARD, Reason.REWARD_TIMEOUT),
    gated_part: (Owner.REWARD, Reason.REWARD_TIMEOUT),
    trl_reward: (Owner.REWARD, Reason.REWARD_TIMEOUT),
    verl_reward: (Owner.REWARD, Reason.REWARD_TIMEOUT),
    kl_models: (Owner.REWARD, Reason.TRANSFORM_FAILED),
    equality: (Owner.REWARD, Reason.TRANSFORM_FAILED),
    condition: (Owner.ENVIRONMENT, Reason.TRANSFORM_FAILED),
    agent: (Owner.AGENT, Reason.AGENT_TIMED_OUT),
    group_reward: (Owner.REWARD, Reason.REWARD_FAILED),
    group_part: (Owner.REWARD, Reason.REWARD_FAILED),
}
"""Those with a time limit of their own; a step's limits the others, and an estimator has 60 s."""
FAILED = LATE | {
    text_tool: (Owner.TOOL, Reason.TOOL_FAILED),
    argument_tool: (Owner.TOOL, Reason.TOOL_FAILED),
    own_tool: (Owner.TOOL, Reason.TOOL_FAILED),
    **dict.fromkeys(
        (reward, weighted_part, gate, gated_part, trl_reward, verl_reward),
        (Owner.REWARD, Reason.REWARD_FAILED),
    ),
    agent: (Owner.AGENT, Reason.AGENT_FAILED),
    estimator: (Owner.REWARD, Reason.ESTIMATOR_FAILED),
    transform: (Owner.ENVIRONMENT, Reason.TRANSFORM_FAILED),
    scoring_transform: (Owner.REWARD, Reason.TRANSFORM_FAILED),
    game: (Owner.ENVIRONMENT, Reason.TRANSFORM_FAILED),
    driver: (Owner.ENVIRONMENT, Reason.ENVIRONMENT_FAILED),
    data_plane: (Owner.INFERENCE, Reason.DATA_PLANE_FAILED),
}


@pytest.mark.parametrize("function", [cancelled_within, returns_a_cancelled_one, exits])
@pytest.mark.parametrize("kind", FAILED, ids=lambda kind: kind.__name__)
async def test_what_ends_itself_is_its_own_failure(kind: Any, function: Function) -> None:
    failure = await kind(function)
    assert (failure.owner, failure.reason) == FAILED[kind]


@pytest.mark.parametrize("kind", [k for k in LATE if k is not kl_models], ids=lambda k: k.__name__)
async def test_what_cancels_its_task_is_its_own_failure(kind: Any) -> None:
    failure = await kind(cancels_itself)
    assert (failure.owner, failure.reason) == FAILED[kind]


@pytest.mark.parametrize("function", [blocks, hangs])
@pytest.mark.parametrize("kind", LATE, ids=lambda kind: kind.__name__)
async def test_what_takes_too_long_is_cut_and_the_loop_goes_on(
    kind: Any, function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dialoop.environments.tools.tool_use._STOPS_ITSELF_IN_S", 0.1)
    monkeypatch.setitem(globals(), "LIMIT_S", 0.2)
    seen: list[str] = []
    asyncio.get_running_loop().call_later(LIMIT_S / 2, seen.append, "another session")
    work = asyncio.ensure_future(kind(function))
    work.add_done_callback(lambda _: seen.append("cut"))
    failure = await work
    assert (failure.owner, failure.reason) == LATE[kind]
    assert seen[0] == "another session"
