"""Several environments in a job config, from the file to each service's settings."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from dialoop.errors import InvalidConfig
from dialoop_ops.stack import preflight
from dialoop_ops.stack.layout import Layout, ports_of
from dialoop_ops.stack.run_dir import RunDir
from dialoop_services.collector.mixture import TaskStream
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.config.file import load_config, toml_of
from dialoop_services.config.job import JobConfig
from dialoop_services.environment.settings import EnvironmentSettings
from dialoop_services.runtime.settings import load
from dialoop_services.trainer.settings import TrainerSettings

TEXT = """
engine = "transformers"
store = "memory"
[environment]
weight = 2.0
[[environments]]
task_file = "words.jsonl"
heldout_fraction = 0.5
weight = 0.5
options = { max_turns = 2 }
[[environments]]
use = "twenty_questions"
text_environments = ["calculator", "mixed_setup:setup"]
"""


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    (tmp_path / "words.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 4)
    (tmp_path / "job.toml").write_text(TEXT)
    return load_config(tmp_path / "job.toml", environment={})


def layout(config: JobConfig, directory: Path) -> Layout:
    run_dir = RunDir(path=directory, run_id="r-1")
    return Layout(config=config, run_dir=run_dir, ports=ports_of(config, with_redis=False))


def test_every_environment_is_served_and_offered_by_its_weight(config, tmp_path, monkeypatch):
    made = layout(config, tmp_path)
    for service in ("environment", "collector"):
        for name, value in made.spec(service).environment.items():
            monkeypatch.setenv(name, value)
    served = load(EnvironmentSettings)
    assert [entry.use for entry in served.environments] == [
        "arithmetic",
        "jsonl",
        "twenty_questions",
    ]
    assert served.environments[1].options == {
        "path": str(tmp_path / "words.jsonl"),
        "heldout_fraction": 0.5,
        "max_turns": 2,
    }
    assert [entry.use for entry in served.text_environments] == [
        "calculator",
        "mixed_setup:setup",
    ]
    assert load(CollectorSettings).mixture.streams == (
        TaskStream(environment="arithmetic", weight=2.0),
        TaskStream(environment="jsonl", weight=0.5),
        TaskStream(environment="twenty_questions"),
    )


def test_the_first_environment_alone_is_evaluated_and_demonstrates(config, tmp_path):
    trainer = load(TrainerSettings, **layout(config, tmp_path).values_of("trainer"))
    assert trainer.environment.served_name == trainer.environment.kind == "arithmetic"


def test_each_environment_is_checked_before_anything_starts(config, tmp_path):
    with pytest.raises(InvalidConfig, match="No module named 'mixed_setup'"):
        preflight.check(config, folder=tmp_path)
    setup = "from dialoop_extras.text_environment.setups import calculator as setup\n"
    (tmp_path / "mixed_setup.py").write_text(setup)
    preflight.check(config, folder=tmp_path)
    (tmp_path / "words.jsonl").write_text("{")
    with pytest.raises(InvalidConfig, match="Line 1"):
        preflight.check(config)


def test_the_printed_config_is_read_back_as_it_was(config):
    assert JobConfig.model_validate(tomllib.loads(toml_of(config))) == config
    plain = JobConfig()
    assert JobConfig.model_validate(tomllib.loads(toml_of(plain))) == plain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[environments]]\nuse = 'arithmetic'\n", "two environments have the same name"),
        ("[[environments]]\nweight = 0\n", "weight is 0"),
        ("[[environments]]\nuze = 'x'\n", "'uze'"),
        ("environments = 3\n", "environments"),
    ],
)
def test_a_mistake_is_one_sentence(text, message, tmp_path):
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        load_config(tmp_path / "job.toml", environment={})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
