"""Publishing weights: export, sending to every replica, and probes that each serves them.

A learner's weights enter; an announced policy version leaves.
"""
