"""Recovery: checkpoints, the journal of steps since, and doing those steps again.

The state after a step enters; after a kill the same state leaves.
"""
