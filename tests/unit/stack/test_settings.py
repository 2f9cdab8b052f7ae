"""A key of the job file is one field: the service that reads it has the very same."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dialoop.errors import InvalidConfig
from dialoop_learning.loss.facts import LOSSES
from dialoop_ops.stack.layout import SETTINGS, Layout, rest_name, without_keys
from dialoop_ops.stack.run_dir import RunDir
from dialoop_services.config.job import JobConfig
from dialoop_services.config.settings import JobSettings, field_at, is_table, overrides_of
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.runtime.settings import ServerSettings, load
from dialoop_services.trainer.settings import TrainerSettings

ROOT = Path(__file__).parents[3]
SERVICES = ("replay", "environment", "inference", "collector", "scorer", "trainer")
TABLES = {"inference": "inference", "collector": "collector", "scorer": "scorer"} | {
    "trainer": "train",
    "replay": "replay",
}
# Keys of a service's table that only the stack reads.
OF_THE_STACK = {"num_replicas", "reference_model", "num_nodes", "num_processes"}
# A run's id, which the stack makes of its name, is no name.
NO_KEY = {"run"}
# What is no key of a job: where a service is and whom it finds, and limits of the two services
# that no job sets. A new setting of another service is a key of its table.
PLACES = {
    "replay": "redis_url run_dir redis_timeout_s max_attempts max_deliveries max_dead_letters "
    "max_finished full_at lease_s vocab_size model_dir poll_s",
    "environment": "task_file heldout_file inference_address model_dir openenv ttl_s max_ttl_s "
    "capacity step_timeout_s abandon_s max_working_steps health_interval_s reap_interval_s "
    "max_concurrent_items",
    "inference": "model_dir weights_root awaits_policy replay_address name advertised_address "
    "device_lock",
    "collector": "run_dir worker replay_address environment_address inference_addresses "
    "inference_rest_addresses model_dir",
    "scorer": "worker replay_address model_dir",
    "trainer": "run_dir model_dir tiny_model_seed replay_address environment_address "
    "inference_addresses shared_memory_dir device_lock exit_when_done",
}


def layout(config: dict[str, Any]) -> Layout:
    names = (*SERVICES, *map(rest_name, SERVICES))
    return Layout(
        config=JobConfig.model_validate(config),
        run_dir=RunDir(path=Path("runs/r"), run_id="r"),
        ports=dict.fromkeys(names, 1),
        redis_url="redis://127.0.0.1:1/0",
        memory=Path("memory"),
    )


def own_fields(kind: type[JobSettings]) -> set[str]:
    return set(kind.model_fields) - set(ServerSettings.model_fields)


@pytest.mark.parametrize("service", SERVICES)
def test_a_setting_that_is_a_key_of_the_job_file_is_the_very_same_field(service: str) -> None:
    """A second check, default or meaning would be another field."""
    kind = SETTINGS[service]
    for name, path in kind.job_paths().items():
        if name in NO_KEY:
            continue
        field, key = kind.model_fields[name], field_at(path)
        assert (field.annotation, field.default) == (key.annotation, key.default), path
        assert repr(field.metadata) == repr(key.metadata), path


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_is_a_key_or_a_place(service: str) -> None:
    kind = SETTINGS[service]
    places = set(PLACES[service].split())
    assert own_fields(kind) - set(kind.job_paths()) - set(kind.derive(JobConfig())) <= places
    assert places <= own_fields(kind) - set(kind.job_paths())


@pytest.mark.parametrize("service", TABLES)
def test_every_key_of_a_table_is_a_setting_of_its_service(service: str) -> None:
    table = field_at(TABLES[service]).annotation
    assert isinstance(table, type)
    assert table.model_fields.keys() - SETTINGS[service].model_fields <= OF_THE_STACK  # type: ignore[attr-defined]


def test_every_table_is_some_services() -> None:
    read = {path for service in SERVICES for path in SETTINGS[service].job_paths().values()}
    tables = {name for name in JobConfig.model_fields if is_table(name)}
    unread = {name for name in tables if name not in read and name not in TABLES.values()}
    assert unread == {
        "gates",
        "launch",
        "ports",
        "resources",
    }  # the stack's own; the trainer derives a bound from one


@pytest.mark.parametrize("service", SERVICES)
def test_a_successor_is_a_variable_that_is_read(service: str) -> None:
    kind = SETTINGS[service]
    for old, new in kind.SUCCESSORS.items():
        assert old not in kind.model_fields
        name, *inner = new.split("__")
        table = kind.model_fields[name].annotation
        assert not inner or inner[0] in table.model_fields  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("WARM_START_STEPS", "WARM_START__NUM_STEPS"),
        ("LORA", "MODEL__LORA_RANK"),
        ("LORA__RANK", "MODEL__LORA_RANK"),
        ("LORA__PUBLISH", "MODEL__PUBLISH"),
        ("ENVIRONMENT_OPTIONS__PATH", "ENVIRONMENT__OPTIONS__PATH"),
    ],
)
def test_a_variable_of_an_earlier_version_is_refused_with_its_successor(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    monkeypatch.setenv(f"DIALOOP_TRAINER_{old}", "3")
    with pytest.raises(InvalidConfig, match=f"_TRAINER_{old} is now DIALOOP_TRAINER_{new}[.]"):
        load(TrainerSettings)


JOB = """
schema = 1
run = "mine"
seed = 5
[environment]
use = "twenty_questions"
agent = "mine:agent"
[inference]
dtype = "bfloat16"
max_model_len = 2048
[collector]
max_turns = 3
max_new_tokens = 9
[scorer]
rewards = [{ name = "brief", use = "mine:brief" }]
[train]
loss = "rloo"
num_steps = 4
[evaluation]
every = 7
stop_at = 0.5
[gates]
logprob_difference_at_most = 0.1
"""


def test_each_service_reads_the_job_file_and_variables_override_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    monkeypatch.setenv("DIALOOP_CONFIG", str(path))
    monkeypatch.setenv("DIALOOP_TRAINER_NUM_STEPS", "6")
    monkeypatch.setenv("DIALOOP_TRAINER_EVALUATION__NUM_TASKS", "2")
    settings: dict[str, Any] = {
        name: load(SETTINGS[name], **({"model_dir": "m"} if name == "inference" else {}))
        for name in SERVICES
    }
    trainer, collector = settings["trainer"], settings["collector"]
    assert (trainer.run, trainer.seed, trainer.loss, trainer.num_steps) == ("mine", 5, "rloo", 6)
    assert trainer.evaluation.model_dump() | {"num_tasks": 2, "every": 7, "stop_at": 0.5} == (
        trainer.evaluation.model_dump()
    )
    assert (trainer.max_new_tokens, trainer.max_logprob_difference) == (9, 0.1)
    assert trainer.packed_row_tokens == 2048
    assert (collector.max_turns, collector.shuffle_seed) == (3, 6)
    assert collector.agents == {"twenty_questions": "mine:agent"}
    assert (settings["inference"].engine_dtype, settings["inference"].max_new_tokens) == (
        "bfloat16",
        9,
    )
    assert settings["scorer"].rewards[0].weight == 1.0
    assert settings["scorer"].advantages.leave_one_out
    assert [entry.use for entry in settings["environment"].environments] == ["twenty_questions"]


@pytest.mark.parametrize("shared_folder", [True, False])
def test_a_replica_of_another_machine_has_the_jobs_text_where_it_does_not_see_the_file(
    shared_folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that nobody sees there would end the replica."""
    job = {"inference": {"max_num_seqs": 7}, "launch": {"shared_folder": shared_folder}}
    made = replace(layout(job), hosts={"inference": "10.0.0.6", "trainer": "10.0.0.5"})
    assert made.process("trainer").variables["DIALOOP_CONFIG"].endswith("runs/r/job.toml")
    replica = made.process("inference").variables
    assert replica["DIALOOP_CONFIG"].endswith("runs/r/job.toml") == shared_folder
    if not shared_folder:
        for name, value in replica.items():
            monkeypatch.setenv(name, value)
        assert load(InferenceSettings).max_num_seqs == 7


@pytest.mark.parametrize(
    ("text", "says"), [("[train\nloss = 1\n", "not valid TOML"), ("[train]\nlos = 1\n", "loss")]
)
def test_a_mistake_in_the_jobs_text_is_one_sentence(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIALOOP_CONFIG", text)
    with pytest.raises(InvalidConfig, match=f"DIALOOP_CONFIG .*{says}"):
        load(TrainerSettings)


def test_what_the_command_says_of_a_key_is_not_undone_by_a_variable_of_the_service() -> None:
    """--set comes before a variable, and the job file of the run has what it says."""
    variables = {
        "DIALOOP_TRAINER_LOSS": "rloo",
        "DIALOOP_TRAINER_EVALUATION__EVERY": "3",
        "DIALOOP_TRAINER_SEED": "9",
        "DIALOOP_REPLAY_LEASE_S": "30",
        "DIALOOP_TRAINER_LOS": "a mistake, which the trainer refuses",
        "PATH": "/bin",
    }
    environment = dict(variables)
    with without_keys(environment):
        kept = {"DIALOOP_REPLAY_LEASE_S", "DIALOOP_TRAINER_LOS", "PATH"}
        assert environment.keys() == kept
    assert environment == variables


def test_replicas_have_seeds_of_their_own() -> None:
    made = layout({"seed": 3, "inference": {"num_replicas": 3}})
    assert len({made.values_of(name)["seed"] for name in made.replicas}) == 3


def test_a_variable_of_a_service_says_keys_of_its_tables_but_not_of_the_whole_job() -> None:
    variables = {
        "DIALOOP_TRAINER_LOSS": "rloo",
        "DIALOOP_TRAINER_EVALUATION__EVERY": "3",
        "DIALOOP_TRAINER_MODEL": '{"lora_rank": 2}',
        "DIALOOP_TRAINER_SEED": "9",
        "DIALOOP_TRAINER_MAX_NEW_TOKENS": "9",
        "DIALOOP_TRAINER_RUN_DIR": "elsewhere",
        "DIALOOP_COLLECTOR_MAX_TURNS": "2",
    }
    overrides = overrides_of(variables, [SETTINGS["trainer"], SETTINGS["collector"]])
    assert {override.path: override.value for override in overrides} == {
        "train.loss": "rloo",
        "evaluation.every": "3",
        "model": {"lora_rank": 2},
        "collector.max_turns": "2",
    }


def test_a_loss_is_named_in_the_table_and_nowhere_else() -> None:
    """Losses are named in learning/loss/facts.py alone; `sft` is also a mode and a table."""
    names = set(LOSSES) - {"sft"}
    for folder in ("services/dialoop_services", "client/dialoop"):
        for path in (ROOT / folder).rglob("*.py"):
            # A preset chooses a loss, as a user's file does; the others have names of torchrl, TRL
            # and verl.
            if path.name in (
                "facts.py",
                "losses.py",
                "presets.py",
                "source_names.py",
                "from_trl.py",
                "from_verl.py",
            ):
                continue
            tree = ast.parse(path.read_text("utf-8"))
            literals = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)} & names
            assert not literals, f"{path.relative_to(ROOT)} names {literals}"
