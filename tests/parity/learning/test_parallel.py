"""Several processes train what one process trains: gloo on the CPU, a model of two layers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dialoop.errors import InvalidConfig, InvalidInput, Unavailable, Unsupported
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.model.policy import load_policy
from dialoop_learning.model.tiny import tiny_config
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.parallel.group_commands import RankGroup, collective, decode, encode
from dialoop_learning.parallel.loading import fill_weights
from dialoop_learning.parallel.parallel_state import load_optimizer, load_sharded
from dialoop_learning.parallel.ranks import ALONE, Ranks, join_ranks, shard
from dialoop_learning.parallel.step_plan import own_rows, plan_step, score_rows
from dialoop_learning.training import update
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen2ForCausalLM

from benchmarks.servers.families import make_family
from tests.support.programs.parallel_worker import Job, made_rows, run

pytestmark = pytest.mark.timeout(300)  # processes start slowly on a busy machine

WORKER = Path(__file__).parents[2] / "support" / "programs" / "parallel_worker.py"
REGULAR = {"surroundings": {"kl_coeff": 0.1}}
GSPO = {
    "loss": "gspo",
    "options": {"clip_low": 0.2, "clip_high": 0.2},
    "surroundings": {"kl_coeff": 0.1, "entropy_coeff": 0.01},
}
WHITE = {"loss": "reinforce_pp", **REGULAR}
LORA = {"lora_rank": 2, "is_checkpointed": True, "last_step": 3, "num_sequences": 5}
OPTIMIZERS = "tests.support.programs.own_optimizers"
OWN = {"optimizer": f"{OPTIMIZERS}:Smooth", "num_sequences": 2}
_REFUSED = ("refused", "refused_elsewhere")
HALF, REST = {"last_step": 4}, {"first_step": 4}


@pytest.fixture(scope="module", autouse=True)
def _own_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parallel")
    config = tiny_config()
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(root / "model")
    return root


@pytest.fixture(scope="module")
def alone(root: Path) -> Path:
    """What one process did: whole runs, and one that stopped half way."""
    out = root / "alone"
    for job in (
        _job(root, out, "grpo", **REGULAR, poisoned_step=2),
        _job(root, out, "white", **WHITE),
        _job(root, out, "half", **REGULAR, **HALF, poisoned_step=2, save=f"{out}/half"),
    ):
        run(job)
    return out


@pytest.fixture(scope="module")
def pair(root: Path, alone: Path) -> Path:
    """What two processes did under torchrun, partly from where one process stopped."""
    out = root / "pair"
    jobs = [
        _job(root, out, "grpo", **REGULAR, **HALF, poisoned_step=2, save=f"{out}/whole"),
        _job(root, out, "grpo_rest", **REGULAR, **REST, resume=f"{alone}/half"),
        _job(root, out, "refused", refusing_rank=0),
        _job(root, out, "refused_elsewhere", refusing_rank=1),
        _job(root, out, "white", **WHITE, **HALF, save=f"{out}/parts", is_sharded=True),
        _job(root, out, "white_rest", **WHITE, **REST, resume=f"{out}/parts", is_sharded=True),
        _job(root, out, "echo", last_step=0, resume=f"{alone}/half", save=f"{out}/echo"),
    ]
    finished = _torchrun(2, jobs, out)
    assert (finished.returncode, finished.stderr, finished.stdout) == (0, "", "")
    return out


@pytest.fixture(scope="module")
def others_alone(root: Path, alone: Path) -> Path:
    """What one process did with other losses and optimizers."""
    for job in (
        _job(root, alone, "gspo", **GSPO),
        _job(root, alone, "muon", optimizer="muon", num_sequences=1, last_step=2),
        _job(root, alone, "own", **OWN, last_step=4),
        _job(root, alone, "lora", **REGULAR, **LORA, save=f"{alone}/lora"),
        _experts_job(root, alone),
    ):
        run(job)
    return alone


@pytest.fixture(scope="module")
def other_pair(root: Path, others_alone: Path) -> Path:
    """What two processes did with the same."""
    out = root / "other pair"
    jobs = [
        _job(root, out, "gspo", **GSPO),
        _job(root, out, "muon", optimizer="muon", num_sequences=1, last_step=2),
        _job(root, out, "own", **OWN, last_step=2, save=f"{out}/own"),
        _job(root, out, "own_rest", **OWN, first_step=2, last_step=4, resume=f"{out}/own"),
        _job(root, out, "lora", **REGULAR, **LORA, save=f"{out}/lora"),
        _experts_job(root, out),
    ]
    finished = _torchrun(2, jobs, out)
    assert (finished.returncode, finished.stderr, finished.stdout) == (0, "", "")
    return out


def _job(root: Path, out: Path, name: str, **fields: Any) -> Job:
    return Job(name=name, model=str(root / "model"), out=str(out), **fields)


def _experts_job(root: Path, out: Path) -> Job:
    """A job that replays experts, also in layers that are computed a second time."""
    model = str(make_family("qwen3_moe", root / "experts"))
    fields = {**REGULAR, "last_step": 3, "is_checkpointed": True, "records_experts": True}
    return Job(name="experts", model=model, out=str(out), **fields)


def _write_jobs(jobs: list[Job], out: Path) -> str:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "jobs.json"
    path.write_text(json.dumps([vars(job) for job in jobs]), "utf-8")
    return str(path)


def _environment(**more: str) -> dict[str, str]:
    root = Path(__file__).parents[3]
    paths = os.pathsep.join(map(str, (root, root / "client", root / "services")))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more}


def _torchrun(
    size: int, jobs: list[Job], out: Path, **mesh: int
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, f"--nproc-per-node={size}", str(WORKER), _write_jobs(jobs, out)],
        env=_environment(MESH=json.dumps(mesh)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _start(out: Path, jobs: str, size: int, **more: str) -> list[subprocess.Popen[str]]:
    """The ranks of the jobs without a launcher."""
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), jobs],
            env=_environment(
                **{"RANK": str(rank), "WORLD_SIZE": str(size), "INIT_METHOD": f"file://{out}/store"}
                | more
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def _curve(out: Path, *names: str) -> list[dict[str, Any]]:
    return [step for name in names for step in json.loads((out / f"{name}.json").read_text())]


def _assert_same(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    assert len(first) == len(second)
    for left, right in zip(first, second, strict=True):
        assert left["applied"] == right["applied"]
        assert left["metrics"]["by_staleness"].keys() == right["metrics"]["by_staleness"].keys()
        if left["applied"]:
            assert left["grad_norm"] > 0.1
            assert left["loss"] == pytest.approx(right["loss"], abs=1e-5)
            assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-5)
            for name in set(left["metrics"]) - {"by_staleness", "by_depth"}:
                assert left["metrics"][name] == pytest.approx(right["metrics"][name], abs=1e-5)
            depths, others = (m["metrics"].get("by_depth", {}) for m in (left, right))
            assert depths.keys() == others.keys()
            for depth in depths:
                assert depths[depth] == pytest.approx(others[depth], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "parts"),
    [("grpo", ("grpo", "grpo_rest")), ("white", ("white", "white_rest"))],
)
def test_two_processes_reproduce_the_curve_of_one(
    alone: Path, pair: Path, name: str, parts: tuple[str, ...]
) -> None:
    _assert_same(_curve(alone, name), _curve(pair, *parts))


@pytest.mark.heavy(reason="starts two processes once more")
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("gspo", ("gspo",)),
        ("muon", ("muon",)),
        ("own", ("own", "own_rest")),
        ("lora", ("lora",)),
        ("experts", ("experts",)),
    ],
)
def test_two_processes_reproduce_the_other_curves_of_one(
    others_alone: Path, other_pair: Path, name: str, parts: tuple[str, ...]
) -> None:
    _assert_same(_curve(others_alone, name), _curve(other_pair, *parts))
    if name == "experts":
        assert all(row["metrics"]["routing_differs"] > 0.5 for row in _curve(other_pair, name))


def test_all_ranks_refuse_a_step_that_is_not_finite_on_one(alone: Path, pair: Path) -> None:
    applied = [step["applied"] for step in _curve(pair, "grpo")]
    assert applied == [True, True, False, True]


def test_ranks_go_on_after_a_command_that_one_of_them_refused(pair: Path) -> None:
    errors = [json.loads((pair / f"{name}.json").read_text()) for name in _REFUSED]
    assert errors[0] == "INVALID_INPUT The job is too long."
    assert errors[1] == "RANK_REFUSED A rank refused run. Rank 1: The job is too long. Shorten it."


def test_gathered_export_is_what_one_process_writes_byte_for_byte(alone: Path, pair: Path) -> None:
    alone_state, pair_state = (
        Path(p, "model.safetensors").read_bytes() for p in (alone / "half", pair / "echo")
    )
    assert alone_state == pair_state


@pytest.mark.heavy(reason="starts two processes once more")
def test_gathered_adapters_are_merged_as_by_one_process(
    others_alone: Path, other_pair: Path
) -> None:
    alone_state, pair_state = (
        load_file(out / "lora" / "model.safetensors") for out in (others_alone, other_pair)
    )
    assert alone_state.keys() == pair_state.keys()
    assert not any("lora" in name for name in alone_state)
    for name, tensor in alone_state.items():
        torch.testing.assert_close(tensor, pair_state[name], rtol=0, atol=1e-5)


def test_gathered_optimizer_is_what_one_process_has(alone: Path, pair: Path) -> None:
    alone_state, pair_state = (
        torch.load(directory / "optimizer.pt", weights_only=True)
        for directory in (alone / "half", pair / "echo")
    )
    assert alone_state["num_steps"] == pair_state["num_steps"] == 3
    assert alone_state["num_refused"] == pair_state["num_refused"] == 1
    states = [saved["optimizers"][0]["state"] for saved in (alone_state, pair_state)]
    assert states[0].keys() == states[1].keys()
    for index, values in states[0].items():
        for name, value in values.items():
            assert torch.equal(value, states[1][index][name])


@pytest.mark.parametrize(
    ("name", "saved", "fields"),
    [
        ("grpo", "whole", {**REGULAR, **REST}),
        ("white", "parts", {**WHITE, **REST, "is_sharded": True}),
    ],
)
def test_one_process_goes_on_where_two_stopped(
    root: Path, alone: Path, pair: Path, name: str, saved: str, fields: dict[str, Any]
) -> None:
    job = _job(root, root / "on", name, **fields, resume=str(pair / saved))
    _assert_same(_curve(alone, name)[job.first_step :], run(job))


@pytest.mark.heavy(reason="starts two processes once more")
def test_one_process_goes_on_with_an_own_optimizer_of_two(
    root: Path, others_alone: Path, other_pair: Path
) -> None:
    fields = {**OWN, "first_step": 2, "last_step": 4}
    job = _job(root, root / "on", "own", **fields, resume=str(other_pair / "own"))
    _assert_same(_curve(others_alone, "own")[2:], run(job))


@pytest.mark.heavy(reason="starts two processes for one refusal")
def test_an_optimizer_that_keeps_parts_as_wholes_is_refused_by_several_ranks(root: Path) -> None:
    out = root / "local"
    finished = _torchrun(2, [_job(root, out, "local", optimizer=f"{OPTIMIZERS}:Local")], out)
    assert finished.returncode == 1
    assert "Local keeps a state 'last'" in finished.stderr


@pytest.mark.heavy(reason="starts two processes once more")
def test_rank_that_fails_ends_the_others_with_its_cause(root: Path) -> None:
    out = root / "failing"
    jobs = _write_jobs([_job(root, out, "failing", failing_rank=1)], out)
    ranks = _start(out, jobs, 2)
    stderrs = [process.communicate(timeout=100)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1]
    assert "InvalidInput: Trajectory t-17 has no tokens. Leave it out." in stderrs[1]
    cause = "Unavailable: Rank 1 of 2 failed: InvalidInput: Trajectory t-17 has no tokens."
    assert cause in stderrs[0]
    assert not any("terminate called" in text or "not been destroyed" in text for text in stderrs)


@pytest.mark.heavy(reason="starts three processes for one error")
@pytest.mark.parametrize(("gone", "lost_by"), [(1, "SIGKILL"), (1, "SIGSTOP"), (0, "SIGKILL")])
def test_ranks_name_the_one_that_is_gone(root: Path, gone: int, lost_by: str) -> None:
    """One killed in the middle of a step, also with the ranks' store; one that hangs."""
    out, more = root / f"{lost_by} {gone}", {"TIMEOUT_S": "10"}
    says = f"no word from rank {gone}."
    if gone == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            more["INIT_METHOD"] = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        says = "no word from the machine of rank 0, where they meet."
    jobs = _write_jobs([_job(root, out, "lost", lost_rank=gone, lost_by=lost_by)], out)
    ranks = _start(out, jobs, 3, **more)
    others = [rank for rank in range(3) if rank != gone]
    try:
        stderrs = [ranks[rank].communicate(timeout=100)[1] for rank in others]
    finally:
        ranks[gone].kill()
        ranks[gone].communicate()
    for rank, text in zip(others, stderrs, strict=True):
        assert f"Rank {rank} of 3 lost its connection to another one; {says}" in text


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    rendezvous = f"file://{tmp_path}/store"
    with (
        pytest.raises(
            Unavailable, match=r"Of 3 ranks these did not come within 0\.5 s: 1, 2"
        ) as caught,
        join_ranks(rank=0, size=3, init_method=rendezvous, timeout_s=0.5),
    ):
        pass
    assert caught.value.reason == "RANK_FAILED"


@pytest.mark.heavy(reason="starts two processes for one refusal")
def test_ranks_that_bring_different_policies_are_refused(root: Path) -> None:
    out = root / "apart"
    finished = _torchrun(2, [_job(root, out, "apart", **LORA, is_seeded_apart=True)], out)
    assert finished.returncode == 1
    assert "differ in causal_lm.model.layers.0.mlp.down_proj.lora_A" in finished.stderr


@pytest.mark.heavy(reason="four processes on two cores")
def test_four_processes_go_on_where_one_went_on_from_two(
    root: Path, others_alone: Path, pair: Path
) -> None:
    on, out = root / "one of two", root / "four"
    middle = _job(root, on, "grpo", **REGULAR, first_step=4, last_step=6, resume=f"{pair}/whole")
    middle.save = f"{on}/whole"
    first = run(middle)
    jobs = [
        _job(root, out, "grpo", **REGULAR, poisoned_step=2),
        _job(root, out, "gspo", **GSPO),
        _job(root, out, "white", **WHITE),
        _job(root, out, "grpo_rest", **REGULAR, first_step=6, resume=f"{on}/whole"),
        _job(root, out, "white_rest", **WHITE, **REST, resume=f"{pair}/parts", is_sharded=True),
    ]
    finished = _torchrun(4, jobs, out)
    assert (finished.returncode, finished.stderr, finished.stdout) == (0, "", "")
    for name in ("grpo", "gspo", "white"):
        _assert_same(_curve(others_alone, name), _curve(out, name))
    _assert_same(_curve(others_alone, "grpo")[4:], [*first, *_curve(out, "grpo_rest")])
    _assert_same(_curve(others_alone, "white")[4:], _curve(out, "white_rest"))


MESHES: dict[str, dict[str, int]] = {
    "alone": {"size": 1},
    "dp_shard 2": {"size": 2},
    "dp_shard 4": {"size": 4},
    "dp_replicate 2 x dp_shard 2": {"size": 4, "dp_replicate": 2},
    "cp 2": {"size": 2, "cp": 2},
    "dp_replicate 2 x cp 2": {"size": 4, "dp_replicate": 2, "cp": 2},
}


def _on_mesh(root: Path, name: str, *jobs: Job) -> None:
    finished = _torchrun(jobs=list(jobs), out=root / name, **MESHES[name])
    assert (finished.returncode, finished.stderr, finished.stdout) == (0, "", "")


@pytest.mark.heavy(reason="starts each of five meshes twice, of up to four processes")
@pytest.mark.timeout(1200)
def test_every_mesh_takes_the_step_of_one_process_and_goes_on_from_every_other(root: Path) -> None:
    """One sequence of 8,192 tokens, and short ones; weights are large, or attention were a mean."""
    steps = {**REGULAR, "last_step": 1, "is_sharded": True}
    config = AutoConfig.from_pretrained(root / "model")
    config.initializer_range, config.max_position_embeddings = 0.2, 8192
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(root / "large" / "model")
    fields = {**steps, "last_step": 2, "first_step": 1, "keeps_gradients": True}
    for name in MESHES:
        out = root / name
        once = {"keeps_gradients": True, **steps}
        long = _job(root / "large", out, "long", num_tokens=8192, **once)
        short = _job(root, out, "short", save=f"{out}/parts", **once)
        _on_mesh(root, name, long, short)
    for name in MESHES:
        resumed = [
            _job(root, root / name, f"from {other}", resume=str(root / other / "parts"), **fields)
            for other in MESHES
        ]
        _on_mesh(root, name, *resumed)
    for name in MESHES:
        for job in ("long", "short", *(f"from {other}" for other in MESHES)):
            expected = "from alone" if job.startswith("from") else job
            _assert_same(_curve(root / "alone", expected), _curve(root / name, job))
            own, alone = (
                load_file(root / at / f"{of}.safetensors")
                for at, of in ((name, job), ("alone", expected))
            )
            assert own.keys() == alone.keys()
            for key, tensor in own.items():
                torch.testing.assert_close(tensor, alone[key], rtol=1e-5, atol=1e-5)


@pytest.mark.heavy(reason="starts torchrun once more")
def test_torchrun_ends_all_and_shows_the_cause(root: Path) -> None:
    out = root / "failing under torchrun"
    finished = _torchrun(2, [_job(root, out, "failing", failing_rank=0)], out)
    assert finished.returncode == 1
    assert "InvalidInput: Trajectory t-17 has no tokens. Leave it out." in finished.stderr


def test_one_process_joins_nobody(root: Path) -> None:
    policy = load_policy(root / "model")
    with join_ranks(rank=0, size=1) as ranks:
        assert not dist.is_initialized()
        assert ranks == ALONE
        assert shard(policy, ranks) is policy
        assert (ranks.gather({"a": 1}), ranks.broadcast(b"ab")) == ([{"a": 1}], b"ab")


def test_scores_come_in_the_order_of_the_rows(root: Path) -> None:
    policy, rows = load_policy(root / "model"), made_rows(0, 6)
    scores = score_rows(policy, rows, ALONE, max_tokens=64)
    with torch.no_grad():
        for row, score in zip(rows, scores, strict=True):
            torch.testing.assert_close(score, policy(pack_rows([row])).logprobs)


def test_each_row_goes_once_to_a_rank_that_trains_it_and_to_no_other() -> None:
    """What passes the first rank is every other rank's rows once, and the plan."""
    rows = made_rows(0, 24)
    updates = [list(range(0, 24, 2)), list(range(1, 24, 2))]
    plan = plan_step(rows, updates, Ranks(size=4), max_tokens=64)
    assert sorted(i for share in plan.shares for i in share.indices) == list(range(24))
    for number, wanted in enumerate(updates):
        trained = [share.indices[p] for share in plan.shares for p in share.orders[number]]
        assert sorted(trained) == wanted
    for share in plan.shares:
        for order, packing in zip(share.orders, share.packings, strict=True):
            assert sorted(place for row in packing for place in row) == list(range(len(order)))
            for row in packing:
                assert sum(len(share.rows[order[place]].token_ids) for place in row) <= 64
    costs = [sum(len(row.token_ids) for row in share.rows) for share in plan.shares]
    assert max(costs) < 1.2 * min(costs)
    sent = [len(encode([[plan], {}], rank)) for rank in range(4)]
    alone = [sum(len(encode(row)) for row in share.rows) for share in plan.shares]
    assert all(whole < own + 1500 for whole, own in zip(sent, alone, strict=True))
    own = decode(encode(plan, 2)).own
    assert own.indices == list(plan.shares[2].indices)


def test_ranks_that_share_sequences_get_the_same_rows_of_one_sequence_each() -> None:
    rows = made_rows(0, 6)
    plan = plan_step(rows, [range(6)], Ranks(size=4, cp=2), max_tokens=64)
    assert plan.shares[0] == plan.shares[1] != plan.shares[2] == plan.shares[3]
    assert all(len(row) == 1 for share in plan.shares for row in share.packings[0])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.norm.weight": None}, "it lacks model.norm.weight"),
        ({"model.norm.weight": torch.zeros(3)}, "its model.norm.weight is (3,), and the model's ("),
        ({"other.weight": torch.zeros(3)}, "other.weight is in it and not in the model"),
    ],
)
def test_weights_of_another_model_are_refused(
    root: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], says: str
) -> None:
    tensors = load_file(root / "model" / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, tmp_path / "of.safetensors")
    with pytest.raises(InvalidConfig) as caught:
        fill_weights(load_policy(root / "model"), [tmp_path / "of.safetensors"], complaint="It")
    assert caught.value.reason == "WEIGHTS_MISMATCH"
    assert says in str(caught.value)


def test_parts_of_another_optimizer_are_refused(root: Path, pair: Path) -> None:
    policy = load_policy(root / "model")
    muon = GuardedOptimizer(
        policy.parameters(), OptimizerSettings(name="muon"), matrices=policy.hidden_matrices()
    )
    with pytest.raises(InvalidConfig) as caught:
        load_sharded(pair / "parts", policy, {"train": muon}, ALONE)
    assert caught.value.reason == "CHECKPOINT_MISMATCH"


def test_whole_state_of_another_optimizer_is_refused(root: Path, alone: Path) -> None:
    policy = load_policy(root / "model")
    muon = GuardedOptimizer(
        policy.parameters(), OptimizerSettings(name="muon"), matrices=policy.hidden_matrices()
    )
    state = torch.load(alone / "half" / "optimizer.pt", weights_only=True)
    with pytest.raises(InvalidConfig) as caught:
        load_optimizer(muon, state)
    assert caught.value.reason == "OPTIMIZER_MISMATCH"


class _Divider:
    """Of which every rank has one."""

    def __init__(self, facts: str, group: RankGroup[_Divider]) -> None:
        self.group = group

    def _require_number(self, divisor: int) -> None:
        if divisor < 0:
            raise InvalidInput("Below 0.", remedy="Give 0 or more.")

    @collective(check=_require_number, computes=True)
    def divide(self, divisor: int) -> float:
        return 1 / divisor

    @collective(computes=True)
    def twice(self, divisor: int) -> float:
        return 2 * self.divide(divisor)


class _Fellows(Ranks):
    """Two ranks, of which the other does as this one."""

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        return parts[0]


class _Store:
    """Keeps what calls there were."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def check(self, keys: list[str]) -> bool:
        raise NotImplementedError

    def get(self, key: str) -> bytes:
        raise NotImplementedError

    def set(self, key: str, value: str) -> None:
        self.calls.append(value)

    def delete_key(self, key: str) -> bool:
        return True


def test_one_process_runs_its_collective_methods_itself_and_waits_for_the_device_once() -> None:
    group: RankGroup[_Divider] = RankGroup(ALONE)
    waited: list[bool] = []
    group.ask_before_computing(lambda: waited.append(True))
    assert _Divider("", group).twice(4) == 0.5
    assert len(waited) == 1


def test_a_method_that_a_collective_one_calls_is_no_call_of_its_own() -> None:
    store = _Store()
    group = RankGroup(_Fellows(size=2, store=store), _Divider)
    assert group.make("").twice(4) == 0.5
    assert store.calls == ["dialoop/make", "twice"]


def test_no_call_is_taken_after_one_that_broke_off() -> None:
    divider = RankGroup(_Fellows(size=2, store=_Store()), _Divider).make("")
    with pytest.raises(InvalidInput, match="Below 0"):
        divider.divide(-1)
    assert divider.divide(2) == 0.5
    with pytest.raises(ZeroDivisionError):
        divider.divide(0)
    with pytest.raises(Unavailable) as caught:
        divider.divide(1)
    assert caught.value.reason == "RANKS_OUT_OF_STEP"


def test_only_the_first_rank_calls() -> None:
    group = RankGroup(_Fellows(rank=1, size=2, store=_Store()), _Divider)
    with pytest.raises(InvalidInput, match="Rank 1") as caught:
        _Divider("", group).divide(2)
    assert caught.value.reason == "NOT_THE_FIRST_RANK"


def test_other_ranks_are_given_rows_bit_for_bit() -> None:
    values = torch.tensor([0.1, -torch.inf, torch.nan])
    row = TokenRow(
        token_ids=torch.tensor([5, 2**40, 7, 9]),
        response_mask=torch.tensor([False, True, True, True]),
        advantages=values,
        group_index=3,
        temperature=0.1 + 0.2,
    )
    silent = replace(row, response_mask=torch.zeros(4).bool(), advantages=values[:0])
    path, loss = Path("/a b"), 0.1 + 0.2
    args, named = decode(encode([([row, silent], path), {"loss": loss, "kind": "rl"}]))
    assert (args[1], named) == (path, {"loss": loss, "kind": "rl"})
    for decoded, expected_row in zip(args[0], (row, silent), strict=True):
        for name in ("token_ids", "response_mask", "advantages"):
            tensor, expected = getattr(decoded, name), getattr(expected_row, name)
            assert tensor.dtype == expected.dtype
            assert tensor.numpy().tobytes() == expected.numpy().tobytes()
        assert decoded.staleness is None
        assert (decoded.group_index, decoded.temperature) == (
            expected_row.group_index,
            expected_row.temperature,
        )


class _Notes:
    """A store that fills while one waits for it."""

    def __init__(self, later: dict[str, str]) -> None:
        self._later, self._looks = later, 0

    def check(self, keys: list[str]) -> bool:
        self._looks += 1
        return self._looks > 4 and all(key in self._later for key in keys)

    def get(self, key: str) -> bytes:
        return self._later[key].encode()

    def set(self, key: str, value: str) -> None:
        raise NotImplementedError

    def delete_key(self, key: str) -> bool:
        raise NotImplementedError


def test_waiting_rank_leaves_when_the_first_closes() -> None:
    notes = _Notes({"dialoop/call/0": "dialoop/close"})
    RankGroup(Ranks(rank=1, size=2, store=notes)).serve()


def test_waiting_rank_leaves_when_another_failed() -> None:
    notes = _Notes({"dialoop/failure": "Rank 0 of 2 failed: the disk is full."})
    with pytest.raises(Unavailable, match="disk is full") as caught:
        RankGroup(Ranks(rank=1, size=2, store=notes)).serve()
    assert caught.value.reason == "RANK_FAILED"


def test_ranks_on_an_unknown_device_are_refused() -> None:
    with pytest.raises(Unsupported, match="cuda"), join_ranks(rank=0, size=2, device="meta"):
        pass


def test_update_of_no_rows_changes_nothing_and_says_so(root: Path) -> None:
    policy = load_policy(root / "model")
    optimizer = GuardedOptimizer(policy.parameters(), OptimizerSettings())
    rows = own_rows([], ALONE, max_tokens=64)
    before = [p.detach().clone() for p in policy.parameters()]
    report = update(policy, optimizer, rows, load_objective("grpo"))
    assert (report.loss, report.step.grad_norm) == (0.0, 0.0)
    assert all(map(torch.equal, before, policy.parameters()))
