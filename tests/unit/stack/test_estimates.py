"""What a job will need, said before it starts: the formula's numbers, and what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop_ops.stack import preflight
from dialoop_ops.stack.devices import nodes_of, plan_devices, warnings_for_devices
from dialoop_ops.stack.estimates import (
    card_lines,
    card_needs,
    estimate_of,
    require_memory,
    require_targets,
    span,
    warnings_for_disk,
)
from dialoop_services.config.file import parse_config
from dialoop_services.config.memory import (
    LARGE_MODEL,
    PROCESS_BYTES,
    ModelShape,
    Training,
    training_memory,
    training_products,
)

from benchmarks.servers.families import make_family

SHAPE = ModelShape(
    num_parameters=1000,
    num_active=1000,
    vocab_size=10,
    hidden=4,
    layers=3,
    queries=8,
    keys=2,
    inner=16,
)
QWEN3_06B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_family("qwen3", tmp_path_factory.mktemp("estimates") / "model")


def job(directory, **tables):
    values = {"engine": "transformers", "store": "memory", "model": {"directory": str(directory)}}
    return parse_config(values | tables, source="job.toml")


def test_the_trainers_memory_is_that_of_the_formula_by_hand() -> None:
    parts = training_memory(SHAPE, Training(num_tokens=5)).parts
    assert parts["process"] == PROCESS_BYTES
    assert (parts["weights"], parts["optimiser"]) == (4000, 8000)
    of_layer = 5 * (6 * 4 + 5 * 8 + 4 * 2 + 4 * 16) * 4
    head = 2 * 5 * 10 * 4 + (256 << 20) + 2 * 5 * 4 * 4 + 10 * 4 * 8
    on_the_way = 3 * 5 * 16 * 4
    assert parts["backward"] == 3 * of_layer + on_the_way + head
    thrifty = training_memory(SHAPE, Training(num_tokens=5, recomputes=True)).parts
    assert thrifty["backward"] == 5 * 3 * 4 * 4 + of_layer + on_the_way + head
    of_many = training_memory(SHAPE, Training(num_tokens=5, num_rows=2)).parts
    assert of_many["backward"] == parts["backward"] + parts["weights"]


def test_adapters_have_no_gradients_of_the_whole_model() -> None:
    parts = training_memory(SHAPE, Training(num_tokens=5, num_trained=10)).parts
    assert parts["optimiser"] == 80
    of_layer = 5 * (6 * 4 + 5 * 8 + 4 * 2 + 4 * 16) * 4
    head = 2 * 5 * 10 * 4 + (256 << 20) + 2 * 5 * 4 * 4
    on_the_way, ordered = 3 * 5 * 16 * 4, 10 * 4 * 4
    assert parts["backward"] == 3 * of_layer + on_the_way + ordered + head
    large = replace(SHAPE, num_parameters=LARGE_MODEL)
    parts = training_memory(large, Training(num_tokens=5, num_trained=10)).parts
    assert parts["backward"] == 3 * of_layer + max(on_the_way, ordered) + head
    assert training_products(SHAPE, Training(num_tokens=5, num_trained=10)) == pytest.approx(
        training_products(SHAPE, Training(num_tokens=5)) * 4 / 6
    )


def test_of_a_real_shape_the_weights_and_the_optimiser_are_what_people_expect() -> None:
    shape = ModelShape.of(QWEN3_06B, num_parameters=596_049_920)
    assert (shape.queries, shape.keys) == (2048, 1024)
    training = Training(num_tokens=4096, recomputes=True)
    parts = training_memory(shape, training).parts
    assert parts["weights"] == pytest.approx(2.22 * 2**30, rel=0.01)
    assert parts["optimiser"] == pytest.approx(4.44 * 2**30, rel=0.01)
    assert training_products(shape, training) > 8 * 596_049_920 * 4096


def test_of_experts_one_token_uses_few() -> None:
    fields = QWEN3_06B | {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    shape = ModelShape.of(fields, num_parameters=30_532_122_624)  # Qwen3-30B-A3B
    assert shape.inner == 8 * 768
    assert shape.num_active == pytest.approx(3.35e9, rel=0.01)
    assert ModelShape.of({"d_model": 8}, num_parameters=1) is None


def test_a_publish_has_the_bytes_of_its_file(directory) -> None:
    num_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    whole = estimate_of(job(directory))
    assert whole.publish_bytes == pytest.approx(num_bytes, rel=0.05)
    adapter = estimate_of(job(directory, model={"directory": str(directory), "lora_rank": 2}))
    assert 0 < adapter.publish_bytes < whole.publish_bytes / 2
    # This engine adds an adapter to the base beside the policy that it serves.
    replicas = [e.processes["inference-0"] for e in (adapter, whole)]
    assert replicas[0].total - replicas[1].total == whole.publish_bytes
    merged = {"directory": str(directory), "lora_rank": 2, "publish": "merged"}
    assert estimate_of(job(directory, model=merged)).publish_bytes == whole.publish_bytes
    lines = whole.lines(gflops=50.0)
    assert [line.split()[0] for line in lines] == [*["memory"] * 3, "publish", "disk", "step"]
    assert "Gflop/s" in lines[-1]
    assert "Gflop/s" not in whole.lines()[-1]  # of a machine whose rate is not known


def test_the_disk_that_a_run_needs_is_said_before_it_starts(directory) -> None:
    policy = estimate_of(job(directory)).publish_bytes
    for train, number in (
        ({"num_steps": 500}, 1 + 4 + 8 + 1),
        ({"num_steps": 3}, 4),
        ({"num_steps": 500, "keep_policies": 0}, 501),
        ({"num_steps": 500, "keep_milestones": 0}, 501),
        ({"num_steps": 500, "keep_policies": 1, "keep_milestones": 1}, 4),
    ):
        config = job(directory, train=train)
        needed = number * policy + 3 * 3 * policy  # AdamW keeps two numbers for each
        assert estimate_of(config).disk_bytes == needed
        assert warnings_for_disk(config, needed) == ()
        (warning,) = warnings_for_disk(config, needed - 1)
        assert "keep_milestones" in warning
    adapter = job(directory, model={"directory": str(directory), "lora_rank": 2})
    assert estimate_of(adapter).disk_bytes < policy * (4 + 8)
    assert warnings_for_disk(parse_config({}, source="job.toml"), 0) == ()


@pytest.mark.parametrize("max_model_len", [160, 4096])
def test_a_steps_products_are_those_of_trajectories_as_long_as_the_context(
    directory, max_model_len: int
) -> None:
    estimate = estimate_of(job(directory, inference={"max_model_len": max_model_len}))
    assert estimate.row_tokens == max(1024, max_model_len)  # a row holds several short ones
    assert estimate.lines()[-1].endswith(f"if every trajectory has {max_model_len} tokens")


def test_a_row_that_is_larger_than_the_memory_is_refused_with_what_it_needs(directory) -> None:
    config = job(directory, inference={"max_model_len": 256}, train={"num_processes": 2})
    needed = estimate_of(config).total
    require_memory(config, needed)
    with pytest.raises(InvalidConfig, match="one sequence is never split over processes") as caught:
        require_memory(config, needed - 1)
    assert caught.value.reason == Reason.ROW_LARGER_THAN_MEMORY
    assert "activation_checkpointing = true" in caught.value.remedy
    long = job(directory, inference={"max_model_len": 8192})
    fits = estimate_of(job(directory, inference={"max_model_len": 2048})).host_bytes
    with pytest.raises(InvalidConfig) as caught:
        require_memory(long, fits)
    assert f"max_model_len = 2048 in [inference], which needs {fits / 2**30:.1f}" in (
        caught.value.remedy
    )
    small = job(directory, resources={"num_nodes": 1, "memory_gib_per_node": 0.5})
    reasons = [mistake.reason for mistake in preflight.mistakes_in(small)]
    assert Reason.ROW_LARGER_THAN_MEMORY in reasons


def test_what_lies_on_gpus_takes_no_memory_of_the_machine(directory) -> None:
    on_gpu = {"device": "cuda"}
    config = job(directory, inference=on_gpu, scorer={**on_gpu, "kl_coefficient": 0.1})
    estimate = estimate_of(config)
    assert estimate.on_gpus == {"inference-0", "scorer"}
    trainer = estimate.processes["trainer"].total
    assert estimate.host_bytes == trainer + 2 * PROCESS_BYTES + estimate.published_bytes
    require_memory(config, estimate.host_bytes)
    with pytest.raises(InvalidConfig, match="The job needs"):
        require_memory(config, estimate.host_bytes - 1)
    require_memory(job(directory, train=on_gpu), 0)  # what a GPU has is not known here


def test_the_scorer_needs_what_its_own_model_needs(directory, tmp_path) -> None:
    other = make_family("qwen3", tmp_path / "other", fields={"num_hidden_layers": 1})
    scorers = ({"kl_coefficient": 0.1}, {"kl_coefficient": 0.1, "reference_model": str(other)})
    of_policy, of_other = (
        estimate_of(job(directory, scorer=scorer)).processes["scorer"].total for scorer in scorers
    )
    assert of_other < of_policy
    assert "scorer" not in estimate_of(job(directory)).processes


def test_offload_on_a_cpu_is_refused(directory) -> None:
    with pytest.raises(InvalidConfig, match="where they are already"):
        job(directory, train={"activation_offload": True})


def test_an_unknown_target_of_lora_is_found_in_the_files(directory) -> None:
    model = {"directory": str(directory), "lora_rank": 4}
    require_targets(job(directory, model={**model, "lora_targets": ["q_proj", "down_proj"]}))
    with pytest.raises(InvalidConfig, match="names q_prj, and the model has no such") as caught:
        require_targets(job(directory, model={**model, "lora_targets": ["q_prj", "v_proj"]}))
    assert caught.value.reason == Reason.LORA_TARGET
    assert caught.value.remedy.startswith("Did you mean q_proj? Set lora_targets in [model] to")


def on_cards(directory, gib: float, **train):
    machines = {"gpus_per_node": 2, "gpu_memory_gib": gib}
    tables = {"inference": {"device": "cuda", "max_model_len": 512}}
    return job(directory, resources=machines, train={"device": "cuda", **train}, **tables)


def test_a_card_that_is_too_small_is_refused_with_what_fits(directory) -> None:
    def trainer_bytes(config) -> float:
        plan = plan_devices(config, nodes_of(config, {}))
        cards = card_needs(config, plan, total=0)
        return next(sizes["trainer"] for sizes in cards.values() if "trainer" in sizes)

    whole = trainer_bytes(on_cards(directory, 80))
    less = trainer_bytes(on_cards(directory, 80, activation_checkpointing=True))
    assert less < whole
    between = on_cards(directory, (whole + less) / 2 / 2**30)
    (mistake,) = preflight.mistakes_in(between)
    assert mistake.reason == Reason.GPU_MEMORY_TAKEN
    assert mistake.remedy.startswith("With activation_checkpointing = true in [train] trainer")
    assert mistake.remedy.endswith("and fits.")
    (mistake, *_) = preflight.mistakes_in(on_cards(directory, 0.1))
    assert "needs no less than that" in mistake.remedy
    assert preflight.mistakes_in(on_cards(directory, 80)) == []


def test_cards_are_said_before_the_start(directory) -> None:
    config = on_cards(directory, 80)
    plan = plan_devices(config, nodes_of(config, {}))
    lines = card_lines(config, plan, total=80 * 2**30)
    assert [line.split()[:2] for line in lines] == [["card", "0:0"], ["card", "0:1"]]
    assert all(" of 80.0 GiB: " in line for line in lines)


def test_idle_gpus_are_said(directory) -> None:
    machines = {"gpus_per_node": 4}
    on_cpu = {"train": {"device": "cpu"}, "inference": {"device": "cpu"}}
    (line,) = warnings_for_devices(job(directory, resources=machines, **on_cpu))
    assert line.startswith("the trainer computes on the CPU, and 4 of 4 GPUs are idle")
    on_gpu = {"inference": {"device": "cuda"}, "train": {"device": "cuda"}}
    (line,) = warnings_for_devices(job(directory, resources=machines, **on_gpu))
    assert line.startswith("2 of 4 GPUs are idle")
    assert not list(warnings_for_devices(job(directory, resources={"gpus_per_node": 2}, **on_gpu)))


def test_long_times_are_said_as_people_say_them() -> None:
    assert [span(40), span(12_600), span(578_635)] == ["40 s", "3.5 h", "6.7 days"]
