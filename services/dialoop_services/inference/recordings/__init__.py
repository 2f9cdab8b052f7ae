"""Recordings: conversations of an agent over OpenAI's API, kept token by token.

Calls and sampled answers enter; trajectories in which each sampled token occurs once leave.
"""
