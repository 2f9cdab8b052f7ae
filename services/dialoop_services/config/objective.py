"""Define [train.objective]: what goes with any loss, in RL and, where it applies, in SFT.

[train.objective]
entropy_coeff = 0.01
correction = "tis"
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dialoop_services.config.values import Section


class ObjectiveSettings(Section):
    """What goes with any loss: aggregation, KL, entropy bonus, correction for sampler mismatch."""

    aggregation: Literal["", "token", "sequence", "prompt", "constant", "sum"] = ""
    """How token losses become one number; empty: as the loss's paper does it. "token", "sequence",
    "prompt" and "constant" are means over these; "sum" is the plain sum."""
    constant: float = Field(default=0.0, ge=0)
    """Divisor of aggregation "constant", in tokens; 0: max_new_tokens."""
    kl_coeff: float = Field(default=0.0, ge=0)
    """Weight of the KL term in the loss; 0: none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the KL term is estimated from sampled tokens: "k1", "k2" or "k3"."""
    kl_to: Literal["ref", "inference"] = "ref"
    """Model to which the KL term measures the distance. "ref" is the scorer's reference model,
    "inference" the engine that sampled."""
    kl_inference_coeff: float = Field(default=0.0, ge=0)
    """Weight of a second KL term, to the engine that sampled, beside one to "ref"; 0: none."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in the loss; 0: none."""
    router_balance_coeff: float = Field(default=0.0, ge=0)
    """Coefficient of the loss that keeps a mixture of experts using all of them alike (Switch
    Transformer's); 0: none. Models without experts refuse it."""
    entropy_metric: bool = True
    """Whether entropy is measured without an entropy bonus too; never with logprob_kernel "cut"."""
    correction: Literal["", "tis", "icepop", "token_mask", "sequence_mask", "kl_mask"] = ""
    """Weights of tokens for which engine and trainer compute different log-probs; empty: none.
    "tis", "icepop", "token_mask" and "sequence_mask" use the ratio of trainer to engine. "kl_mask"
    drops tokens that are far from the model of correction_to."""
    correction_low: float = Field(default=0.5, ge=0)
    """Smallest ratio of trainer to engine probability that a correction keeps."""
    correction_high: float = Field(default=2.0, gt=0)
    """Largest ratio of trainer to engine probability that a correction keeps. For "kl_mask" it is
    the largest squared log-ratio over two."""
    correction_to: Literal["inference", "ref"] = "inference"
    """Model that "kl_mask" keeps the policy near. "inference" is the engine that sampled, "ref" the
    scorer's reference model."""
    proximal: bool = False
    """Whether to clip around the policy at the start of the train step, not around the engine's."""
    num_epochs: int = Field(default=1, ge=1)
    """Number of times that a train step goes over its batch."""
    max_fresh_mismatch_kl: float = Field(default=1e-2, gt=0)
    """KL between engine and trainer above which an alarm is raised, in nats. It is measured on data
    that the current policy sampled."""

    @model_validator(mode="after")
    def _require_a_correction_to_the_reference(self) -> Self:
        if self.correction_to == "ref" and self.correction != "kl_mask":
            raise ValueError(
                f"correction_to is ref, which only correction kl_mask can use, and correction is "
                f"'{self.correction}': set correction to kl_mask, or correction_to to inference"
            )
        return self
