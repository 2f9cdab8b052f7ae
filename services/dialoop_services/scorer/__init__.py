"""Scores whole groups: rewards, reference log-probs, KL, advantages."""
