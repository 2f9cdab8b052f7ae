"""The loss goldens are what the installed TRL and torchrl make of their tensors, today."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.model.policy import load_policy
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.training import StepCounts, loss_inputs

from tests.goldens.losses_from_torchrl import torchrl_results
from tests.goldens.losses_from_trl import padded_step, trl_results
from tests.goldens.losses_samples import GROUP_SIZE, PROMPTS
from tests.support.samples.peer_losses import peer_goldens

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")


@functools.cache
def _run_peer(peer: str) -> dict[str, Any]:
    """Compute everything anew with the peer's own code."""
    reason = f"{peer} is no part of .venv: see infra/test_compat.sh"
    pytest.importorskip(peer, reason=reason)
    results = {"trl": trl_results, "torchrl": torchrl_results}[peer]
    return results(peer_goldens(peer)["tensors"])


@pytest.mark.parametrize("peer", ["trl", "torchrl"])
def test_losses_and_gradients_are_those_of_the_installed_package(peer: str) -> None:
    actual, golden = _run_peer(peer)["cases"], peer_goldens(peer)["cases"]
    assert list(actual) == list(golden)
    for name, case in golden.items():
        assert actual[name]["settings"] == case["settings"]
        assert actual[name]["loss"] == pytest.approx(case["loss"], rel=1e-9, abs=1e-12)
        gradients = (torch.tensor(result["gradient"]).double() for result in (actual[name], case))
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("peer", ["trl", "torchrl"])
def test_advantages_are_those_of_the_installed_package(peer: str) -> None:
    actual, golden = _run_peer(peer)["advantages"], peer_goldens(peer)["advantages"]
    assert list(actual) == list(golden)
    for name, values in golden.items():
        ours, theirs = _flat(actual[name]), _flat(values)
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def _flat(values: list[Any]) -> list[float]:
    return [v for row in values for v in (row if isinstance(row, list) else [row])]


def test_a_whole_step_of_packed_rows_equals_trls_padded_one(tmp_path: Path) -> None:
    """A real model: masks, alignment, language-model head and loss, all of each.

    The model is float64, TRL's head is float32 whatever the model: hence the tolerances.
    """
    pytest.importorskip("trl", reason="trl is no part of .venv: see infra/test_compat.sh")
    directory = make_tiny_model(tmp_path, seed=0)
    tensors = peer_goldens("trl")["tensors"]
    theirs = padded_step(directory, tensors)
    policy = load_policy(directory).double()
    rows = [_row(tensors, index) for index in range(len(tensors["lengths"]))]
    # Two rows, so that the loss is more than one sum.
    batches = [pack_rows(rows[:4]), pack_rows(rows[4:])]
    counts, loss = StepCounts.of(batches), 0.0
    objective = load_objective("dapo", kl_coeff=0.1)
    for batch in batches:
        output = objective(loss_inputs(batch, policy(batch).logprobs, counts=counts))
        output.loss.backward()  # type: ignore[no-untyped-call]
        loss += float(output.loss.detach())
    assert loss == pytest.approx(theirs["loss"], rel=1e-6)
    ours = dict(policy.causal_lm.named_parameters())
    moved = {name: g for name, g in theirs["gradients"].items() if float(g.norm()) > 0}
    assert len(moved) > 10
    for name, gradient in theirs["gradients"].items():
        gap = float((ours[name].grad - gradient).norm())
        assert gap <= 1e-5 * float(gradient.norm()), name


def _row(tensors: dict[str, Any], index: int) -> TokenRow:
    """Return one sequence of the goldens with its prompt, as the trainer packs it."""
    length = tensors["lengths"][index]
    prompt = PROMPTS[index // GROUP_SIZE]
    trained = torch.tensor(tensors["trained"][index][:length])
    values = {name: torch.tensor(tensors[name][index][:length])[trained] for name in ("old", "ref")}
    return TokenRow(
        token_ids=torch.tensor(prompt + tensors["tokens"][index][:length]),
        response_mask=torch.cat([torch.zeros(len(prompt), dtype=torch.bool), trained]),
        inference_logprobs=values["old"],
        ref_logprobs=values["ref"],
        advantages=torch.full((int(trained.sum()),), tensors["advantages"][index]),
        group_index=index // GROUP_SIZE,
    )
