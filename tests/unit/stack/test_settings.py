"""No setting of a service is forgotten: the config file says it, or it is named here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from dialoop_services.config.job import JobConfig
from dialoop_services.config.shared import LoraSettings
from dialoop_services.runtime.settings import ServerSettings
from dialoop_services.stack.layout import Layout, rest_name
from dialoop_services.stack.run_dir import RunDir

# Left at a service's default by a stack: its variables say them, which a stack's children inherit.
BY_VARIABLE = {
    "replay": "max_attempts max_deliveries max_dead_letters lease_s poll_s redis_timeout_s "
    "vocab_size",
    "environment": "task_file heldout_file openenv ttl_s max_ttl_s capacity step_timeout_s "
    "abandon_s max_working_steps health_interval_s reap_interval_s max_concurrent_items",
    "inference": "batching min_batch_size max_batch_size batching_timeout_s torch_threads "
    "wake_after_s served_model_name max_recordings max_recorded_calls "
    "recording_ttl_s",
    "collector": "worker page_size stop max_turns member_retries agent_time_limit_s lease_s wait_s "
    "patience_s",
    "scorer": "worker max_row_tokens advantage_eps max_groups lease_s wait_s patience_s",
    "trainer": "publish_deadline_s warm_start_checkpoint_every lease_s sleep_drain_s",
}
# What `Layout.spec` adds for each process: no two replicas have the same.
OF_A_PROCESS = {"inference": {"seed"}}
# Keys that a service knows by another name, or that only the stack reads.
OTHERWISE = {
    "inference": {"num_replicas", "data_plane"},
    "collector": set[str](),
    "scorer": {"reference_model", "num_threads"},
    "train": {"num_steps", "num_processes", "num_threads"},
}
SERVICE_OF = {"train": "trainer"}

# Says all that is said only where there is something to say.
FULL: dict[str, Any] = {
    "placement": "shared",
    "environment": {"agent": "mine:agent"},
    "train": {"pipeline_depth": 0},
    "warm_start": {"file": "demonstrations.jsonl"},
    "evaluation": {"stop_at": 0.5},
}


def layout(config: dict[str, Any]) -> Layout:
    names = (*BY_VARIABLE, *map(rest_name, BY_VARIABLE))
    return Layout(
        config=JobConfig.model_validate(config),
        run_dir=RunDir(path=Path("runs/r"), run_id="r"),
        ports=dict.fromkeys(names, 1),
        redis_url="redis://127.0.0.1:1/0",
        memory=Path("memory"),
    )


def settings_of(service: str) -> type[ServerSettings]:
    module = import_module(f"dialoop_services.{service}.settings")
    found: type[ServerSettings] = getattr(module, f"{service.title()}Settings")
    return found


@pytest.mark.parametrize("service", BY_VARIABLE)
def test_each_setting_is_told_by_the_stack_or_named_as_left_to_variables(service: str) -> None:
    told = set(layout(FULL).values_of(service)) | OF_A_PROCESS.get(service, set())
    if service == "inference":
        told |= set(layout({"inference": {"data_plane": "nccl"}}).values_of(service))
    known = set(settings_of(service).model_fields) - set(ServerSettings.model_fields)
    left = set(BY_VARIABLE[service].split())
    forgotten = known - told - left
    assert not forgotten, f"share {forgotten} in dialoop_services.config.shared, or name them here"
    assert not left & told
    assert told <= known


@pytest.mark.parametrize("table", OTHERWISE)
def test_each_key_of_a_table_is_a_setting_of_its_service_or_named(table: str) -> None:
    service = SERVICE_OF.get(table, table)
    keys = set(type(getattr(JobConfig(), table)).model_fields)
    told = set(layout(FULL).values_of(service))
    assert keys - told == OTHERWISE[table]


def test_a_key_that_table_and_service_share_is_told_as_it_is() -> None:
    said: dict[str, dict[str, Any]] = {
        "inference": {"kv_cache_mib": 70, "max_num_seqs": 3, "update_mode": "wait"},
        "collector": {"group_size": 3, "temperature": 0.5, "max_new_tokens": 5},
        "scorer": {"top_k": 2, "rewards": ({"name": "a", "use": "b:c"},), "divide_by_std": True},
        "train": {
            "max_row_tokens": 999,
            "loss_options": {"cap": 2.0},
            "objective": {"num_epochs": 2},
        },
    }
    stack = layout(said)
    for table, keys in said.items():
        told = stack.values_of(SERVICE_OF.get(table, table))
        found = {name: told[name] for name in keys}
        if table == "train":
            assert isinstance(found["objective"], dict)
            found["objective"] = {"num_epochs": found["objective"]["num_epochs"]}
        assert found == keys


def test_the_nested_tables_are_told_whole() -> None:
    told = layout({}).values_of("trainer")
    assert set(told["lora"]) == set(LoraSettings.model_fields)  # type: ignore[call-overload]
    config = JobConfig()
    assert told["sft"] == config.sft.model_dump()
    assert told["trackers"] == config.trackers.model_dump()
