"""Turns of an episode in play over the wire: what comes back is what was played."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dialoop.clients.turns import TurnItem, turn_item_to_proto, turns_from_proto
from dialoop.environments.standard import arithmetic
from dialoop.episode import TurnLog
from dialoop.errors import InvalidInput
from dialoop.rollout import play
from dialoop.testing import InMemoryEnvironment, ScriptedPolicy
from dialoop.trajectory import Task

SCRIPT = ["<request><Calculator>3+4<call>", "Result=7<submit>"]


async def played_turns() -> TurnLog:
    environment = InMemoryEnvironment(arithmetic())
    (task,) = (await environment.list_tasks("arithmetic", split="train", page_size=1)).tasks
    log = TurnLog()
    await play(
        Task(task_id="a", environment="arithmetic", split="train", key=task.key, seed=task.seed),
        sessions=environment,
        policy=ScriptedPolicy(SCRIPT),
        log=log,
    )
    return log


def sent(log: TurnLog):
    befores = [None, *log.turns]
    return [
        turn_item_to_proto(TurnItem(lease_id="l", member=1, turn=turn, before=before)).turn
        for turn, before in zip(log.turns, befores, strict=False)
    ]


def bare(turn):
    answer = turn.answer and replace(turn.answer, info={})
    sample = replace(turn.sample, sequence=None)
    return replace(turn, sample=sample, answer=answer)


async def test_turns_come_back_as_they_were_played():
    log = await played_turns()
    protos = sent(log)
    again = turns_from_proto(protos)
    assert [bare(turn) for turn in again] == [bare(turn) for turn in log.turns]
    for one, other in zip(again, log.turns, strict=True):
        mine, theirs = one.sample.sequence, other.sample.sequence
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.inference_logprobs.tolist() == theirs.inference_logprobs.tolist()
        assert mine.policy_versions == theirs.policy_versions
    assert not protos[1].sampled.samples[0].history.HasField("prompt"), "only what it adds"
    assert protos[1].answer.HasField("added")


async def test_a_turn_without_the_one_before_it_is_refused():
    protos = sent(await played_turns())
    with pytest.raises(InvalidInput, match="has no turn or prompt before it"):
        turns_from_proto(protos[1:])
