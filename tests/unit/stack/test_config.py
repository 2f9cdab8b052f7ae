from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from dialoop.errors import InvalidConfig
from dialoop_ops.stack import preflight
from dialoop_ops.stack.layout import Layout, ports_of
from dialoop_ops.stack.run_dir import RunDir
from dialoop_services.config.advice import warnings_for_formats, warnings_for_rewards
from dialoop_services.config.file import (
    Override,
    load_config,
    load_with_origins,
    override_in,
    parse_config,
    toml_of,
)
from dialoop_services.config.job import JobConfig
from dialoop_services.config.values import table_of
from dialoop_services.runtime.settings import load
from dialoop_services.trainer.settings import TrainerSettings
from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings

ROOT = Path(__file__).parents[3]


def write_config(directory: Path, text: str) -> Path:
    path = directory / "job.toml"
    path.write_text(text)
    return path


def mistake_in(directory: Path, text: str) -> str:
    with pytest.raises(InvalidConfig) as caught:
        load_config(write_config(directory, text), environment={})
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_unknown_key_is_named_with_the_nearest_and_the_known_ones(tmp_path: Path) -> None:
    message = mistake_in(tmp_path, "[train]\nnum_step = 3\n")
    assert "job.toml has an unknown key 'num_step' in [train]; did you mean 'num_steps'?" in message
    assert "groups_per_train_step" in message


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ("dp_shard = 3", "does not fit 8 trainer processes"),
        ("cp = 3", "the mesh of dp_replicate 1, dp_shard auto and cp 3 does not fit 8"),
        ("tp = 2", "tp is not built"),
        ("ep = 2", "1,000 billion in 61 layers 66 GB"),
        ("pp = 2", "leave pp out of \\[train.mesh\\]"),
        ("dp_shards = 2", "did you mean 'dp_shard'"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(tmp_path: Path, mesh: str, says: str) -> None:
    text = f"[train]\nnum_nodes = 2\nnum_processes = 4\n[train.mesh]\n{mesh}\n"
    with pytest.raises(InvalidConfig, match=says):
        load_config(write_config(tmp_path, text), environment={})


def test_a_mesh_takes_what_the_other_dimensions_leave() -> None:
    train = {"num_nodes": 2, "num_processes": 4, "mesh": {"dp_replicate": 2, "cp": 2}}
    config = JobConfig.model_validate({"train": train}).train
    assert (config.mesh.sizes(config.num_ranks), config.num_shards) == ((2, 2, 2), 4)


def test_an_unknown_section_is_named(tmp_path: Path) -> None:
    message = mistake_in(tmp_path, "[trainer]\nnum_steps = 3\n")
    assert "unknown key 'trainer'; did you mean 'train'?" in message


def test_a_bad_value_is_named_with_its_key(tmp_path: Path) -> None:
    message = mistake_in(tmp_path, "[train]\nnum_steps = -1\n")
    assert "train.num_steps is -1: input should be greater than or equal to 0." in message


def test_settings_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    message = mistake_in(tmp_path, "[train]\npipeline_depth = 3\nmax_staleness = 2\n")
    assert "max_staleness is 2, below pipeline_depth 3" in message


def test_groups_of_one_are_refused_where_their_advantages_are_to_be_trained(
    tmp_path: Path,
) -> None:
    alone = "[collector]\ngroup_size = 1\n"
    assert "set it to 2 or more in [collector]" in mistake_in(tmp_path, alone)
    for trains_none in ("num_steps = 0", 'mode = "sft"'):
        load_config(write_config(tmp_path, f"{alone}[train]\n{trains_none}\n"), environment={})


def test_a_loss_that_imitates_needs_a_choice_of_what(tmp_path: Path) -> None:
    imitates = '[train]\nloss = "sft"\n'
    assert "set top_k in [scorer]" in mistake_in(tmp_path, imitates)
    for fits in ('mode = "sft"', "[scorer]\ntop_k = 1"):
        load_config(write_config(tmp_path, f"{imitates}{fits}\n"), environment={})


def test_the_trainers_rows_hold_what_the_engine_can_sample(tmp_path: Path) -> None:
    def row_tokens_of(text: str) -> object:
        config = load_config(write_config(tmp_path, text), environment={})
        ports = ports_of(config, with_redis=False)
        layout = Layout(config=config, run_dir=RunDir(path=tmp_path, run_id="r"), ports=ports)
        return load(TrainerSettings, **layout.values_of("trainer")).packed_row_tokens

    long = "[inference]\nmax_model_len = 4096\n"
    assert (row_tokens_of(""), row_tokens_of(long)) == (1024, 4096)
    assert row_tokens_of(f"{long}[train]\nmax_row_tokens = 8192\n") == 8192
    message = mistake_in(tmp_path, f"{long}[train]\nmax_row_tokens = 2048\n")
    assert "max_row_tokens is 2048, below max_model_len 4096" in message


HALF = {"dtype": "bfloat16"}
NARROW = {"gates": {"logprob_difference_at_most": 1e-4}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, []),
        (HALF, ["rounds away updates"]),
        (NARROW | HALF, ["rounds away updates", "logprob_difference_at_most = 0.0001"]),
        (NARROW | {"inference": HALF}, ["logprob_difference_at_most = 0.0001"]),
        ({"inference": HALF, "train": {"autocast": "bfloat16"}}, []),
        (HALF | {"train": {"num_steps": 0}}, []),
    ],
)
def test_formats_that_round_away_what_is_learned_are_warned_of(
    config: dict[str, object], words: list[str]
) -> None:
    warnings = warnings_for_formats(JobConfig.model_validate(config))
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        ({}, 1e-4),
        (HALF, 0.5),
        ({"inference": HALF}, 0.5),
        ({"train": {"autocast": "bfloat16"}}, 0.5),
        (HALF | {"gates": {"logprob_difference_at_most": 0.2}}, 0.2),
    ],
)
def test_the_bound_of_differences_is_that_of_the_number_formats(
    config: dict[str, object], bound: float
) -> None:
    job = JobConfig.model_validate(config)
    assert job.logprob_bound == bound
    assert TrainerSettings.of_job(job)["max_logprob_difference"] == bound


def test_the_engine_may_have_a_format_of_its_own(tmp_path: Path) -> None:
    def dtypes_of(config: dict[str, object]) -> list[object]:
        job = JobConfig.model_validate(config)
        ports = ports_of(job, with_redis=False)
        layout = Layout(config=job, run_dir=RunDir(path=tmp_path, run_id="r"), ports=ports)
        return [layout.values_of(name)["dtype"] for name in ("trainer", "inference")]

    assert dtypes_of({}) == ["float32", "float32"]
    assert dtypes_of(HALF) == ["bfloat16", "bfloat16"]
    assert dtypes_of({"inference": HALF}) == ["float32", "bfloat16"]


@pytest.mark.parametrize(
    ("train", "asker"),
    [
        ({"loss": "distill"}, "loss distill needs"),
        ({"objective": {"kl_coeff": 0.1}}, "kl_coeff 0.1 needs"),
        (
            {"objective": {"correction": "kl_mask", "correction_to": "ref"}},
            "correction_to ref needs",
        ),
        ({"objective": {"kl_coeff": 0.1, "kl_to": "inference"}}, ""),
        ({"objective": {"correction": "kl_mask"}}, ""),
    ],
)
def test_whatever_needs_a_reference_model_asks_for_its_logprobs(
    train: dict[str, object], asker: str
) -> None:
    config: dict[str, object] = {"train": train}
    if asker:
        with pytest.raises(ValidationError, match=asker):
            JobConfig.model_validate(config)
        config["scorer"] = {"reference_logprobs": True}
    assert JobConfig.model_validate(config)


@pytest.mark.parametrize("correction", ["", "tis"])
def test_only_kl_mask_may_be_of_the_reference(correction: str) -> None:
    objective = {"correction": correction, "correction_to": "ref"}
    with pytest.raises(ValidationError, match="only correction kl_mask can use"):
        JobConfig.model_validate({"train": {"objective": objective}})


def test_a_schema_that_is_not_this_versions_is_refused(tmp_path: Path) -> None:
    assert "this version of Dialoop reads schema 1" in mistake_in(tmp_path, "schema = 2\n")
    assert load_config(write_config(tmp_path, "schema = 1\n"), environment={}) == JobConfig()


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (
            '[train]\nloss = "services.learning.losses:grpo"',
            "services.learning.losses",
            "dialoop_learning.losses",
        ),
        (
            '[[environments]]\nagent = "services.collector.x:y"',
            "services.collector.x",
            "dialoop_services.collector.x",
        ),
        (
            '[environment.options]\ncommand = ["python", "-m", "services.environment"]',
            "services.environment",
            "dialoop_services.environment",
        ),
        (
            '[environment.options]\ncommand = "python -m services.stack train"',
            "services.stack",
            "dialoop_ops.stack",
        ),
    ],
)
def test_the_old_import_name_is_refused_with_the_new_one(
    tmp_path: Path, text: str, old: str, new: str
) -> None:
    message = mistake_in(tmp_path, f"{text}\n")
    assert f"names {old}, which is now {new}" in message


def test_a_package_of_ones_own_may_be_called_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "services" / "learning").mkdir(parents=True)
    (tmp_path / "services" / "__init__.py").write_text("")
    (tmp_path / "services" / "learning" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "services", raising=False)
    text = '[train]\nloss = "services.learning:mine"\n'
    path = write_config(tmp_path, text)
    assert load_config(path, environment={}).train.loss == "services.learning:mine"
    for name in [name for name in sys.modules if name.partition(".")[0] == "services"]:
        monkeypatch.delitem(sys.modules, name)


def test_a_variable_that_names_the_old_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIALOOP_TRAINER_LOSS", "services.learning:mine")
    with pytest.raises(InvalidConfig, match=r"is now dialoop_learning"):
        load(TrainerSettings)


def test_each_value_knows_who_said_it(tmp_path: Path) -> None:
    path = write_config(tmp_path, "seed = 3\n[train]\nloss_options = { cap = 2.0 }\n")
    turns = Override(path="collector.max_turns", value="3", origin="DIALOOP_COLLECTOR_MAX_TURNS")
    loaded = load_with_origins(path, environment={"SEED": "7"}, run="r", overrides=[turns])
    assert (loaded.config.seed, loaded.config.collector.max_turns) == (7, 3)
    lines = toml_of(loaded.config, loaded.origins).splitlines()
    for line in (
        'run = "r"  # --run',
        "seed = 7  # SEED",
        "max_turns = 3  # DIALOOP_COLLECTOR_MAX_TURNS",
        f'loss_options = {{ "cap" = 2.0 }}  # {path}',
        "group_size = 8  # default",
    ):
        assert line in lines


def test_a_file_that_is_not_toml_is_told_with_its_line(tmp_path: Path) -> None:
    assert "line 2" in mistake_in(tmp_path, "run = 'a'\nseed = = 3\n")


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="No such file"):
        load_config(tmp_path / "none.toml", environment={})


def test_seed_of_the_environment_overrides_the_file(tmp_path: Path) -> None:
    path = write_config(tmp_path, "seed = 3\n")
    assert load_config(path, environment={"SEED": "7"}).seed == 7
    assert load_config(path, environment={"SEED": ""}).seed == 3


def test_paths_are_relative_to_the_config(tmp_path: Path) -> None:
    config = load_config(
        write_config(tmp_path, "[environment]\ntask_file = 'tasks.jsonl'\n"), environment={}
    )
    assert config.environment.arguments == {
        "path": str(tmp_path / "tasks.jsonl"),
        "heldout_fraction": 0.1,
    }


def test_the_shipped_configs_are_valid() -> None:
    for path in sorted((ROOT / "infra" / "configs").glob("*.toml")):
        config = load_config(path, environment={})
        if not Path(config.model.directory).is_dir():  # benchmarks.real fetches it
            model = config.model.model_copy(update={"directory": ""})
            config = config.model_copy(update={"model": model})
        preflight.check(config)


def test_a_model_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(InvalidConfig, match=r"has no tokenizer\.json"):
        preflight.check_model(tmp_path)


def test_a_task_file_with_a_broken_line_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"question": "1+1", "answer": "2"}\n{"question": \n')
    path = write_config(
        tmp_path, "engine = 'transformers'\n[environment]\ntask_file = 'tasks.jsonl'\n"
    )
    with pytest.raises(InvalidConfig, match=r"Line 2 of .*tasks\.jsonl cannot be read"):
        preflight.check(load_config(path, environment={}))


@pytest.mark.parametrize(
    "service", ["replay", "environment", "inference", "trainer", "scorer", "collector"]
)
def test_every_variable_is_a_valid_setting_of_its_service(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"dialoop_services.{service}.settings")
    settings: type[BaseSettings] = getattr(module, f"{service.capitalize()}Settings")
    config = JobConfig.model_validate({"warm_start": {"file": "demonstrations.jsonl"}})
    ports = ports_of(config, with_redis=True)
    layout = Layout(
        config=config,
        run_dir=RunDir(path=tmp_path, run_id="r-1"),
        ports=ports,
        redis_url="redis://127.0.0.1:1/0",
    )
    layout.write_job()
    for name, value in layout.spec(service).environment.items():
        monkeypatch.setenv(name, value)
    loaded = settings()
    assert loaded.model_dump()["port"] == ports[service]


@pytest.mark.parametrize(
    ("num_processes", "program"),
    [(1, ["dialoop_services.trainer"]), (3, ["dialoop_services.trainer.learner.launch", "3"])],
)
def test_the_trainer_is_started_as_so_many_processes(
    tmp_path: Path, num_processes: int, program: list[str]
) -> None:
    config = JobConfig.model_validate({"train": {"num_processes": num_processes}})
    layout = Layout(
        config=config,
        run_dir=RunDir(path=tmp_path, run_id="r-1"),
        ports=ports_of(config, with_redis=True),
    )
    assert list(layout.spec("trainer").command[1:]) == ["-m", *program]
    assert list(layout.spec("scorer").command[1:]) == ["-m", "dialoop_services.scorer"]


@pytest.mark.parametrize("option", ["reward_funcs", "compute_score"])
def test_reward_functions_beside_an_agent_are_said_to_be_used_only_where_it_gives_none(option):
    section = {"use": "trl", "options": {"dataset": "rows.jsonl", option: "mine:right"}}
    assert warnings_for_rewards(JobConfig.model_validate({"environment": section})) == ()
    config = JobConfig.model_validate({"environment": section | {"agent": "mine:run"}})
    (warning,) = warnings_for_rewards(config)
    assert option in warning
    assert "only where the agent mine:run returns None" in warning


def wrong_values(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, Any]]:
    """Each key of each table with a value that it cannot have, and each table with one key more."""
    yield f"{path}surely_not", 1
    for name, field in model.model_fields.items():
        inner = table_of(field)
        is_array = get_origin(field.annotation) is tuple
        if inner is not None and not is_array:
            yield from wrong_values(inner, f"{path}{name}.")
        if field.annotation in (int, float, bool, str) or inner is not None:
            yield f"{path}{name}", [["neither"]]
        elif get_origin(field.annotation) is Literal:
            yield f"{path}{name}", "surely_not"
        for kind, key, step in ((Ge, "ge", -1), (Gt, "gt", 0), (Le, "le", 1), (Lt, "lt", 0)):
            for bound in field.metadata:
                if isinstance(bound, kind):
                    yield f"{path}{name}", getattr(bound, key) + step


def test_no_key_or_value_passes_in_silence() -> None:
    """One unknown key or impossible value a config, in every table: each is refused by name."""
    cases = list(wrong_values(JobConfig))
    assert len(cases) > 400
    for path, value in cases:
        values: dict[str, Any] = {}
        override_in(values, Override(path=path, value=value, origin="x"))
        with pytest.raises(InvalidConfig) as caught:
            parse_config(values, source="job.toml")
        assert "job.toml" in str(caught.value), path
        assert path.rpartition(".")[2] in str(caught.value), path
