"""Who plays, by the job config, reaches the collector: agents, and what plays by token ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from dialoop.agents import AgentConnection, AgentTask
from dialoop.errors import InvalidConfig
from dialoop_ops.stack import preflight
from dialoop_ops.stack.layout import Layout, ports_of
from dialoop_ops.stack.run_dir import RunDir
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.config.file import parse_config
from dialoop_services.environment.settings import EnvironmentSettings


async def run(task: AgentTask, connection: AgentConnection) -> float:
    """An agent that gives up at once."""
    return 0.0


def layout_of(tmp_path: Path, agent: str = "", **environment: str) -> Layout:
    config = parse_config(
        {
            "environment": {"agent": agent, **environment},
            "inference": {"num_replicas": 2},
            "engine": "transformers",
            "store": "memory",
        },
        source="test",
    )
    run_dir = RunDir(path=tmp_path, run_id="r-1")
    return Layout(config=config, run_dir=run_dir, ports=ports_of(config, with_redis=False))


def test_the_collector_is_told_who_plays_and_where(tmp_path, monkeypatch):
    layout = layout_of(tmp_path, f"{__name__}:run")
    preflight.check(layout.config)
    layout.write_job()
    variables = layout.process("collector").variables
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = CollectorSettings()
    assert settings.agents == {"arithmetic": f"{__name__}:run"}
    assert settings.inference_rest_addresses == [
        layout.rest_address("inference"),
        layout.rest_address("inference-1"),
    ]


def test_without_an_agent_nothing_is_told(tmp_path):
    settings = layout_of(tmp_path, "").values_of("collector")
    assert not CollectorSettings(**settings).agents
    assert "inference_rest_addresses" not in settings


def test_what_is_played_by_token_ids_brings_the_model_to_the_collector(tmp_path, monkeypatch):
    assert "model_dir" not in layout_of(tmp_path).values_of("collector")
    layout = layout_of(tmp_path, use="calculator", play="text")
    layout.write_job()
    for name, value in layout.process("collector").variables.items():
        monkeypatch.setenv(name, value)
    settings = CollectorSettings()
    assert settings.model_dir == layout.values_of("trainer")["model_dir"]
    assert [(s.play, s.use) for s in settings.sections] == [("text", "calculator")]
    own = layout_of(tmp_path, use="my_file:setup", play="text").config
    # The text environment that is trained on can be run with RunText too.
    assert EnvironmentSettings.of_job(own)["text_environments"] == ["calculator", "my_file:setup"]


def test_an_agent_that_is_not_there_is_found_out_before_anything_starts(tmp_path):
    with pytest.raises(InvalidConfig) as caught:
        preflight.check(layout_of(tmp_path, "nowhere:run").config)
    assert caught.value.reason == "AGENT_NOT_FOUND"
