"""Trials: a game played turn by turn between an agent function and an environment function.

Agents, a `Game` and its settings enter; a scored `Trial`, or an episode of a chat environment,
leaves.
"""
