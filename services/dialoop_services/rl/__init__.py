"""Algorithms of reinforcement learning that need neither torch nor I/O."""
