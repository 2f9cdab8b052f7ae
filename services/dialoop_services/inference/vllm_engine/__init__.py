"""The vLLM engine: sampling, log-probs, weight loading and sleep on AsyncLLM.

Token ids and weights enter; sampled tokens with log-probs and policy versions leave.
"""
