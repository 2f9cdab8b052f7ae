"""Tokens: a tokenizer, and the builder that keeps exactly the tokens that were sampled.

Messages and sampled ids enter; `Sequence` values with segments and owners leave.
"""
