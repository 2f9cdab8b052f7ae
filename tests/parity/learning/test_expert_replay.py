"""Experts that an engine chose, chosen again in the trainer: what that closes, and what stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from dialoop.errors import InvalidConfig, InvalidInput, Unsupported
from dialoop.sequences import Along, Column, PolicyVersion, Source, sequence_of
from dialoop.trajectory import SamplingParams
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.loss.objective import k3
from dialoop_learning.model.experts import (
    ExpertReplay,
    chosen_experts,
    routers_of,
    routing_of,
    watch_routers,
)
from dialoop_learning.model.policy import load_policy
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.parallel.group_commands import decode, encode
from dialoop_learning.rl.routed_experts import (
    NO_EXPERT,
    Routing,
    experts_column,
    recorded_experts,
)
from dialoop_learning.training import forward_backward, truncate
from dialoop_services.inference.engine import EngineOptions, StopTokens
from dialoop_services.inference.transformers_engine.engine import TransformersEngine
from dialoop_services.trainer.data.batches import TrainedSequence
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings
from transformers import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)

from benchmarks.servers.families import make_family

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
PROMPTS = ([5, 9, 17, 30], [7, 6, 40, 41, 42, 43, 44, 45, 46])
NUM_TOKENS = 20
VERSION = PolicyVersion(lineage="main", number=1)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    return {name: make_family(name, folder / name) for name in FAMILIES}


async def sample_rows(model_dir, *, dtype="float32", num_samples=2):
    """Sequences that the transformers engine sampled and recorded, of two prompts."""
    options = EngineOptions(max_model_len=64, max_num_seqs=4, dtype=dtype, records_experts=True)
    engine = await TransformersEngine.start(model_dir, options)
    sequences = []
    try:
        sampling = SamplingParams(max_new_tokens=NUM_TOKENS, seed=4)
        for ids in PROMPTS:
            answers = await engine.sample(ids, sampling, stop=StopTokens(), num_samples=num_samples)
            for answer in answers:
                prompt = (ids, {"source": Source.PROMPT})
                model = (answer.token_ids, {"source": Source.MODEL, "policy_version": VERSION})
                sequence = sequence_of([prompt, model], logprobs=answer.logprobs)
                column = experts_column(engine.routing, answer.routed_experts, len(sequence))
                sequences.append(
                    replace(sequence, advantage=1.0, columns={"routed_experts": column})
                )
    finally:
        await engine.close()
    return sequences


def learner_of(model_dir, tmp_path, **settings):
    return Learner(TrainerSettings(model_dir=model_dir, run_dir=tmp_path / "run", **settings))


def rows_of(learner, sequences):
    trained = [
        TrainedSequence(sequence=s, group_index=0, trajectory_index=i, temperature=1.0)
        for i, s in enumerate(sequences)
    ]
    return learner.rows_to_train(trained, current=VERSION)


def disturb_routers(policy, *, scale=0.5):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for router in routers_of(policy.causal_lm):
            noise = torch.randn(router.weight.shape, generator=generator)
            router.weight.add_(noise * scale * router.weight.std())


def largest_difference(policy, rows):
    """The largest distance in nats between the engine's log-probs and the policy's."""
    with torch.no_grad():
        scores = policy(pack_rows(rows)).logprobs
    return float((scores - torch.cat([row.inference_logprobs for row in rows])).abs().max())


def mismatch(learner, rows):
    """The KL in nats between engine and trainer, estimated as k3."""
    own = torch.cat(learner.logprobs_of_rows(rows))
    return float(k3(torch.cat([row.inference_logprobs for row in rows]), own).mean())


def without_record(rows):
    return [replace(row, routed_experts=None) for row in rows]


@pytest.mark.parametrize("name", FAMILIES)
def test_any_record_is_followed_and_gradients_reach_the_router(name, directories):
    policy = load_policy(directories[name])
    routing, routers = policy.routing, routers_of(policy.causal_lm)
    generator = torch.Generator().manual_seed(5)
    shape = (12, routing.num_layers, routing.num_experts)
    recorded = torch.rand(shape, generator=generator).argsort(-1)[..., : routing.top_k]
    recorded[-1] = NO_EXPERT
    row = TokenRow.from_demonstration(list(range(5, 17)), [False] + [True] * 11)
    batch = pack_rows([replace(row, routed_experts=recorded.short())])
    with watch_routers(routers) as routed:
        scores = policy(batch)
    chosen = chosen_experts(routed)
    assert torch.equal(chosen[:-1].sort(-1).values, recorded[:-1].sort(-1).values)
    assert int(chosen[-1].min()) >= 0
    assert int(scores.replayed.num_recorded) == 11 * routing.num_layers
    assert 0 < int(scores.replayed.num_differing) <= 11 * routing.num_layers
    scores.logprobs.sum().backward()
    assert all(float(router.weight.grad.abs().sum()) > 0 for router in routers)
    # Afterwards each router chooses for itself again.
    plain = policy(pack_rows([row]))
    assert plain.replayed is None
    assert not torch.allclose(plain.logprobs, scores.logprobs, atol=1e-3)


def test_a_router_that_returns_experts_first_is_watched_and_followed():
    config = GraniteMoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=2,
    )
    model = GraniteMoeForCausalLM(config).eval()
    routers = routers_of(model)
    routing = routing_of(model, routers)
    assert routing == Routing(num_layers=2, top_k=2, num_experts=6)
    ids = torch.arange(8)[None]
    with torch.no_grad(), watch_routers(routers) as routed:
        model(input_ids=ids)
    own = chosen_experts(routed)
    replay = ExpertReplay(routers, routing, (own + 1) % 6)
    with torch.no_grad(), replay.running(), watch_routers(routers) as routed:
        model(input_ids=ids)
    assert torch.equal(chosen_experts(routed), (own + 1) % 6)
    assert 0 < int(replay.counts.num_differing) <= int(replay.counts.num_recorded) == 16


def test_routers_that_could_not_be_replayed_are_refused_before_they_are_recorded():
    config = PhimoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = PhimoeForCausalLM(config).eval()
    with pytest.raises(InvalidConfig, match="PhimoeTopKRouter, which do not choose") as caught:
        routing_of(model, routers_of(model))
    assert caught.value.reason == "NO_ROUTED_EXPERTS"


def test_experts_of_a_group_that_the_router_leaves_out_keep_their_weights(tmp_path):
    grouped = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
    policy = load_policy(make_family("deepseek_v2", tmp_path / "grouped", fields=grouped))
    (router, *_) = routers_of(policy.causal_lm)
    hidden = torch.randn(8, router.weight.shape[1])
    own = router(hidden)[2]
    others = (own.sort(-1).values + 2) % 4  # the two experts of the other group
    assert not (own[:, :, None] == others[:, None, :]).any()
    replay = ExpertReplay([router], policy.routing, others[:, None])
    with replay.running():
        logits, weights, experts = router(hidden)
    assert torch.equal(experts, others)
    scores = logits.softmax(-1).gather(-1, others) * router.routed_scaling_factor
    torch.testing.assert_close(weights, scores)
    assert int(replay.counts.num_differing) == 8


@pytest.mark.parametrize("name", FAMILIES)
def test_a_record_of_its_own_choice_changes_nothing(name, directories):
    policy = load_policy(directories[name])
    row = TokenRow.from_demonstration(list(range(5, 17)), [False] + [True] * 11)
    with torch.no_grad(), watch_routers(routers_of(policy.causal_lm)) as routed:
        own = policy(pack_rows([row])).logprobs
    recorded = replace(row, routed_experts=chosen_experts(routed).short())
    with torch.no_grad():
        scores = policy(pack_rows([recorded]))
    torch.testing.assert_close(scores.logprobs, own, atol=1e-5, rtol=0)
    assert int(scores.replayed.num_differing) == 0


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
async def test_replay_closes_what_a_disturbed_router_opens(name, directories, tmp_path):
    learner = learner_of(directories[name], tmp_path, num_minibatches=1)
    rows = rows_of(learner, await sample_rows(directories[name]))
    policy = learner.state.policy
    assert largest_difference(policy, rows) < 1e-4
    disturb_routers(policy, scale=0.05)
    apart = largest_difference(policy, without_record(rows))
    together = largest_difference(policy, rows)
    assert apart > 0.03
    assert together < apart / 4, (apart, together)
    own, replayed = mismatch(learner, without_record(rows)), mismatch(learner, rows)
    assert own > 1e-5
    assert own > 10 * replayed > 0, (own, replayed)
    report = learner.train_step(rows)
    assert 0.01 < report.metrics["routing_differs"] < 0.2
    assert report.fresh_mismatch_kl == pytest.approx(replayed, rel=0.05)  # of the loss's own pass


async def test_a_train_step_measures_both_on_a_part_of_its_rows(directories, tmp_path):
    learner = learner_of(directories["gpt_oss"], tmp_path)
    rows = rows_of(learner, await sample_rows(directories["gpt_oss"], num_samples=8))
    disturb_routers(learner.state.policy, scale=0.05)
    probed = rows[: sum(len(row.token_ids) for row in rows) // 8 // len(rows[0].token_ids)]
    assert len(probed) == 2
    expected = mismatch(learner, probed), mismatch(learner, without_record(probed))
    metrics = learner.train_step(rows).metrics
    own, replayed = metrics["own_routing_mismatch_kl"], metrics["replayed_mismatch_kl"]
    assert (replayed, own) == pytest.approx(expected, rel=0.01)


async def test_replay_closes_part_of_what_half_precision_opens(directories, tmp_path):
    learner = learner_of(directories["qwen3_moe"], tmp_path)
    sequences = await sample_rows(directories["qwen3_moe"], dtype="bfloat16", num_samples=8)
    rows = rows_of(learner, sequences)
    own, replayed = mismatch(learner, without_record(rows)), mismatch(learner, rows)
    assert own > 1.2 * replayed > 0, (own, replayed)
    assert 0 < learner.train_step(rows).metrics["routing_differs"] < 0.05


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
async def test_packed_rows_equal_rows_alone_also_where_records_of_a_prompt_differ(
    name, directories, tmp_path
):
    objective = load_objective("sft")
    learner = learner_of(directories[name], tmp_path)
    rows = rows_of(learner, await sample_rows(directories[name]))
    # The second answer to the first prompt had its prompt computed with other experts.
    other = rows[1].routed_experts.clone()
    other[1] = (other[1] + 1) % 4
    rows[1] = replace(rows[1], routed_experts=other)
    rows[2] = replace(rows[2], routed_experts=None)
    gradients = []
    for batches, recomputes in (
        ([pack_rows(rows, pad_to=128)], False),
        ([pack_rows(rows)], True),
        ([pack_rows([row]) for row in rows], False),
    ):
        policy = load_policy(directories[name])
        disturb_routers(policy)
        if recomputes:
            policy.checkpoint_activations()
        with torch.no_grad():
            scores = torch.cat([policy(batch).logprobs for batch in batches])
        forward_backward(policy, batches, objective)
        gradients.append((scores, torch.cat([p.grad.flatten() for p in policy.parameters()])))
    for scores, gradient in gradients[1:]:
        torch.testing.assert_close(scores, gradients[0][0], atol=2e-5, rtol=0)
        distance = (gradient - gradients[0][1]).norm() / gradient.norm()
        assert float(distance) < 1e-4
    policy = load_policy(directories[name])
    with torch.no_grad():
        own = policy(pack_rows(without_record(rows))).logprobs
    assert float((own - gradients[0][0]).abs().max()) > 1e-3


async def test_a_setting_leaves_the_records_alone(directories, tmp_path):
    sequences = await sample_rows(directories["qwen3_moe"])
    learner = learner_of(directories["qwen3_moe"], tmp_path, replay_routed_experts=False)
    rows = rows_of(learner, sequences)
    assert all(row.routed_experts is None for row in rows)
    assert "routing_differs" not in learner.train_step(rows).metrics


def test_a_record_is_cut_with_its_row_and_reaches_other_ranks():
    experts = torch.arange(24).reshape(6, 2, 2).short()
    row = replace(
        TokenRow.from_demonstration([1, 2, 3, 4, 5, 6], [False] + [True] * 5),
        routed_experts=experts,
    )
    assert torch.equal(truncate(row, 4).routed_experts, experts[:4])
    (sent,) = decode(encode([row]))
    assert torch.equal(sent.routed_experts, experts)
    assert torch.equal(sent.token_ids, row.token_ids)


def spoilt(sequence, change):
    column = sequence.columns["routed_experts"]
    values = column.values.copy()
    return replace(
        sequence, columns={"routed_experts": change(Column(values=values, along=Along.TOKENS))}
    )


def set_numbers(*numbers):
    def change(column):
        column.values[2, 1] = numbers
        return column

    return change


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (lambda c: replace(c, values=c.values[:, :1]), "BAD_COLUMN", "of 1 layers"),
        (lambda c: replace(c, values=c.values[..., :1]), "BAD_COLUMN", "1 experts a token"),
        (lambda c: replace(c, values=c.values[..., 0]), "BAD_COLUMN", "2 axes"),
        (lambda c: replace(c, values=c.values.astype("f4")), "BAD_COLUMN", "float32"),
        (set_numbers(1, 4), "OUT_OF_RANGE", r"\[1, 4\] for token 2 in layer 1"),
        (set_numbers(1, 1), "OUT_OF_RANGE", r"\[1, 1\] for token 2"),
        (set_numbers(1, 255), "OUT_OF_RANGE", r"\[1, 255\] for token 2"),
    ],
)
async def test_a_record_that_cannot_be_the_models_is_refused_before_the_step(
    change, reason, words, directories, tmp_path
):
    learner = learner_of(directories["qwen3_moe"], tmp_path)
    before = {k: v.clone() for k, v in learner.state.policy.state_dict().items()}
    good, *others = await sample_rows(directories["qwen3_moe"])
    with pytest.raises(InvalidInput, match=f"routed_experts .*{words}") as caught:
        rows_of(learner, [*others, spoilt(good, change)])
    assert caught.value.reason == reason
    after = learner.state.policy.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


async def test_a_model_without_experts_refuses_a_record(directories, tmp_path):
    sequences = await sample_rows(directories["qwen3_moe"])
    learner = learner_of(make_family("qwen3", tmp_path / "qwen3"), tmp_path)
    with pytest.raises(InvalidInput, match="the model has 0 with 0") as caught:
        rows_of(learner, sequences)
    assert "replay_routed_experts = false" in caught.value.remedy


def test_a_router_that_chooses_otherwise_is_refused_and_never_ignored(directories):
    policy = load_policy(directories["qwen3_moe"])
    (first, *_) = routers_of(policy.causal_lm)

    class SortingRouter(type(first)):
        def forward(self, hidden):
            logits = torch.nn.functional.linear(hidden, self.weight)
            weights, experts = logits.softmax(-1).sort(descending=True)
            return logits, weights[:, : self.top_k], experts[:, : self.top_k]

    first.__class__ = SortingRouter
    experts = torch.zeros(3, policy.routing.num_layers, policy.routing.top_k).long()
    experts[..., 1] = 1
    replay = ExpertReplay([first], policy.routing, experts)
    with replay.running(), pytest.raises(Unsupported, match="do not choose by one top-k"):
        first(torch.zeros(3, first.weight.shape[1]))
    assert "forward" not in vars(first)


def test_experts_beyond_a_byte_take_two():
    routing = Routing(num_layers=1, top_k=2, num_experts=256)
    computed = np.array([[[255, 0]], [[7, 9]]])
    column = experts_column(routing, computed, 3)
    assert column.values.dtype == np.uint16
    sequence = sequence_of([([1, 2, 3], {"source": Source.PROMPT})])
    sequence = replace(sequence, columns={"routed_experts": column})
    experts = recorded_experts(sequence, routing)
    assert experts.tolist() == [[[255, 0]], [[7, 9]], [[NO_EXPERT, NO_EXPERT]]]
