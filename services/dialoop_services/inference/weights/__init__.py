"""Weights of a replica: which version is announced, how its files or tensors arrive, and adapters.

Publications enter; parameters that an engine can load, with their proof, leave.
"""
