"""One rank of a training run: python parallel_worker.py JOBS.json, under torchrun or alone.

The first rank reads the jobs and has all ranks run them
(dialoop_learning.parallel.group_commands). A job trains some steps on sequences made from
their number, checks that all ranks tell the same, and the first rank writes what happened to
<out>/<name>.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from dialoop.errors import DialoopError, InvalidInput
from dialoop_learning.lora.layers import add_lora, base_tensors, merging
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.model.policy import PolicyModel, blank_policy, load_policy
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_learning.packing.rows import TokenRow
from dialoop_learning.parallel.group_commands import RankGroup, collective
from dialoop_learning.parallel.loading import fill_weights, spread
from dialoop_learning.parallel.parallel_state import (
    begin_saving,
    end_saving,
    gather_buckets,
    gather_optimizer,
    load_optimizer,
    load_sharded,
    policy_tensors,
)
from dialoop_learning.parallel.ranks import ALONE, Ranks, join_ranks
from dialoop_learning.parallel.step_plan import gather_scores, pack_own, plan_step, score_rows
from dialoop_learning.rl.routed_experts import NO_EXPERT, Routing
from dialoop_learning.training import UpdateReport, forward_backward
from safetensors.torch import save_file
from transformers.utils.logging import disable_progress_bar

MAX_TOKENS = 64


@dataclasses.dataclass(kw_only=True)
class Job:
    """What one run does; resume and save name directories."""

    name: str
    model: str
    out: str
    loss: str = "grpo"
    options: dict[str, float] = dataclasses.field(default_factory=dict)
    surroundings: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: str = "adamw"
    first_step: int = 0
    last_step: int = 10
    num_sequences: int = 12
    poisoned_step: int = -1
    failing_rank: int = -1
    lost_rank: int = -1
    lost_by: str = "SIGKILL"
    refusing_rank: int = -1
    lora_rank: int = 0
    is_checkpointed: bool = False
    is_seeded_apart: bool = False
    resume: str = ""
    save: str = ""
    is_sharded: bool = False
    num_tokens: int = 0
    """Of one sequence to train; 0: several short ones."""
    keeps_gradients: bool = False
    records_experts: bool = False


def made_rows(step: int, count: int) -> list[TokenRow]:
    """Sequences of 3 to 33 tokens, the same for the same step."""
    draw = random.Random(step)
    rows = []
    for index in range(count):
        before, after = draw.randint(2, 9), draw.randint(1, 24)
        rows.append(
            TokenRow(
                token_ids=torch.tensor([draw.randrange(314) for _ in range(before + after)]),
                response_mask=torch.tensor([False] * before + [True] * after),
                inference_logprobs=torch.tensor([draw.gauss(0, 0.1) for _ in range(after)]),
                advantages=torch.full((after,), draw.gauss(0.2, 1)),
                staleness=torch.full((after,), float(index == 0)),
                group_index=index // 4,
            )
        )
    return rows


def long_row(step: int, num_tokens: int) -> TokenRow:
    """One sequence, of which the policy wrote three quarters."""
    generator = torch.Generator().manual_seed(step)
    mask = torch.arange(num_tokens) % 64 >= 16
    count = int(mask.sum())
    return TokenRow(
        token_ids=torch.randint(314, (num_tokens,), generator=generator),
        response_mask=mask,
        inference_logprobs=0.1 * torch.randn(count, generator=generator),
        advantages=torch.randn(count, generator=generator),
        staleness=torch.zeros(count),
    )


def with_experts(rows: list[TokenRow], routing: Routing, step: int) -> list[TokenRow]:
    """The rows with a record of random experts, but of their last token."""
    generator = torch.Generator().manual_seed(step)
    recorded = []
    for row in rows:
        shape = (len(row.token_ids), routing.num_layers, routing.num_experts)
        experts = torch.rand(shape, generator=generator).argsort(-1)[..., : routing.top_k]
        experts[-1] = NO_EXPERT
        recorded.append(dataclasses.replace(row, routed_experts=experts.short()))
    return recorded


def run(job: Job, ranks: Ranks = ALONE) -> list[dict[str, Any]]:
    """The curve of one job."""
    torch.manual_seed(ranks.rank if job.is_seeded_apart else 0)  # adapters start at random
    policy = load_policy(job.model) if ranks.size == 1 else blank_policy(job.model)
    if job.lora_rank:
        add_lora(policy.causal_lm, rank=job.lora_rank)
    if job.is_checkpointed:
        policy.checkpoint_activations()
    policy = policy if ranks.size == 1 else spread(policy, Path(job.model), ranks)
    optimizer = GuardedOptimizer(
        policy.parameters(),
        OptimizerSettings(name=job.optimizer, learning_rate=1e-3, warmup_steps=10),
        matrices=policy.hidden_matrices(),
    )
    if job.resume:
        _resume(job, policy, optimizer, ranks)
    curve = []
    for step in range(job.first_step, job.last_step):
        if ranks.rank == job.failing_rank and step == 2:
            raise InvalidInput("Trajectory t-17 has no tokens.", remedy="Leave it out.")
        if ranks.rank == job.lost_rank and step == 2:
            os.kill(os.getpid(), signal.Signals[job.lost_by])
        report = _step(job, step, policy, optimizer, ranks)
        values = [report.loss, report.step.applied, report.step.grad_norm, report.metrics]
        curve.append(dict(zip(("loss", "applied", "grad_norm", "metrics"), values, strict=True)))
    if any(json.dumps(other) != json.dumps(curve) for other in ranks.gather(curve)):
        raise InvalidInput("The ranks tell different curves.")
    if job.save:
        _save(job, policy, optimizer, ranks)
    if ranks.is_first:
        Path(job.out).mkdir(parents=True, exist_ok=True)
        Path(job.out, f"{job.name}.json").write_text(json.dumps(curve), "utf-8")
    rows: list[dict[str, Any]] = json.loads(json.dumps(curve))
    return rows


def _step(
    job: Job, step: int, policy: PolicyModel, optimizer: GuardedOptimizer, ranks: Ranks
) -> UpdateReport:
    """One update on sequences that a policy close to this one sampled."""
    rows = made_rows(step, job.num_sequences)
    if job.num_tokens:
        rows = [long_row(step, job.num_tokens)]
    max_tokens = max(MAX_TOKENS, job.num_tokens)
    if job.records_experts and policy.routing is not None:
        rows = with_experts(rows, policy.routing, step)
    if step == job.poisoned_step:
        rows[-1] = dataclasses.replace(rows[-1], advantages=rows[-1].advantages * torch.nan)
    plan = plan_step(rows, [range(len(rows))], ranks, max_tokens=max_tokens)
    share = plan.shares[ranks.rank]
    scores = score_rows(policy, share.rows, ranks, max_tokens=max_tokens)
    rows = [
        dataclasses.replace(
            row,
            inference_logprobs=row.inference_logprobs + score,
            proximal_logprobs=score,
            ref_logprobs=score - 0.1,
        )
        for row, score in zip(share.rows, scores, strict=True)
    ]
    backward = forward_backward(
        policy,
        pack_own(rows, share.packings[0], ranks),
        load_objective(job.loss, job.options, **job.surroundings),
        with_entropy=True,
        ranks=ranks,
    )
    if job.keeps_gradients:
        _keep(job, policy, gather_scores(scores, plan, ranks), ranks)
    report = optimizer.step(backward.loss)
    return UpdateReport(
        loss=backward.loss,
        metrics=backward.metrics,
        step=report,
        num_forwarded_tokens=backward.num_forwarded_tokens,
    )


def _keep(job: Job, policy: PolicyModel, scores: list[torch.Tensor], ranks: Ranks) -> None:
    """Write the log-probs and the gradients of all ranks."""
    named = policy.causal_lm.named_parameters()
    gradients = {n: p.grad for n, p in named if p.grad is not None}
    whole = _gathered(gather_buckets(gradients, ranks))
    if ranks.is_first:
        Path(job.out).mkdir(parents=True, exist_ok=True)
        whole["logprobs"] = torch.cat(scores)
        save_file(whole, Path(job.out, f"{job.name}.safetensors"))


def _gathered(buckets: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket in buckets for name, tensor in bucket.items()}


def _save(job: Job, policy: PolicyModel, optimizer: GuardedOptimizer, ranks: Ranks) -> None:
    directory = Path(job.save)
    if job.is_sharded:
        end_saving(begin_saving(directory, policy, {"train": optimizer}, ranks.apart()))
        return
    buckets = gather_buckets(policy_tensors(policy), ranks)
    if job.lora_rank:
        base = base_tensors(policy.causal_lm)
        del base["lm_head.weight"]  # tied
        buckets = gather_buckets(base, ranks, change=merging(policy.causal_lm))
    weights = _gathered(buckets)
    state = gather_optimizer(optimizer, ranks)
    if ranks.is_first:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        torch.save(state, directory / "optimizer.pt")


def _resume(job: Job, policy: PolicyModel, optimizer: GuardedOptimizer, ranks: Ranks) -> None:
    directory = Path(job.resume)
    if job.is_sharded:
        load_sharded(directory, policy, {"train": optimizer}, ranks)
        return
    fill_weights(policy, [directory / "model.safetensors"], complaint="The checkpoint")
    state = torch.load(directory / "optimizer.pt", mmap=True, weights_only=True)
    load_optimizer(optimizer, state)


class Runner:
    """Runs jobs on all ranks."""

    def __init__(self, facts: str, group: RankGroup[Runner]) -> None:
        self.group = group

    def _require_short(self, job: dict[str, Any]) -> None:
        if self.group.ranks.rank == job["refusing_rank"]:
            raise InvalidInput("The job is too long.", remedy="Shorten it.")

    @collective(check=_require_short)
    def run(self, job: dict[str, Any]) -> None:
        run(Job(**job), self.group.ranks)


def lead(runner: Runner, jobs: list[dict[str, Any]]) -> None:
    """What the first rank does: a job that is refused leaves its error instead of a curve."""
    for job in jobs:
        try:
            runner.run(job)
        except DialoopError as error:
            if job["refusing_rank"] < 0:
                raise
            text = f"{error.reason} {error.message}"
            Path(job["out"], f"{job['name']}.json").write_text(json.dumps(text), "utf-8")


def main() -> None:
    """Run the jobs as the rank that the environment names."""
    torch.set_num_threads(1)
    disable_progress_bar()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    init_method = os.environ.get("INIT_METHOD", "env://")
    mesh = json.loads(os.environ.get("MESH", "{}"))
    timeout_s = float(os.environ.get("TIMEOUT_S", "60"))
    with join_ranks(
        rank=rank, size=size, init_method=init_method, timeout_s=timeout_s, **mesh
    ) as ranks:
        group = RankGroup(ranks, Runner)
        if ranks.is_first:
            with closing(group):
                lead(group.make(""), json.loads(Path(sys.argv[1]).read_text("utf-8")))
        else:
            group.serve()


if __name__ == "__main__":
    main()
