"""The loss that keeps a mixture of experts using all of them, against transformers' own formula."""

from __future__ import annotations

import pytest
import torch
from dialoop.errors import InvalidConfig
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.model.experts import balance_of, routers_of, watch_routers
from dialoop_learning.model.policy import load_policy
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.training import forward_backward
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from benchmarks.servers.families import make_family

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
IDS = [5, 9, 17, 30, 41, 8, 77, 23, 6, 54]


def row(length: int = 10):
    return TokenRow.from_demonstration(IDS[:length], [False] + [True] * (length - 1))


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    return {name: make_family(name, folder / name) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_transformers_own_number_where_a_router_takes_the_likeliest(name, directories):
    policy = load_policy(directories[name])
    policy.take_balance(1.0)
    balance = policy(pack_rows([row()])).balance.detach()
    with torch.no_grad(), watch_routers(routers_of(policy.causal_lm)) as routed:
        policy(pack_rows([row()]))
    assert len(routed) == len(routers_of(policy.causal_lm)) > 0
    assert float(balance) == pytest.approx(float(balance_of(routed)), abs=1e-5)
    num_experts, top_k = routed[0].logits.shape[-1], routed[0].experts.shape[-1]
    if name in ("qwen3_moe", "gpt_oss"):
        logits = tuple(each.logits for each in routed)
        expected = load_balancing_loss_func(logits, num_experts, top_k)
        assert float(balance) == pytest.approx(float(expected), abs=1e-5)
    counts = torch.cat([each.experts.flatten() for each in routed])
    assert int(counts.max()) < num_experts


def test_it_is_part_of_the_loss_by_its_coefficient_also_with_recomputed_layers(directories):
    objective = load_objective("sft")
    gradients, losses = [], []
    for coeff, recomputes in ((0.0, False), (0.5, False), (0.5, True)):
        policy = load_policy(directories["qwen3_moe"])
        policy.take_balance(coeff)
        if recomputes:
            policy.checkpoint_activations()
        # However the rows are cut, the shares of an update add up.
        report = forward_backward(policy, [pack_rows([row()]), pack_rows([row(6)])], objective)
        losses.append(report.loss - coeff * report.metrics.get("router_balance", 0.0))
        gradients.append(routers_of(policy.causal_lm)[0].weight.grad.clone())
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert not torch.allclose(gradients[0], gradients[1])
    assert torch.allclose(gradients[1], gradients[2], atol=1e-6)


def test_a_step_against_its_gradient_evens_the_experts_out(directories):
    policy = load_policy(directories["qwen3_moe"])
    policy.take_balance(1.0)
    batch = pack_rows([row()])
    with torch.no_grad():
        for router in routers_of(policy.causal_lm):
            router.weight.mul_(4)  # farther from even
    before = policy(batch).balance
    before.backward()
    with torch.no_grad():
        for router in routers_of(policy.causal_lm):
            router.weight.sub_(0.01 * router.weight.grad / router.weight.grad.norm())
        after = policy(batch).balance
    assert float(after) < float(before.detach())


def test_a_model_without_experts_refuses_it(tmp_path):
    policy = load_policy(make_family("qwen3", tmp_path / "qwen3"))
    with pytest.raises(InvalidConfig, match="no routed experts"):
        policy.take_balance(0.01)
