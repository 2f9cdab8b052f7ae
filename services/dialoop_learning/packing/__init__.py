"""Packing: sequences of tokens as rows without padding, shared prefixes, and what does not fit.

Token rows enter; packed batches leave.
"""
