"""Trials and text episodes by config: from the environment's tasks to the queue, and learned from.

The files of the docs (docs/agents.md) are what is played here.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from dialoop.agents import AgentHost
from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.replay import ReplayClient
from dialoop.clients.retry import RetryPolicy
from dialoop.clients.trainer import Phase
from dialoop.environments import load_environment
from dialoop.environments.modes import Text
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.errors import InvalidConfig, Unavailable
from dialoop.reasons import Reason
from dialoop.sequences import Source
from dialoop.trajectory import Group, Purpose, Stage, Task
from dialoop_extras.task_players import TokenPlayer, load_token_player
from dialoop_ops.conformance.environment.checks import check_environment
from dialoop_ops.stack.in_process import in_process
from dialoop_services.collector import __main__ as collector_main
from dialoop_services.collector.__main__ import task_players
from dialoop_services.collector.replicas import Replicas
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.config.file import parse_config
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings

from tests.support.collector_world import RUN, World, serving_replay
from tests.support.environment_doors import DOORS, at, open_session, play, reason_of
from tests.support.samples.scripted_tokens import BYTES, MAIN_7, ScriptedTokens, ids_of

PAGE = Path(__file__).parents[4] / "docs" / "agents.md"
COUNT = {"use": "numbers_game:count", "play": "trial"}
SAYINGS = {"use": "numbers_game:sayings", "play": "text"}


def block(label: str) -> str:
    """The block of the page that is marked with a label."""
    match = re.search(
        rf"<!-- test: {label} -->\n```python\n(.*?)```", PAGE.read_text("utf-8"), re.S
    )
    assert match is not None
    return match[1]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page, and a model directory that holds a tokenizer alone."""
    (tmp_path / "numbers_game.py").write_text(block("trials"))
    (tmp_path / "my_agent.py").write_text(block("trial_agent"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text(BYTES._trusting.to_str())
    config = {"eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("numbers_game", "my_agent"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


async def collect(
    section: dict[str, Any], policy: Any, folder: Path, *, purpose: Purpose = Purpose.TRAINING
) -> Group:
    """The first group of two that a collector with this config puts into the queue."""
    loaded = load_environment(section["use"])
    once = RetryPolicy(max_attempts=1)
    settings = EnvironmentSettings(port=0, drain_s=0)
    async with (
        serving_replay() as replay,
        serving(settings, Catalogue([loaded])) as environment,
        Channel(replay.address, retry=once) as to_replay,
        Channel(environment.address, retry=once) as to_environment,
    ):
        world = World(
            replay=ReplayClient(to_replay),
            environment=EnvironmentClient(to_environment),
            replay_address=replay.address,
            environment_address=environment.address,
        )
        fields = {"environment": {**section, "name": loaded.name}, "model_dir": folder / "model"}
        collecting = CollectorSettings(run=RUN, worker="w", **fields)
        retry_policy = RetryPolicy(max_attempts=3, first_wait_s=0.01, total_s=5.0)
        players = {loaded.name: load_token_player(collecting.environment, collecting)}
        replicas = Replicas([policy], retry_policy)
        is_training = purpose is Purpose.TRAINING
        stage = Stage.UNSCORED if is_training else Stage.EVALUATION
        await world.replay.advance_policy(RUN, MAIN_7, max_outstanding_groups=int(is_training))
        if not is_training:
            task = Task(
                task_id="heldout",
                environment=loaded.name,
                split="heldout",
                key="3",
                purpose=purpose,
                num_trajectories=2,
            )
            await world.replay.offer_tasks(RUN, [task])
        async with world.collecting(replicas, players=players, max_new_tokens=6, **fields):
            leases = await world.replay.lease_groups(
                RUN, stage, worker="w", max_groups=1, wait_s=20
            )
    (lease,) = leases.leases
    return lease.group


async def test_a_trial_by_config_reaches_the_queue_token_by_token(modules: Path) -> None:
    def script(prompt: str) -> str:
        return "12" if prompt.endswith("0, ") else "1b"

    trial = {"episodes_per_trial": 2, "free_shots": 1, "reward_split": "last"}
    section = {**COUNT, "trial": trial}
    group = await collect(section, ScriptedTokens(script), modules)
    assert group.num_trajectories == 2
    start = int(group.task.key)
    for trajectory in group.trajectories:
        assert trajectory.failures == ()
        (sequence,) = trajectory.sequences
        parts = [f"{start}, ", script(f"{start}, "), f"{start + 1}, ", script(f"{start + 1}, ")]
        assert sequence.token_ids.tolist() == ids_of("".join(parts))
        mask = [index % 2 for index, part in enumerate(parts) for _ in part]
        assert sequence.response_mask().astype(int).tolist() == mask
        shares = [sum(c.isdigit() for c in part) / 2 for part in parts[1::2]]
        assert [turn.reward for turn in trajectory.turns] == shares
        assert [turn.rewards[0].per_token for turn in trajectory.turns] == [
            (0.0, shares[0]),
            (0.0, shares[1]),
        ]
        assert trajectory.environment == "count"


async def test_a_text_episode_by_config_reaches_the_queue_token_by_token(modules: Path) -> None:
    call = "<request><double>21<call>"

    def script(prompt: str) -> str:
        return "is<submit>" if "<response>" in prompt else call

    group = await collect(SAYINGS, ScriptedTokens(script), modules)
    for trajectory in group.trajectories:
        assert trajectory.failures == ()
        (sequence,) = trajectory.sequences
        parts = [f"{group.task.key}, ", call, "42<response>", "is<submit>"]
        assert sequence.token_ids.tolist() == ids_of("".join(parts))
        mask = [index % 2 for index, part in enumerate(parts) for _ in part]
        assert sequence.response_mask().astype(int).tolist() == mask
        assert [s.source for s in sequence.segments][2] is Source.TOOL
        assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0]
        assert [[r.name for r in turn.rewards] for turn in trajectory.turns] == [
            [],
            ["share_of_digits"],
        ]


async def test_held_out_tasks_are_evaluated_in_the_same_way(modules: Path) -> None:
    policy = ScriptedTokens(lambda _: "7")
    group = await collect(SAYINGS, policy, modules, purpose=Purpose.EVALUATION)
    assert [t.reward for t in group.trajectories] == [1.0, 1.0]
    assert BYTES.decode(policy.prompts[0]) == "67, "  # the query of the held-out task "3"


async def test_an_agent_of_the_users_plays_and_a_replica_that_is_away_is_asked_again(
    modules: Path,
) -> None:
    class OnceAway(ScriptedTokens):
        async def generate(self, **question: Any) -> Any:
            if not self.prompts:
                self.prompts.append([])
                raise Unavailable("It restarts.", reason=Reason.SERVICE_AWAY)
            return await super().generate(**question)

    section = {**COUNT, "trial": {"agent": "my_agent:make_agent"}}
    group = await collect(section, OnceAway(lambda _: "5"), modules)
    start = int(group.task.key)
    for trajectory in group.trajectories:
        assert trajectory.failures == ()
        # The agent puts its note before the second prompt, so that is a row of its own.
        rows = [sequence.token_ids.tolist() for sequence in trajectory.sequences]
        assert rows == [ids_of(f"{start}, 5"), ids_of(f"5 {start + 1}, 5")]
        assert trajectory.reward == 2.0


def refusal(folder: Path | None = None, **section: Any) -> InvalidConfig:
    """Why a collector with this config does not start."""
    settings = CollectorSettings(environment=section, model_dir=folder and folder / "model")
    with pytest.raises(InvalidConfig) as caught:
        load_token_player(settings.environment, settings)
    return caught.value


def test_a_collector_that_cannot_play_them_says_why(modules: Path) -> None:
    without_model = refusal(**COUNT)
    assert without_model.reason == "TOKENIZER_MISSING"
    assert "DIALOOP_COLLECTOR_MODEL_DIR" in without_model.remedy
    assert refusal(modules, use="arithmetic", play="trial").reason == "NOT_A_GAME"
    assert refusal(modules, use="arithmetic", play="text").reason == "NOT_A_TEXT_ENVIRONMENT"
    assert refusal(modules, **SAYINGS | {"play": "trial"}).reason == "NOT_A_TEXT_ENVIRONMENT"
    agent = {"agent": "numbers_game:double"}
    assert refusal(modules, **COUNT, trial=agent).reason == "NOT_AN_AGENT"


def test_a_collector_finds_players_through_the_entry_points_and_says_where_there_are_none(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = AgentHost(recordings=AsyncMock())
    settings = CollectorSettings(
        environment={**COUNT, "name": "count"},
        environments=[{"use": "arithmetic"}],
        model_dir=modules / "model",
    )
    players = task_players(settings, host)
    assert players.keys() == {"count"}
    assert isinstance(players["count"], TokenPlayer)
    monkeypatch.setattr(collector_main, "offered_paths", lambda name: {})
    with pytest.raises(InvalidConfig, match='play is "trial"') as caught:
        task_players(settings, host)
    assert (caught.value.reason, caught.value.remedy) == (
        "PACKAGE_MISSING",
        "Run: pip install dialoop-extras",
    )


async def test_the_files_of_the_page_pass_the_checks_of_an_environment(modules: Path) -> None:
    for use in ("numbers_game:count", "numbers_game:sayings"):
        findings = await check_environment(load_environment(use), answers=["7"], num_tasks=1)
        assert [finding for finding in findings if not finding.is_ok] == []


@pytest.mark.parametrize("door", DOORS)
async def test_sessions_play_a_text_setup_through_every_door(door: str, modules: Path) -> None:
    call = Text(response="<request><double>4<call>")
    async with at(door, load_environment("numbers_game:sayings")) as client:
        opening = await open_session(client, "sayings", split="train", task_key="9")
        assert opening.text is not None
        assert opening.text.prompt == "9, "
        answered, ended = await play(client, call, Text(response="18"))
        assert answered.text.prompt == "9, <request><double>4<call>8<response>"
        assert answered.num_tool_calls == 1
        assert [(r.name, r.value) for r in ended.rewards] == [("share_of_digits", 1.0)]
        after = client.step("s", episode=1, step_index=2, history=call)
        assert await reason_of(after) == "EPISODE_DONE"


def configs() -> list[dict[str, Any]]:
    """The job files of the page."""
    return [
        tomllib.loads(t) for t in re.findall(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    ]


def test_the_configs_of_the_page_are_jobs() -> None:
    assert [parse_config(c, source="page").environment.play for c in configs()] == [
        "trial",
        "text",
    ]


@pytest.mark.heavy(reason="trains the tiny model for twelve steps, about a minute")
@pytest.mark.timeout(480)
async def test_a_trial_and_a_text_episode_are_learned_by_config(
    modules: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(modules)
    trial, text = configs()
    config = {
        **trial,
        "run": "both",
        "environments": [text["environment"]],
        "train": {**trial["train"], "num_steps": 12, "groups_per_train_step": 6},
        "evaluation": {"num_tasks": 8, "every": 0},
    }
    async with in_process(config, folder=tmp_path / "runs") as dialoop:
        async with asyncio.timeout(400):
            while (status := await dialoop.trainer.get_status()).phase is not Phase.DONE:
                assert status.phase is not Phase.FAILED, status.failure
                await asyncio.sleep(0.2)
    run_dir = tmp_path / "runs" / "both"
    records = json.loads((run_dir / "trainer.json").read_text("utf-8"))
    assert records["max_logprob_difference"] < 1e-4
    assert records["evaluations"]["after_greedy"]["mean_reward"] > 1.5  # of 2, on held-out tasks
    lines = (run_dir / "trajectories.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["outcome"] == "trained"]
    for environment, most in (("count", 2.0), ("sayings", 1.0)):
        rewards = [row["reward"] for row in rows if row["environment"] == environment]
        first, last = statistics.mean(rewards[:16]), statistics.mean(rewards[-16:])
        assert first < 0.3 * most
        assert last > 0.8 * most
