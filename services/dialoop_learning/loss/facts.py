"""What is known of learning without torch: what each loss needs, and names that a config gives.

facts_of("rloo").leave_one_out      # True
facts_of("my_project:mine")         # what holds for a loss of your own

A new built-in loss is an entry here and a function in `losses.py`. Config and checks read this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Aggregation = Literal["token", "sequence", "prompt", "constant", "sum", "none"]
"""How token losses become one number.

token: their mean over the update (DAPO, arXiv 2503.14476). sequence: the mean of each trajectory's
own mean (GRPO, arXiv 2402.03300). prompt: the mean of the token means of each prompt's group.
constant: the mean over trajectories of sums divided by one constant, as the longest answer (Dr.
GRPO, arXiv 2503.20783). sum: the plain sum. none: each token's own term, for a loop of your own; a
config has no such value.

A trajectory whose history was rewritten has several sequences and counts once, as its tokens are
one answer (infra/decisions/0021-a-forked-trajectory-counts-once.md).

An update is one step of the optimiser: it trains one of the `num_minibatches` parts of a
train step. TRL's "bnpo" counts each micro-batch by itself, and its "dapo" takes the mean of all
updates made from one generation. torchrl calls sequence "prompt_mean".
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """A loss as its paper has it. The defaults hold for a loss named by its import path.

    formula: the function in `learning.loss.losses`; empty: the one with the loss's own name.
    options: arguments of that function. whiten: normalise advantages over the train step.
    needs_advantages: false where the loss trains tokens whatever their advantage.
    needs_reference, needs_proximal: the loss reads `ref_logprobs`, `proximal_logprobs`.
    needs_feedback: the loss trains trajectories with words on failed checks alone; `ref_logprobs`
    are the policy's own, which has read these words.
    imitates: the loss trains whole sequences, and an advantage only says whether the scorer chose
    the sequence (`top_k`). Such a loss also trains on demonstrations.
    divide_by_std, leave_one_out, drop_uniform: how the scorer should prepare the groups.
    """

    formula: str = ""
    options: Mapping[str, float] = field(default_factory=dict)
    aggregation: Aggregation = "token"
    whiten: bool = False
    needs_advantages: bool = True
    needs_reference: bool = False
    needs_proximal: bool = False
    needs_feedback: bool = False
    imitates: bool = False
    divide_by_std: bool = True
    leave_one_out: bool = False
    drop_uniform: bool = False

    @property
    def holds_to_reference(self) -> bool:
        """Return whether the loss keeps the policy near the reference, as a KL term would."""
        return self.imitates and self.needs_reference


LOSSES: Mapping[str, LossFacts] = MappingProxyType(
    {
        "grpo": LossFacts(),
        "dr_grpo": LossFacts(formula="grpo", aggregation="constant", divide_by_std=False),
        "dapo": LossFacts(
            formula="grpo", options={"clip_low": 0.2, "clip_high": 0.28}, drop_uniform=True
        ),
        "cispo": LossFacts(),
        "gspo": LossFacts(aggregation="sequence"),
        "rloo": LossFacts(formula="reinforce", divide_by_std=False, leave_one_out=True),
        # It whitens over the whole train step instead of dividing by a group's deviation.
        "reinforce_pp": LossFacts(formula="grpo", whiten=True, divide_by_std=False),
        "dppo_mask": LossFacts(divide_by_std=False),
        "decoupled_ppo": LossFacts(needs_proximal=True),
        "distill": LossFacts(needs_advantages=False, needs_reference=True),
        "self_distillation": LossFacts(needs_advantages=False, needs_feedback=True),
        "sft": LossFacts(imitates=True),
        "minor_sft": LossFacts(aggregation="sequence", imitates=True, needs_reference=True),
    }
)
"""The built-in losses by name."""

DEFAULT_LOSS = "dppo_mask"
"""The loss that RL trains with unless the config names another."""

DEMONSTRATION_LOSS = "sft"
"""The loss of a warm start, and of SFT unless the config names another."""

OPTIMIZERS = ("adamw", "muon")
"""The built-in optimisers."""

Oversize = Literal["error", "drop", "truncate"]
"""What happens to a sequence that is longer than a packed row."""

TINY_MODEL_POSITIONS = 512
"""Number of tokens that the demo's tiny model has positions for."""

TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML without a default system prompt; any role (system, user, assistant, tool)."""


def facts_of(name: str) -> LossFacts:
    """Return the facts of a built-in loss, or the defaults for a loss of the user's own."""
    return LOSSES.get(name) or LossFacts()
