"""A conversation that forks: every sampled token is trained once, in the sequence that owns it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dialoop.chat import History, Message
from dialoop.sequences import ForkCause, PolicyVersion, Sequence
from dialoop_learning.loss.facts import Aggregation
from dialoop_learning.model.policy import PolicyModel
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.training import StepCounts, loss_inputs
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.samples.chat_families import CHATML, THINKING, builder

V1 = PolicyVersion(lineage="main", number=1)
SAID = ("<think>\nhm\n</think>\n\none", "<think>\nagain\n</think>\n\ntwo", "three")


def _play(template: str) -> tuple[list[Sequence], list[int]]:
    """The sequences of a conversation of three answers, and all that was sampled, in order."""
    tokens = builder(template)
    history = History((Message(role="user", content="q"),))
    sequences: list[Sequence] = []
    sampled: list[int] = []
    for text in SAID:
        before = sequences[-1] if sequences else None
        covered = len(history) - 1 if before is not None else 0
        prompt = tokens.prompt(history, context=before, num_context_messages=covered)
        ids = [*tokens.tokenizer.encode(text).ids, tokens.tokenizer.end_of_turn_ids[0]]
        answer = tokens.answer(prompt, ids, logprobs=[-1.0] * len(ids), versions=[(len(ids), V1)])
        if before is not None and prompt.sequence.fork_cause is ForkCause.NONE:
            sequences[-1] = before.extended_by(answer.appended)
        else:
            sequences.append(answer.appended)
        sampled += ids
        history = history.append(answer.message).append(Message(role="user", content="more"))
    return sequences, sampled


@pytest.mark.parametrize(("template", "num_sequences"), [(THINKING, 3), (CHATML, 1)])
def test_a_forked_conversation_never_trains_a_token_twice(
    template: str, num_sequences: int
) -> None:
    sequences, sampled = _play(template)
    assert len(sequences) == num_sequences
    batch = pack_rows([TokenRow.from_sequence(s) for s in sequences])
    assert batch.packed_tokens[batch.loss_mask].tolist() == sampled


def test_packed_logprobs_are_those_of_transformers_at_three_million_parameters() -> None:
    policy = PolicyModel(_three_million())
    generator = torch.Generator().manual_seed(1)
    lengths = [(20, 200), (60, 10), (33, 1), (41, 120), (25, 77), (58, 31)]
    rows = [
        TokenRow(
            token_ids=torch.randint(0, 4096, (num_prompt + num_answer,), generator=generator),
            response_mask=torch.arange(num_prompt + num_answer) >= num_prompt,
        )
        for num_prompt, num_answer in lengths
    ]
    with torch.no_grad():
        alone = [_by_transformers(policy, row) for row in rows]
        batch = pack_rows(rows)
        packed = batch.split(policy(batch).logprobs)
    for ours, theirs in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def _three_million() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.08,
    )
    model = Qwen2ForCausalLM(config).eval()
    assert 2.5e6 < sum(p.numel() for p in model.parameters()) < 3.5e6
    return model


def _by_transformers(policy: PolicyModel, row: TokenRow) -> torch.Tensor:
    model = policy.causal_lm
    model.set_attn_implementation("eager")
    logprobs = model(row.token_ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    model.set_attn_implementation("dialoop_packed")
    chosen = logprobs.gather(-1, row.token_ids[1:, None]).squeeze(-1)
    return chosen[row.response_mask[1:]]


def _row(prompt: int, num_tokens: int, trajectory: int | None, group: int = 0) -> TokenRow:
    return TokenRow(
        token_ids=torch.arange(prompt, prompt + 1 + num_tokens),
        response_mask=torch.arange(1 + num_tokens) > 0,
        inference_logprobs=torch.full((num_tokens,), -1.0),
        advantages=torch.ones(num_tokens),
        group_index=group,
        trajectory_index=trajectory,
    )


def _weights(batches: list[list[TokenRow]], aggregation: Aggregation) -> list[float]:
    """The weight of each token in the update's loss, over all packed rows."""
    packed = [pack_rows(rows) for rows in batches]
    counts = StepCounts.of(packed)
    weights: list[float] = []
    for batch in packed:
        logprobs = torch.zeros(batch.num_loss_tokens, requires_grad=True)
        inputs = replace(
            loss_inputs(batch, logprobs, counts=counts), aggregation=aggregation, constant=10.0
        )
        inputs.mean(logprobs).backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        weights += logprobs.grad.tolist()
    return weights


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_forked_trajectory_weighs_as_one_answer_however_it_is_packed(cut: int) -> None:
    # Trajectory 0 has sequences of 1 and 3 tokens, trajectory 1 one of 2; a loner has 2.
    rows = [_row(5, 1, 0), _row(9, 3, 0), _row(20, 2, 1), _row(30, 2, None)]
    batches = [part for part in (rows[:cut], rows[cut:]) if part]
    expected = [1 / 12] * 4 + [1 / 6] * 2 + [1 / 6] * 2
    assert _weights(batches, "sequence") == pytest.approx(expected)
    assert _weights(batches, "constant") == pytest.approx([1 / 30] * 8)
    assert _weights(batches, "token") == pytest.approx([1 / 8] * 8)
    assert _weights(batches, "prompt") == pytest.approx([1 / 8] * 8)


def test_trajectories_of_different_groups_are_different_ones() -> None:
    rows = [_row(5, 1, 0, group=0), _row(9, 3, 0, group=1)]
    assert _weights([rows], "sequence") == pytest.approx([1 / 2] + [1 / 6] * 3)


def test_a_forked_trajectory_has_the_gradient_of_the_same_tokens_without_a_fork() -> None:
    """Under another template the same play is one sequence, and is trained with the same weight."""
    forked = [_row(5, 2, 0), _row(9, 2, 0), _row(20, 4, 1)]
    plain = [_row(5, 4, 0), _row(20, 4, 1)]
    for aggregation in ("token", "sequence", "prompt", "constant"):
        assert _weights([forked], aggregation) == pytest.approx(_weights([plain], aggregation))


def test_a_minibatch_never_parts_a_trajectory(tmp_path: Path) -> None:
    learner = Learner(TrainerSettings(model_dir=make_tiny_model(tmp_path), num_minibatches=2))
    own = learner.plan([_row(5, 1, 0), _row(9, 3, 0), _row(20, 2, 1), _row(30, 2, 1)]).own
    seen = [[own.rows[place].trajectory_index for place in order] for order in own.orders]
    assert sorted(seen) == [[0, 0], [1, 1]]
