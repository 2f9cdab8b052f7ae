"""Rewards made of rewards, for one episode and for whole groups, and judges."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from dialoop import testing
from dialoop.chat import History, Message
from dialoop.environments.episode import Episode, TaskData
from dialoop.environments.rewards.rubrics import (
    Gate,
    GroupRelative,
    InOrder,
    Judge,
    WeightedSum,
    each_trajectory,
    last_episode,
)
from dialoop.errors import InvalidInput
from dialoop.trajectory import Group, Trajectory

from tests.support.connections import serving_connections


def _episode(text: str = "abc", truth: str = "7") -> Episode:
    message = Message(role="assistant", content=text)
    task = TaskData(key="k", question="What is 3+4?", answer=truth)
    return Episode(task=task, seed=0, history=History((message,)), answer=message)


def length(episode: Episode) -> float:
    return float(len(episode.answer_text))


async def slow_one(episode: Episode) -> float:
    await asyncio.sleep(0)
    return 1.0


async def test_a_weighted_sum_takes_sync_and_async_parts() -> None:
    rubric = WeightedSum({"length": (length, 0.5), "one": (slow_one, 2.0)})
    assert await rubric(_episode()) == pytest.approx(3.5)


async def test_a_closed_gate_does_not_ask_the_reward() -> None:
    def never(episode: Episode) -> float:
        raise AssertionError

    assert await Gate(lambda e: 0.0, never)(_episode()) == 0.0
    assert await Gate(lambda e: 1.0, length)(_episode()) == 3.0


async def test_stages_are_mastered_one_after_the_other() -> None:
    stages = InOrder([lambda e: 1.0, lambda e: 0.5, lambda e: 1.0])
    assert await stages(_episode()) == pytest.approx(0.5)
    assert await InOrder([slow_one, slow_one])(_episode()) == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_part_that_is_no_number_fails_the_whole(value: float) -> None:
    with pytest.raises(ValueError, match="part"):
        await WeightedSum({"bad": (lambda e: value, 1.0)})(_episode())


def _trajectory(text: str) -> Trajectory:
    history = History((Message(role="user", content="?"), Message(role="assistant", content=text)))
    return testing.trajectory(trajectory_id=text, history=history, sequences=())


def _group(*texts: str) -> Group:
    return testing.group(*map(_trajectory, texts))


async def test_group_relative_is_the_share_of_the_others_that_are_beaten() -> None:
    reward = GroupRelative(each_trajectory(length))
    assert await reward(_group("a", "bb", "bb", "ccc")) == pytest.approx([0, 0.5, 0.5, 1])
    with pytest.raises(InvalidInput):
        await reward(_group("a"))


def test_a_stored_trajectory_is_read_as_it_ended() -> None:
    episode = last_episode(_trajectory("said"))
    assert episode.answer_text == "said"
    assert episode.terminated


@asynccontextmanager
async def _endpoint(reply: str, status: int = 200) -> AsyncIterator[tuple[str, list[Any]]]:
    """A chat completions endpoint that always says the same."""
    requests: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(head.split("content-length:")[1].split("\r\n")[0])
        requests.append(json.loads(await reader.readexactly(size)))
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = json.dumps({"id": "1", "object": "chat.completion", "choices": [choice]}).encode()
        lines = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
        writer.write(f"{lines}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode())
        writer.write(body)
        await writer.drain()
        writer.close()

    async with serving_connections(serve) as address:
        yield f"http://{address}/v1", requests


async def test_a_judge_grades_through_any_openai_endpoint() -> None:
    pytest.importorskip("openai")
    async with _endpoint("8") as (url, requests):
        judge = Judge(base_url=url, model="m", criterion="Be brief.")
        assert await judge(_episode("It is 7.")) == pytest.approx(0.8)
    question = requests[0]["messages"][0]["content"]
    assert "What is 3+4?" in question
    assert "It is 7." in question
    assert "Be brief." in question


async def test_what_a_judge_reads_is_the_users_to_choose() -> None:
    pytest.importorskip("openai")

    async def messages(episode: Episode) -> list[dict[str, str]]:
        return [{"role": "system", "content": "Judge."}, {"role": "user", "content": "Rude?"}]

    async with _endpoint("8") as (url, requests):
        text = Judge(base_url=url, model="m", ask=lambda episode: f"Rude? {episode.answer_text}")
        chat = Judge(base_url=url, model="m", ask=messages, options={"max_tokens": 4})
        assert [await judge(_episode("It is 7.")) for judge in (text, chat)] == [0.8, 0.8]
    assert requests[0]["messages"] == [{"role": "user", "content": "Rude? It is 7."}]
    assert requests[0]["temperature"] == 0.0
    assert requests[1]["messages"] == await messages(_episode())
    assert requests[1]["max_tokens"] == 4
    assert "temperature" not in requests[1]


async def test_a_judge_that_fails_or_rambles_gives_no_reward() -> None:
    openai = pytest.importorskip("openai")
    async with _endpoint("x", status=500) as (url, _):
        with pytest.raises(openai.APIError):
            await Judge(base_url=url, model="m", num_retries=0)(_episode())
    judge = Judge(base_url="", model="m")
    for reply in ("great!", "11", "-1", "Score: 5 because 7", "6/5", "1/0"):
        with pytest.raises(ValueError, match="number"):
            judge.read(reply)
    shares = {" 5/10. ": 0.5, "4/5": 0.8, "8": 0.8, "3 / 4": 0.75, "7/100": 0.07}
    assert {reply: judge.read(reply) for reply in shares} == pytest.approx(shares)


def test_a_judge_does_not_show_its_key() -> None:
    assert "secret" not in repr(Judge(base_url="", model="m", api_key="secret"))
