"""Settings of what goes with a loss: shared by the config file and the trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ObjectiveSettings(BaseModel):
    """Aggregation, KL term, entropy bonus, correction for sampler mismatch."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    aggregation: Literal["", "token", "sequence", "prompt", "constant", "sum"] = ""
    """How token losses become one number; empty: as the loss's paper has it."""
    constant: float = Field(default=0.0, ge=0)
    """Divisor of aggregation "constant"; 0: max_new_tokens."""
    kl_coeff: float = Field(default=0.0, ge=0)
    """Weight of the KL term; 0 for none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL from sampled tokens."""
    kl_to: Literal["ref", "inference"] = "ref"
    """KL to the scorer's reference model, or to the engine that sampled."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus; 0 for none."""
    entropy_metric: bool = True
    """Measure the entropy where it is no part of the loss, too (never with kernel "cut")."""
    correction: Literal["", "tis", "icepop", "token_mask", "sequence_mask", "kl_mask"] = ""
    """Weights for tokens that engine and trainer see differently; empty for none."""
    correction_low: float = Field(default=0.5, ge=0)
    """Smallest ratio trainer / engine that is kept."""
    correction_high: float = Field(default=2.0, gt=0)
    """Largest ratio that is kept; of kl_mask, the largest squared log-ratio over two."""
    correction_to: Literal["inference", "ref"] = "inference"
    """What kl_mask keeps the policy near: the engine that sampled, or the scorer's reference."""
    proximal: bool = False
    """Clip around the policy as the train step began, not around the engine's."""
    num_epochs: int = Field(default=1, ge=1)
    """Times that a train step goes over its batch."""
    max_fresh_mismatch_kl: float = Field(default=1e-2, gt=0)
    """KL between engine and trainer on data of the present policy that is an alarm, in nats."""

    @model_validator(mode="after")
    def _require_a_correction_to_the_reference(self) -> ObjectiveSettings:
        if self.correction_to == "ref" and self.correction != "kl_mask":
            raise ValueError(
                f"correction_to is ref, and correction '{self.correction}': only kl_mask is of the "
                "reference, the others are of the engine that sampled"
            )
        return self
