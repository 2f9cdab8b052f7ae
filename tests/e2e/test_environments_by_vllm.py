"""Twenty questions, calculator, Python and MCP tools, played by vLLM through the collector.

Replay, environment and inference services are processes of one stack; each environment gets a
collector process of its own, in turn. The policy is taught the calls by a few demonstrations.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import torch
from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.replay import ReplayClient
from dialoop.sandbox import Level
from dialoop.sequences import Sequence, Source
from dialoop.templates.chat_template import ChatTemplate
from dialoop.tokens.builder import TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.trajectory import Stage, StopReason, Trajectory
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.model.policy import load_policy
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.training import update
from dialoop_ops.stack.layout import Layout
from dialoop_ops.stack.processes.log_stream import LogStream
from dialoop_ops.stack.processes.supervisor import Supervisor, supervise
from dialoop_ops.stack.run_dir import open_run
from dialoop_ops.stack.running import plan_stack
from dialoop_services.config.file import parse_config
from dialoop_services.inference.engine import BASE_VERSION
from rich.console import Console

from tests.support.played_environments import PLAYED, Played, demonstrations
from tests.support.stack_jobs import ROOT

if TYPE_CHECKING:
    from dialoop.trajectory import Group

ENGINE = "vllm"
NUM_TASKS, GROUP_SIZE, NUM_SFT_STEPS = 4, 2, 48
NUM_TRAJECTORIES = NUM_TASKS * GROUP_SIZE
CONFIG: dict[str, Any] = {
    "run": "environments",
    "engine": ENGINE,
    "store": "memory",
    "inference": {"max_model_len": 448, "max_num_seqs": 16},
    "collector": {"group_size": GROUP_SIZE, "max_new_tokens": 64},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The services that all collectors share."""

    layout: Layout
    supervisor: Supervisor
    replay: ReplayClient
    environment: EnvironmentClient

    async def collect(self, played: Played) -> tuple[tuple[Group, ...], dict[str, Any]]:
        """What a collector of one environment put into replay, and what it counted itself."""
        run = worker = played.name
        await self.replay.advance_policy(run, BASE_VERSION, max_outstanding_groups=NUM_TASKS)
        settings = {
            "ENVIRONMENT": played.name,
            "RUN": run,
            "WORKER": worker,
            "PAGE_SIZE": str(NUM_TASKS),
            "SHUFFLE_SEED": "0",
        }
        spec = self.layout.spec("collector")
        variables = {f"DIALOOP_COLLECTOR_{name}": value for name, value in settings.items()}
        name = f"collector-{played.name}"
        spec = replace(spec, name=name, environment={**spec.environment, **variables})
        await self.supervisor.start(spec)
        counted = self.layout.run_dir.path / f"collector-{worker}.json"
        async with asyncio.timeout(120):
            while _num_appended(counted) < NUM_TRAJECTORIES:
                await asyncio.sleep(0.2)
        await self.supervisor.stop(name)
        groups = await self.replay.peek(run, Stage.UNSCORED, max_groups=2 * NUM_TASKS)
        return groups, json.loads(counted.read_text())


def _num_appended(counted: Path) -> int:
    """What a collector says it has handed on; it says so once a second."""
    if not counted.exists():
        return 0
    return int(json.loads(counted.read_text())["training"]["num_trajectories_appended"])


@asynccontextmanager
async def stack(directory: Path, model: Path) -> AsyncIterator[Stack]:
    """Replay in memory, one service for all environments, and vLLM."""
    config = parse_config(CONFIG | {"model": {"directory": str(model)}}, source="the test")
    with open_run(directory, config, fresh=True) as run_dir:
        layout = plan_stack(config, run_dir)
        layout.write_job()
        environment = layout.spec("environment")
        entries = json.dumps([played.entry for played in PLAYED])
        environment = replace(
            environment,
            environment={
                **environment.environment,
                "DIALOOP_ENVIRONMENT_ENVIRONMENTS": entries,
                "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}:{ROOT / 'services'}",
            },
        )
        log = LogStream(Console(), run_dir.logs)
        async with supervise(log) as supervisor:
            async with asyncio.TaskGroup() as starting:
                for spec in (layout.spec("replay"), environment, layout.spec("inference")):
                    starting.create_task(supervisor.start(spec))
            async with (
                Channel(layout.address("replay")) as replay,
                Channel(layout.address("environment")) as played,
            ):
                yield Stack(
                    layout=layout,
                    supervisor=supervisor,
                    replay=ReplayClient(replay),
                    environment=EnvironmentClient(played),
                )


async def taught(directory: Path) -> Path:
    """A tiny model that has learned a few demonstrations of every environment by heart."""
    make_tiny_model(directory)
    tokenizer = Tokenizer.from_directory(directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    shown = [
        builder.demonstration(history, stop=stop)
        for played in PLAYED
        for history, stop in await demonstrations(played, NUM_TASKS)
    ]
    await asyncio.to_thread(_learn, directory, shown)
    return directory


def _learn(directory: Path, shown: list[Sequence]) -> None:
    # A model this small is slower on several threads, and far slower beside other work.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _learn_by_heart(directory, shown)
    finally:
        torch.set_num_threads(num_threads)


def _learn_by_heart(directory: Path, shown: list[Sequence]) -> None:
    policy = load_policy(directory)
    optimizer = GuardedOptimizer(
        policy.parameters(),
        OptimizerSettings(learning_rate=3e-3, warmup_steps=10, total_steps=NUM_SFT_STEPS),
    )
    rows = [TokenRow.from_demonstration(s.token_ids.tolist(), s.response_mask()) for s in shown]
    batch, sft = [pack_rows(rows)], load_objective("sft")
    losses = [update(policy, optimizer, batch, sft).loss for _ in range(NUM_SFT_STEPS)]
    assert losses[-1] < 0.1, losses
    policy.save(directory)


@pytest.mark.vllm
@pytest.mark.heavy(reason="a warm start, vLLM and four collectors take minutes")
@pytest.mark.timeout(500)
async def test_four_environments_are_played_by_vllm_through_the_collector(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: see `make setup`")
    model = await taught(tmp_path / "model")
    async with stack(tmp_path, model) as running:
        await _sandbox_is_reported(running)
        for played in PLAYED:
            groups, counted = await running.collect(played)
            trajectories = [t for group in groups for t in group.trajectories]
            await _all_are_accounted_for(running, played, trajectories, counted)
            for trajectory in trajectories:
                _every_token_has_its_origin(trajectory)
            if played.tool:
                _tools_ran(trajectories)
            else:
                _questions_were_answered(trajectories)


async def _sandbox_is_reported(running: Stack) -> None:
    level = (await running.environment.get_environment("python")).spec.facts["sandbox"]
    assert level in set(Level)
    url = f"http://{running.layout.rest_address('environment')}/readyz"
    async with httpx.AsyncClient(trust_env=False) as http:
        details = (await http.get(url)).json()["details"]
    assert details["environments/python"]["sandbox"] == level


async def _all_are_accounted_for(
    running: Stack, played: Played, trajectories: list[Trajectory], counted: dict[str, Any]
) -> None:
    """Ledger, queue and collector tell of the same trajectories, and nothing failed."""
    ledger = (await running.replay.get_stats(played.name)).training
    assert len({t.trajectory_id for t in trajectories}) == NUM_TRAJECTORIES
    assert ledger.num_trajectories_generated == ledger.num_trajectories_live == NUM_TRAJECTORIES
    assert ledger.num_trajectories_dropped == ledger.num_groups_dropped == {}
    own = counted["training"]
    assert own["num_trajectories"] == own["num_trajectories_appended"] == NUM_TRAJECTORIES
    assert own["num_tokens"] == sum(t.num_model_tokens for t in trajectories)
    assert own["num_tool_calls"] == sum(t.num_tool_calls for t in trajectories)
    assert counted["num_failures"] == counted["num_tasks_returned"] == {}
    assert all(t.failures == () and t.terminated | t.truncated for t in trajectories)


def _every_token_has_its_origin(trajectory: Trajectory) -> None:
    """Tokens, log-probs and versions of every turn; the segments tile each sequence."""
    assert trajectory.policy_versions == (BASE_VERSION,)
    for sequence in trajectory.sequences:
        assert [s.start for s in sequence.segments] == [0, *(s.end for s in sequence.segments)][:-1]
        assert sequence.segments[-1].end == len(sequence)
        assert len(sequence.inference_logprobs) == sequence.num_model_tokens > 0
        assert np.isfinite(sequence.inference_logprobs).all()
        assert (sequence.inference_logprobs <= 0).all()
    turns = {s.turn for q in trajectory.sequences for s in q.segments if s.source is Source.MODEL}
    assert turns == set(range(len(trajectory.turns)))
    assert all(turn.rewards or turn is not trajectory.turns[-1] for turn in trajectory.turns)


def _tools_ran(trajectories: list[Trajectory]) -> None:
    """What was learned by heart is mostly said again, and then the tool's answer is the truth."""
    right = [t for t in trajectories if t.reward == 1.0]
    assert len(right) >= NUM_TRAJECTORIES // 2, [t.history for t in trajectories]
    for trajectory in right:
        *_, tool_message, submitted = trajectory.history
        assert tool_message.role == "tool"
        assert trajectory.num_tool_calls == sum(m.role == "tool" for m in trajectory.history) > 0
        assert (
            tool_message.text.endswith("<response>") or "executed successfully" in tool_message.text
        )
        result = submitted.text.removeprefix("Result=").removesuffix("<submit>")
        assert tool_message.text.removesuffix("<response>").split()[-1] == result
        sources = {s.source for sequence in trajectory.sequences for s in sequence.segments}
        assert Source.TOOL in sources


def _questions_were_answered(trajectories: list[Trajectory]) -> None:
    """The policy asked, and the game answered in its own segments."""
    for trajectory in trajectories:
        assert all(turn.stop_reason is StopReason.STOP for turn in trajectory.turns)
        assert 3 <= len(trajectory.turns) <= 6
        answers = [m.text for m in trajectory.history[1:] if m.role == "user"]
        assert {"Yes", "No"} & set(answers)
        sources = {s.source for sequence in trajectory.sequences for s in sequence.segments}
        assert Source.ENVIRONMENT in sources
