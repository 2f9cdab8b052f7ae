"""A loss of your own. A config names it: `[train] loss = "my_loss:reinforce"`.

`inputs.mean` divides by the number of trained tokens of the whole train step. The metrics appear in
metrics.jsonl under their names.
"""

from dialoop_learning.loss.losses import LossInputs, LossOutput


def reinforce(inputs: LossInputs, *, scale: float = 1.0) -> LossOutput:
    """Return the mean of -scale * advantage * log-prob over the sampled tokens."""
    advantages = inputs.require("advantages")
    loss = inputs.mean(-scale * advantages * inputs.policy_logprobs)
    return LossOutput(loss, {"sampled_logprob": inputs.mean(inputs.policy_logprobs.detach())})
