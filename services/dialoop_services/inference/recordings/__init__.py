"""Recordings: conversations of an agent over the OpenAI door, kept token by token.

Calls and sampled answers enter; trajectories that own each sampled token once leave.
"""
