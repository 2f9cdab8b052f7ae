"""Recovery: checkpoints, the journal of the steps since, and repeating those steps.

The state after a step enters; after a kill the same state leaves.
"""
