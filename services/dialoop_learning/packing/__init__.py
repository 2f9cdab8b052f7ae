"""Packing: sequences of tokens as rows without padding.

Token rows enter; packed batches leave.
"""
