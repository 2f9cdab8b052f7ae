"""LoRA: adapter layers, their configuration file, and the base weights they belong to.

A model enters; the same model with trainable adapters, or its merged weights, leaves.
"""
