"""Wires: the dialects in which agents ask the policy, each in a file or folder of its own.

A body and a recording enter; what the replica sampled leaves, in the dialect's shapes.
"""
