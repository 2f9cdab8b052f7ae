"""For every loss: packed equals one sequence at a time, in loss and gradient."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dialoop_learning.loss.corrections import Correction
from dialoop_learning.loss.facts import LOSSES
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.loss.objective import Objective
from dialoop_learning.model.policy import PolicyModel, load_policy
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.packing.rows import PackedBatch, TokenRow, pack_rows
from dialoop_learning.training import StepCounts, loss_inputs, whiten_rows

# Prompt and answer tokens: one prompt of two sequences, one of three, answers of one token too.
SHAPES = ((0, 3, 4), (0, 2, 9), (1, 5, 1), (1, 1, 6), (1, 4, 3))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="module")
def policy(directory: Path) -> PolicyModel:
    return load_policy(directory).double()


def _rows(*, pad_like: int | None = None) -> list[TokenRow]:
    generator = torch.Generator().manual_seed(7)
    rows = []
    for prompt, num_prompt, num_answer in SHAPES:
        ids = torch.randint(5, 300, (num_prompt + num_answer,), generator=generator)
        if pad_like is not None:
            ids[-1] = pad_like
        mask = torch.arange(num_prompt + num_answer) >= num_prompt
        inference = -5 - torch.rand(num_answer, generator=generator)
        rows.append(
            TokenRow(
                token_ids=ids,
                response_mask=mask,
                inference_logprobs=inference,
                proximal_logprobs=inference + 0.3 * torch.randn(num_answer, generator=generator),
                ref_logprobs=inference + 0.5 * torch.randn(num_answer, generator=generator),
                advantages=torch.randn((), generator=generator).expand(num_answer),
                staleness=torch.randint(3, (num_answer,), generator=generator).float(),
                group_index=prompt,
            )
        )
    return rows


def _loss_and_gradient(
    policy: PolicyModel, batches: list[PackedBatch], objective: Objective
) -> tuple[float, torch.Tensor]:
    counts = StepCounts.of(batches)
    policy.zero_grad(set_to_none=True)
    total = 0.0
    for batch in whiten_rows(batches) if objective.whiten else batches:
        scores = policy(batch, temperature=0.9, with_entropy=objective.needs_entropy)
        output = objective(
            loss_inputs(batch, scores.logprobs, entropy=scores.entropy, counts=counts)
        )
        output.loss.backward()
        total += float(output.loss.detach())
    gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return total, torch.cat(gradients)


def _objectives() -> list[tuple[str, Objective]]:
    named = [(name, load_objective(name)) for name in LOSSES]
    # Wide clips, so that gradients flow; GSPO's own are narrower than these ratios.
    named.append(("gspo wide", load_objective("gspo", {"clip_low": 0.9, "clip_high": 9.0})))
    named += [
        (f"grpo by {aggregation}", load_objective("grpo", aggregation=aggregation, constant=16.0))
        for aggregation in ("sequence", "prompt", "constant", "sum")
    ]
    named += [
        (f"grpo with {kind}", load_objective("grpo", correction=Correction(kind=kind)))
        for kind in ("tis", "icepop", "token_mask", "sequence_mask", "kl_mask")
    ]
    named.append(("kl", load_objective("grpo", kl_coeff=0.1)))
    named.append(("entropy", load_objective("grpo", entropy_coeff=0.01)))
    return named


@pytest.mark.parametrize(("name", "objective"), _objectives(), ids=lambda v: str(v)[:24])
def test_packed_equals_one_sequence_at_a_time(
    policy: PolicyModel, name: str, objective: Objective
) -> None:
    rows = _rows()
    alone = _loss_and_gradient(policy, [pack_rows([row]) for row in rows], objective)
    packings = {
        "one row": [pack_rows(rows)],
        "permuted": [pack_rows([rows[i] for i in (3, 0, 4, 2, 1)])],
        "padded": [pack_rows(rows[:2], pad_to=32), pack_rows(rows[2:])],
    }
    assert float(alone[1].norm()) > 0 or name == "gspo"
    for packing, batches in packings.items():
        loss, gradient = _loss_and_gradient(policy, batches, objective)
        assert loss == pytest.approx(alone[0], abs=1e-9), packing
        assert float((gradient - alone[1]).norm()) <= 1e-8 * max(1e-9, float(alone[1].norm()))


@pytest.mark.parametrize("name", list(LOSSES))
def test_float32_gradients_agree_to_1e_5_of_their_norm(directory: Path, name: str) -> None:
    single = load_policy(directory)
    rows, objective = _rows(), load_objective(name)
    alone = _loss_and_gradient(single, [pack_rows([row]) for row in rows], objective)
    packed = _loss_and_gradient(single, [pack_rows(rows)], objective)
    assert packed[0] == pytest.approx(alone[0], abs=1e-5)
    assert float((packed[1] - alone[1]).norm()) <= 1e-5 * max(1e-6, float(alone[1].norm()))


def test_a_pad_id_that_is_a_real_token_is_trained(policy: PolicyModel) -> None:
    rows, objective = _rows(pad_like=0), load_objective("grpo")
    alone = _loss_and_gradient(policy, [pack_rows([row]) for row in rows], objective)
    padded = _loss_and_gradient(policy, [pack_rows(rows, pad_to=64, pad_id=0)], objective)
    assert padded[0] == pytest.approx(alone[0], abs=1e-9)
    assert float((padded[1] - alone[1]).norm()) <= 1e-8 * float(alone[1].norm())


def test_a_row_that_is_exactly_full_needs_no_padding() -> None:
    rows = _rows()
    total = sum(len(row.token_ids) for row in rows)
    assert pack_rows(rows, pad_to=total).num_tokens == total


def test_prompts_pads_and_neighbours_get_no_gradient(policy: PolicyModel) -> None:
    """With one sequence's advantage alone, only its own tokens' embeddings move."""
    rows = _rows()
    own = {int(i) for i in rows[1].token_ids}
    silent = [
        row if index == 1 else replace(row, advantages=torch.zeros_like(row.inference_logprobs))
        for index, row in enumerate(rows)
    ]
    hidden: list[torch.Tensor] = []
    embedding = policy.causal_lm.get_input_embeddings()

    def keep(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
        output.retain_grad()
        hidden.append(output)
        return output

    handle = embedding.register_forward_hook(keep)
    try:
        batch = pack_rows(silent, pad_to=64)
        objective = load_objective("grpo", {"clip_low": 0.99, "clip_high": 99.0})
        objective(loss_inputs(batch, policy(batch).logprobs)).loss.backward()
    finally:
        handle.remove()
    assert own
    moved = hidden[0].grad[0].abs().sum(-1) > 0
    # A sequence's last token predicts nothing that is trained, so it has no gradient either.
    inside = (batch.sample_mask == 1) & (batch.position_ids < len(rows[1].token_ids) - 1)
    assert moved.tolist() == inside.tolist()
