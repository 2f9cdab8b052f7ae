"""A preset is another library's defaults, in what the trainer and the scorer compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop.errors import InvalidConfig
from dialoop_learning.loss.losses import LossInputs
from dialoop_learning.rl.advantages import group_advantages
from dialoop_services.config.file import load_with_origins, parse_config
from dialoop_services.config.job import JobConfig
from dialoop_services.scorer.settings import ScorerSettings
from dialoop_services.trainer.learner.learner import objective_of
from dialoop_services.trainer.settings import TrainerSettings


def loss_of(job: JobConfig, inputs: LossInputs) -> torch.Tensor:
    settings = TrainerSettings(**TrainerSettings.of_job(job) | {"model_dir": "m"})
    return objective_of(settings)(inputs).loss


def two_answers(**fields: Any) -> LossInputs:
    """Answers of two tokens and of one, on the policy that samples."""
    policy = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    return LossInputs(
        policy_logprobs=policy,
        sequence_index=torch.tensor([0, 0, 1]),
        loss_mask=torch.ones(3, dtype=torch.bool),
        num_tokens=3,
        num_sequences=2,
        inference_logprobs=policy.detach() + torch.tensor([0.1, -0.2, 0.05]),
        proximal_logprobs=policy.detach(),
        ref_logprobs=torch.tensor([-1.5, -1.0, -0.5], dtype=torch.float64),
        advantages=torch.tensor([0.7, 0.7, -0.7], dtype=torch.float64),
        entropy=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        **fields,
    )


def test_torchtunes_loss_and_advantages() -> None:
    job = JobConfig.model_validate({"preset": "torchtune_grpo"})
    inputs = two_answers()
    policy, ref, advantages = inputs.policy_logprobs, inputs.ref_logprobs, inputs.advantages
    assert ref is not None
    assert advantages is not None
    # LinearGRPOLoss: exp(p - sg p) A - 0.1 (exp(ref - p) - (ref - p) - 1), by answer, then the mean
    terms = (policy - policy.detach()).exp() * advantages
    terms = terms - 0.1 * ((ref - policy).exp() - (ref - policy) - 1)
    expected = -(terms[:2].mean() + terms[2:].mean()) / 2
    loss = loss_of(job, inputs)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    (own,) = torch.autograd.grad(loss, policy, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected, policy)
    assert own.tolist() == pytest.approx(theirs.tolist(), rel=1e-6)
    settings = ScorerSettings(**ScorerSettings.of_job(job)).advantages
    assert group_advantages([0.0, 1.0], settings).values == pytest.approx(
        (-0.5 / (0.5**0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4))
    )
    assert job.train.num_minibatches == 1
    assert job.scorer.reference_logprobs


def test_torchrls_loss_and_step_mode() -> None:
    job = JobConfig.model_validate({"preset": "torchrl_grpo"})
    inputs = two_answers()
    base, advantages = inputs.inference_logprobs, inputs.advantages
    assert base is not None
    assert advantages is not None
    ratio = (inputs.policy_logprobs - base).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    expected = -gain.mean() - 0.01 * 2.0
    without_proximal = two_answers()
    loss = loss_of(job, LossInputs(**_fields(without_proximal) | {"proximal_logprobs": None}))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert job.scorer.advantages_of == "turn"


def _fields(inputs: LossInputs) -> dict[str, Any]:
    return {name: getattr(inputs, name) for name in inputs.__slots__}


def test_what_the_file_sets_wins_and_print_says_where_values_are_from(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('preset = "torchtune_grpo"\n[train.objective]\nkl_coeff = 0.5\n')
    loaded = load_with_origins(file, environment={})
    assert loaded.config.train.objective.kl_coeff == 0.5
    assert loaded.config.train.objective.aggregation == "sequence"
    assert loaded.origins["train.objective.kl_coeff"] == str(file)
    assert loaded.origins["train.objective.aggregation"] == "preset torchtune_grpo"


def test_an_unknown_preset_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidConfig, match=r"preset.*torchrl_grpo.*torchtune_grpo"):
        parse_config({"preset": "torchtune"}, source="job.toml")
