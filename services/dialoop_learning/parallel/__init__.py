"""Training on several ranks: sharding, rows per rank, and commands that all ranks run in step.

Rows and commands enter; the same numbers as one process would give leave.
"""
