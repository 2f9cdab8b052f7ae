"""Losses: each a pure function of per-token values, with its inputs, KL terms and corrections.

Log-probs and advantages enter; a scalar and its metrics leave.
"""
