"""Batches of a collection: each option's numbers, by hand."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialoop.chat import History
from dialoop.collection import collect
from dialoop.environments import ChatEnv, MaxTurns, RowTasks, arithmetic
from dialoop.environments.transform import Transform
from dialoop.errors import InvalidConfig, InvalidInput, NotFound, PreconditionFailed
from dialoop.local.client import LocalEnvironmentClient
from dialoop.reasons import Reason
from dialoop.sequences import Source
from dialoop.testing import ScriptedPolicy
from dialoop.testing import trajectory as sample_trajectory
from dialoop.trajectory import DoneReason, SamplingParams, Task, Trajectory

ROWS = [{"query": f"q{number}"} for number in range(40)]


def chat(num_turns: int, *transforms: Transform) -> ChatEnv:
    """An environment whose episodes all have so many turns."""
    return ChatEnv(name="chat", tasks=RowTasks(ROWS), transforms=(*transforms, MaxTurns(num_turns)))


def policy() -> ScriptedPolicy:
    return ScriptedPolicy([f"answer {turn}" for turn in range(9)])


def shape(batches: Any) -> list[list[int]]:
    """The turns of every trajectory of every batch."""
    return [[len(t.turns) for t in batch.trajectories] for batch in batches]


async def all_of(batches: Any) -> list[Any]:
    return [batch async for batch in batches]


class Watched(LocalEnvironmentClient):
    """Counts sessions: those that are open, and the most that were open at once."""

    def __init__(self, environment: ChatEnv) -> None:
        super().__init__(environment)
        self.most = 0

    async def create_session(self, session_id: str, environment: str, **options: Any) -> float:
        ttl_s = await super().create_session(session_id, environment, **options)
        self.most = max(self.most, self.num_open)
        return ttl_s

    @property
    def num_open(self) -> int:
        return len(self._sessions)


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        # Whole episodes of 3 turns: a second one begins after 3 of 5 turns.
        ({"turns_per_batch": 5, "total_turns": 11}, [[3, 3], [3, 3]]),
        ({"turns_per_batch": 5, "total_turns": 13}, [[3, 3], [3, 3], [3]]),
        # No number: one group a batch.
        ({"total_turns": 6}, [[3], [3]]),
        ({"total_turns": 6, "group_size": 2}, [[3, 3]]),
        ({"total_turns": 7, "group_size": 2}, [[3, 3], [3, 3]]),
        # Groups stay whole.
        ({"turns_per_batch": 4, "total_turns": 24, "group_size": 2}, [[3, 3], [3, 3]] * 2),
        # Two at a time: both count as one turn when they have begun.
        ({"turns_per_batch": 2, "total_turns": 12, "num_sessions": 2}, [[3, 3], [3, 3]]),
        # Exactly 2 turns: 2 | 1 + 1 | 2 | 2.
        (
            {"turns_per_batch": 2, "total_turns": 8, "completed_only": False},
            [[2], [1, 1], [2], [2]],
        ),
        ({"turns_per_batch": 4, "total_turns": 6, "completed_only": False}, [[3, 1], [2]]),
        # Two at a time advance together.
        (
            {
                "turns_per_batch": 4,
                "total_turns": 8,
                "completed_only": False,
                "num_sessions": 2,
            },
            [[2, 2], [1, 1, 1, 1]],
        ),
        # Fresh episodes each time: the third turn of each is never played.
        (
            {
                "turns_per_batch": 2,
                "total_turns": 6,
                "completed_only": False,
                "reset_each_batch": True,
            },
            [[2], [2], [2]],
        ),
        ({"turns_per_batch": 4, "total_turns": 8, "last_turn_only": True}, [[1, 1], [1]]),
        ({"total_turns": 6, "flatten": True}, [[1, 1, 1], [1, 1, 1]]),
        (
            {"turns_per_batch": 2, "total_turns": 4, "completed_only": False, "flatten": True},
            [[1, 1], [1, 1]],
        ),
    ],
)
async def test_batches_have_the_turns_that_their_options_say(
    options: dict[str, Any], shapes: list[list[int]]
) -> None:
    """Also one batch ahead. In a thread without an event loop `for` gives the same."""
    assert shape(await all_of(collect(chat(3), policy(), **options))) == shapes
    ahead = collect(chat(3), policy(), play_ahead=True, **options)
    assert shape(await all_of(ahead)) == shapes
    blocking = await asyncio.to_thread(lambda: list(collect(chat(3), policy(), **options)))
    assert shape(blocking) == shapes


async def test_for_and_async_for_agree_on_everything_but_ids_and_times() -> None:
    options: dict[str, Any] = {"turns_per_batch": 4, "total_turns": 12, "shuffle_seed": 3}

    def facts(batches: list[Any]) -> list[Any]:
        return [
            (t.task_key, t.history, t.sequences, t.done_reason, batch.num_turns)
            for batch in batches
            for t in batch.trajectories
        ]

    awaited = facts(await all_of(collect(chat(3), policy(), **options)))
    blocking = await asyncio.to_thread(lambda: list(collect(chat(3), policy(), **options)))
    assert awaited == facts(blocking)
    assert len({key for key, *_ in awaited}) == 4


async def test_groups_hold_one_task_with_tokens_log_probs_and_versions() -> None:
    (batch,) = await all_of(collect(chat(2), policy(), group_size=3, total_turns=6))
    (group,) = batch.groups
    assert group.group_id == group.task.task_id == f"chat/train/0/{group.task.key}"
    assert group.num_trajectories == group.task.num_trajectories == 3
    assert {t.task_key for t in group.trajectories} == {group.task.key}
    for trajectory in group.trajectories:
        (row,) = trajectory.sequences
        assert row.inference_logprobs.tolist() == [-0.5] * row.num_model_tokens
    assert [str(version) for version in batch.policy_versions] == ["scripted-0"]


async def test_parts_hold_each_sampled_token_and_each_turn_of_an_episode_once() -> None:
    (whole,) = (await all_of(collect(chat(3), policy(), total_turns=3)))[0].trajectories
    options: dict[str, Any] = {"turns_per_batch": 2, "total_turns": 3, "completed_only": False}
    first, second = (b.trajectories[0] for b in await all_of(collect(chat(3), policy(), **options)))
    assert first.trajectory_id == second.trajectory_id
    assert (first.done_reason, second.done_reason) == (DoneReason.NOT_DONE, DoneReason.MAX_TURNS)
    assert (first.terminated, first.truncated, second.truncated) == (False, False, True)
    assert second.history == whole.history
    assert first.history == whole.history[: len(first.history)]
    assert [turn.message_start for turn in (*first.turns, *second.turns)] == [
        turn.message_start for turn in whole.turns
    ]
    rows = [whole.sequences[0], first.sequences[0], second.sequences[0]]
    assert np.array_equal(rows[2].token_ids, rows[0].token_ids)
    sampled = [row.token_ids[row.response_mask()].tolist() for row in rows]
    assert sampled[0] == sampled[1] + sampled[2]
    turns = [[s.turn for s in row.segments if s.source is Source.MODEL] for row in rows]
    assert turns == [[0, 1, 2], [0, 1], [0]]


def parts_of(trajectory: Trajectory) -> list[Trajectory]:
    return [trajectory.part(turn, turn + 1) for turn in range(len(trajectory.turns))]


async def test_a_last_turn_has_the_rest_as_context() -> None:
    (whole,) = (await all_of(collect(chat(3), policy(), total_turns=3)))[0].trajectories
    batches = await all_of(collect(chat(3), policy(), total_turns=3, last_turn_only=True))
    (last,) = batches[0].trajectories
    assert last.history == whole.history
    assert last.done_reason is DoneReason.MAX_TURNS
    assert last.turns[0].message_start == whole.turns[2].message_start
    assert last.sequences == parts_of(whole)[2].sequences
    assert last.num_model_tokens == len("answer 2") + 1
    assert sum(part.num_model_tokens for part in parts_of(whole)) == whole.num_model_tokens


async def test_an_episode_that_a_full_batch_cuts_off_is_truncated() -> None:
    options: dict[str, Any] = {"turns_per_batch": 2, "total_turns": 4, "completed_only": False}
    for batch in await all_of(collect(chat(3), policy(), reset_each_batch=True, **options)):
        (trajectory,) = batch.trajectories
        assert (trajectory.truncated, trajectory.terminated) == (True, False)
        assert trajectory.done_reason is DoneReason.MAX_TURNS


@pytest.mark.parametrize("completed_only", [True, False])
async def test_no_more_sessions_are_open_than_there_may_be(completed_only: bool) -> None:
    client = Watched(chat(3))
    options: dict[str, Any] = {"turns_per_batch": 7, "total_turns": 28, "group_size": 4}
    await all_of(
        collect(client, policy(), num_sessions=2, completed_only=completed_only, **options)
    )
    assert (client.most, client.num_open) == (2, 0)


async def test_leaving_async_with_early_closes_every_session() -> None:
    client, options = Watched(chat(3)), {"turns_per_batch": 2, "completed_only": False}
    async with collect(client, policy(), play_ahead=True, **options) as batches:
        async for _ in batches:
            assert client.num_open
            break
    assert client.num_open == 0


async def test_a_break_closes_every_session_soon() -> None:
    client = Watched(chat(3))
    async for _ in collect(client, policy(), turns_per_batch=2, completed_only=False):
        assert client.num_open == 1
        break
    gc.collect()
    async with asyncio.timeout(5):
        while client.num_open:
            await asyncio.sleep(0.001)


def test_a_blocking_break_closes_every_session_at_once() -> None:
    client = Watched(chat(3))
    for _ in collect(client, policy(), turns_per_batch=2, completed_only=False):
        assert client.num_open == 1
        break
    assert client.num_open == 0


def test_an_error_in_the_loop_body_closes_every_session() -> None:
    client = Watched(chat(3))
    with contextlib.suppress(ZeroDivisionError):
        for _ in collect(client, policy(), turns_per_batch=2, completed_only=False):
            raise ZeroDivisionError
    assert client.num_open == 0


async def test_nothing_is_played_while_a_batch_is_handled_unless_ahead() -> None:
    for play_ahead, num_played in ((False, 3), (True, 6)):
        prompts: list[History] = []

        def answer(history: History, prompts: list[History] = prompts) -> str:
            prompts.append(history)
            return "hm"

        async with collect(chat(3), ScriptedPolicy(answer), play_ahead=play_ahead) as batches:
            async for _ in batches:
                async with asyncio.timeout(5):
                    while len(prompts) < num_played:
                        await asyncio.sleep(0.001)
                await asyncio.sleep(0.02)
                assert len(prompts) == num_played
                break


async def test_a_second_loop_goes_on_with_the_next_task_and_the_turns_left() -> None:
    collection = collect(chat(1), policy(), total_turns=3)
    async with collection as batches:
        async for batch in batches:
            first = batch.trajectories[0].task_key
            break
    rest = [batch.trajectories[0].task_key for batch in await all_of(collection)]
    assert len({first, *rest}) == 3
    assert (collection.num_turns, await all_of(collection)) == (3, [])


async def test_the_callers_tasks_are_played_in_their_order_and_end_the_collection() -> None:
    keys = [ref.key for ref in RowTasks(ROWS).page("train", page_size=3).tasks]
    tasks = [
        Task(task_id=f"t{key}", environment="chat", split="train", key=key, num_trajectories=2)
        for key in (keys[2], keys[0], keys[0])
    ]
    batches = await all_of(collect(chat(1), policy(), tasks=tasks, turns_per_batch=4))
    assert shape(batches) == [[1, 1, 1, 1], [1, 1]]
    groups = [group for batch in batches for group in batch.groups]
    assert [group.task for group in groups] == tasks
    assert [len(group.trajectories) for group in groups] == [2, 2, 2]


async def test_an_episode_that_never_begins_counts_as_a_turn_so_that_collecting_ends() -> None:
    missing = Task(task_id="t", environment="chat", split="train", key="nowhere")
    for completed_only in (True, False):
        batches = await all_of(
            collect(
                chat(1),
                policy(),
                tasks=iter([missing] * 9),
                turns_per_batch=2,
                total_turns=3,
                completed_only=completed_only,
            )
        )
        assert shape(batches) == [[0, 0], [0]]
        assert batches[0].trajectories[0].failures[0].reason == Reason.TASK_NOT_FOUND


async def test_an_error_of_the_authors_code_is_on_the_trajectory_with_its_line() -> None:
    class Broken(Transform):
        async def step(self, outcome: Any) -> Any:
            raise KeyError("secret")

    (batch, *_) = await all_of(collect(chat(1, Broken()), policy(), total_turns=1))
    (failure,) = batch.trajectories[0].failures
    assert "KeyError at test_collection.py" in failure.message
    assert "secret" not in failure.message


async def test_what_the_callers_tasks_raise_reaches_the_caller() -> None:
    def tasks() -> Any:
        yield Task(task_id="t", environment="chat", split="train", key="x")
        raise ZeroDivisionError

    client = Watched(chat(2))
    with pytest.raises(ZeroDivisionError):
        await all_of(collect(client, policy(), tasks=tasks(), turns_per_batch=9))
    assert client.num_open == 0


async def test_the_environments_stop_texts_are_used_where_there_are_no_others() -> None:
    for sampling, stop in (
        (None, arithmetic().traits.stop),
        (SamplingParams(max_new_tokens=5), arithmetic().traits.stop),
        (SamplingParams(stop=("x",)), ("x",)),
    ):
        answers = ScriptedPolicy(["Result=7<submit>"] * 3)
        batches = await all_of(collect(arithmetic(), answers, sampling=sampling, total_turns=1))
        assert batches[0].trajectories[0].sampling.stop == stop


@pytest.mark.parametrize(
    "options",
    [
        {"turns_per_batch": 0},
        {"total_turns": 0},
        {"total_turns": -2},
        {"num_sessions": 0},
        {"group_size": 0},
        {"max_turns": 0},
        {"completed_only": False},
        {"last_turn_only": True, "flatten": True},
        {"last_turn_only": True, "reset_each_batch": True},
        {"last_turn_only": True, "completed_only": False, "turns_per_batch": 2},
        {"tasks": [], "group_size": 2},
        {"tasks": [], "name": "chat"},
        {"tasks": [], "split": "train"},
        {"tasks": [], "shuffle_seed": 1},
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        collect(chat(1), policy(), **options)
    assert caught.value.reason == Reason.BAD_OPTIONS
    assert caught.value.remedy


@pytest.mark.parametrize(
    "wrong",
    [
        {"turns_per_batch": 2.5},
        {"turns_per_batch": "2"},
        {"turns_per_batch": True},
        {"total_turns": None},
        {"group_size": 1.5},
        {"num_sessions": None},
        {"max_turns": "64"},
        {"completed_only": "no"},
        {"flatten": 1},
        {"sampling": {"temperature": 1.0}},
        {"name": None},
        {"split": 3},
        {"shuffle_seed": 1.5},
        {"tasks": 5},
    ],
)
def test_a_value_of_another_type_is_refused_by_name(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(InvalidInput) as caught:
        collect(chat(1), policy(), **wrong)
    assert caught.value.reason == Reason.WRONG_TYPE
    assert str(caught.value).startswith(f"{name} is {value!r}.")


async def test_a_class_is_neither_environment_nor_policy_and_a_text_is_no_task() -> None:
    with pytest.raises(InvalidInput, match="environment is <class"):
        collect(ChatEnv, policy())  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="policy is <class"):
        collect(chat(1), ScriptedPolicy)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="A task is 'q1'"):
        await all_of(collect(chat(1), policy(), tasks=["q1"]))  # type: ignore[list-item]


async def test_wrong_parts_and_places_are_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="environment is 'chat'"):
        collect("chat", policy())  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="policy is None"):
        collect(chat(1), None)  # type: ignore[arg-type]
    with pytest.raises(PreconditionFailed) as caught:
        iter(collect(chat(1), policy()))
    assert "async for" in caught.value.remedy
    with pytest.raises(NotFound):
        await all_of(collect(chat(1), policy(), split="nowhere"))
    both = LocalEnvironmentClient(chat(1), arithmetic())
    with pytest.raises(InvalidInput, match="has 2 environments"):
        await all_of(collect(both, policy()))
    (batch,) = await all_of(collect(both, policy(), name="chat", total_turns=1))
    assert batch.trajectories[0].environment == "chat"


def test_a_part_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidInput, match="Turns 0 to 2 of a trajectory of 1 turns"):
        sample_trajectory().part(0, 2)


def test_the_snippet_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text("utf-8")
    (source,) = re.findall(r"<!-- test: collect -->\n```python\n(.*?)```", page, re.S)
    names: dict[str, Any] = {}
    exec(source, names)
    assert len(names["tokens"]) == len(names["rewards"]) == 4
    assert capsys.readouterr().out.count("8 (PolicyVersion") == 3
