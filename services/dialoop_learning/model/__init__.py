"""The policy model: loading, packed attention, log-probs, and the matrix products behind them.

A model directory and packed rows enter; log-probs and hidden states leave.
"""
