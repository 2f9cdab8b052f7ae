"""Weights of a replica: announced versions, the files or tensors that arrive, and adapters.

Publications enter; checked files, tensors and adapters that an engine can load leave.
"""
