"""Publishing weights: export, offer to every replica, proof that each serves them.

A learner's weights enter; an announced policy version leaves.
"""
