"""Reward functions, rubrics and KL rewards, and the transforms that apply them to an episode.

Episodes and a user's functions enter; named `Reward` values leave.
"""
