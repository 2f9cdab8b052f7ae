"""Algorithms that need torch: models, packed batches, log-probs, losses, optimisers, ranks.

Token rows and a model directory enter; log-probs, gradients and updated weights leave.
"""
