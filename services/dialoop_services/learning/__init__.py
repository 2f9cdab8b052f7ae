"""Algorithms that need torch: packed batches, log-probs, losses, models."""
