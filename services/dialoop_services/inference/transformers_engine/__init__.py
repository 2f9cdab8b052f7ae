"""The transformers engine: batched sampling on CPU with exact log-probs.

Token ids and weights enter; sampled tokens with log-probs and policy versions leave.
"""
