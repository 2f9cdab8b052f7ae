"""Algorithms of reinforcement learning that need neither torch nor I/O.

Rewards, policy versions and lengths enter; advantages, selections and packing plans leave.
"""
