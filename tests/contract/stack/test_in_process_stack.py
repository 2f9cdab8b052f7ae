"""All services in one process: they play, score and train as those of processes do."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest
from dialoop.clients.trainer import Phase
from dialoop.environments import ArithmeticTasks, ExactResult, tool_environment
from dialoop.errors import InvalidConfig, NotFound, PreconditionFailed
from dialoop.sequences import Source
from dialoop.trajectory import Group, SamplingParams
from dialoop_extras.services.runs_client import RunsClient
from dialoop_ops.stack.in_process import blocking_in_process, in_process

TINY = {
    "run": "tiny",
    "inference": {"max_model_len": 128},
    "collector": {"group_size": 2, "max_new_tokens": 8},
    # An untrained model earns the same for all of a group, and that is no signal.
    "scorer": {"rewards": [{"name": "place", "use": f"{__name__}:differing"}]},
    "warm_start": {"num_steps": 2, "batch_size": 4},
    "train": {"num_steps": 1, "groups_per_train_step": 2, "pipeline_depth": 1},
}


def differing(group: Group) -> list[float]:
    """Rewards each member by its place in the group."""
    return [float(place) for place in range(group.num_trajectories)]


def shout(text: str) -> str:
    """Shouts."""
    return text.upper()


environment = tool_environment(
    name="loud", tasks=ArithmeticTasks(), tools=[shout], rewards=[ExactResult()]
)


async def test_a_group_is_played_scored_and_weights_are_published() -> None:
    async with in_process() as dialoop:
        sampling = SamplingParams(max_new_tokens=4)
        task = await dialoop.task("arithmetic", num_trajectories=2, sampling=sampling)
        group = await dialoop.play_group(task)
        assert [t.failures for t in group.trajectories] == [(), ()]
        published = await dialoop.trainer.publish()
        policy = await dialoop.inference.get_policy()
        assert policy.policy_version == published.policy_version
        scored = await dialoop.scorer.score(group)
        assert scored.group_id == group.group_id
        assert (await dialoop.replay.get_stats("mine")).store.endswith("(not durable)")
        with pytest.raises(NotFound) as caught:
            await dialoop.task("nope")
        assert caught.value.reason == "ENVIRONMENT_NOT_FOUND"


async def test_full_garbage_collections_leave_alone_what_stands_until_the_end() -> None:
    async with in_process():
        assert gc.get_freeze_count() > 100_000
    assert gc.get_freeze_count() == 0


async def test_runs_are_played_on_the_stacks_own_policy() -> None:
    config = {
        "inference": {"max_model_len": 256},
        "environments": [{"use": "twenty_questions", "options": {"max_turns": 2}}],
    }
    async with in_process(config) as dialoop:
        sampling = SamplingParams(max_new_tokens=4)
        runs = dialoop.client("environment", RunsClient)
        run = await runs.run_text(
            "calculator", ["What is 1+2?\n"], extra={"answers": ["3"]}, sampling=sampling
        )
        assert sum(run.masks[0]) == 4
        assert run.rewards == [0.0]
        task = {"solution": "key"}
        result = await runs.run_trial("twenty_questions", [task], sampling=sampling)
        assert result.rewards == [0.0]
        assert sum(result.completion_only_mask[0]) > 0
        sequence = run.histories[0].sequence()
        assert all(s.policy_version for s in sequence.segments if s.source is Source.MODEL)


async def test_training_runs_to_its_end_and_leaves_its_results(tmp_path: Path) -> None:
    async with in_process(TINY, folder=tmp_path) as dialoop:
        async with asyncio.timeout(90):
            while (status := await dialoop.trainer.get_status()).phase is not Phase.DONE:
                await asyncio.sleep(0.1)
    assert status.num_train_steps == 1
    assert (tmp_path / "tiny" / "trainer.json").is_file()
    assert (tmp_path / "tiny" / "checkpoints" / "latest.json").is_file()


async def test_a_job_trains_on_all_its_environments(tmp_path: Path) -> None:
    loud = {"use": f"{__name__}:environment", "name": "loud"}
    config = {
        **TINY,
        "environments": [loud],
        "train": {"num_steps": 2, "groups_per_train_step": 4, "pipeline_depth": 1},
    }
    async with in_process(config, folder=tmp_path) as dialoop:
        async with asyncio.timeout(90):
            while (await dialoop.trainer.get_status()).phase is not Phase.DONE:
                await asyncio.sleep(0.1)
    lines = (tmp_path / "tiny" / "trajectories.jsonl").read_text().splitlines()
    # What a train step leased: an untrained model earns the same for all of a group.
    assert {json.loads(line)["environment"] for line in lines} == {"arithmetic", "loud"}


def test_threads_without_an_event_loop_have_it_too() -> None:
    section = {"use": f"{__name__}:environment", "name": "loud"}
    with blocking_in_process({"environment": section}) as dialoop:
        sampling = SamplingParams(max_new_tokens=4)
        trajectory = dialoop.play(dialoop.task("loud", sampling=sampling))
        assert trajectory.environment == "loud"
        assert dialoop.trainer.get_status().num_parameters > 0
    with pytest.raises(PreconditionFailed):
        dialoop.trainer.get_status()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"engine": "vllm"}, "engine"),
        ({"store": "redis"}, "store"),
        ({"trian": {}}, "trian"),
        ({"model": {"directory": "/nowhere"}}, "no model directory"),
    ],
)
async def test_a_config_that_cannot_be_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        await in_process(config).__aenter__()


async def test_a_service_that_cannot_start_says_why(tmp_path: Path) -> None:
    config = {"environment": {"use": "no.such.module:environment"}}
    with pytest.raises(InvalidConfig, match=r"no\.such"):
        await in_process(config, folder=tmp_path).__aenter__()


async def test_what_the_caller_raises_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with in_process():
            raise ZeroDivisionError
