"""Episodes whose state is one growing text, as TRL's TextEnvironment plays them.

A policy function, tools and a prompt enter; a `TextHistory` with its segments and rewards leaves.
"""
