"""Bounds of numbers that can be trained: the queue takes no others, and the trainer reads none."""

MAX_SIZE = 1e9
"""Of rewards and advantages. Beyond it, squares and sums in float32 lose the digits that tell them
apart."""

# A log-softmax in float32 rounds to at most a little above 0.
_LOGPROB = (-1e4, 1e-3)

BOUNDS = {
    "inference_logprobs": _LOGPROB,
    "ref_logprobs": _LOGPROB,
    "token_advantages": (-MAX_SIZE, MAX_SIZE),
}
"""The lowest and highest number of a column, by its name."""
