"""Dialoop: reinforcement learning for chat models as asynchronous services."""

__version__ = "0.1.0"
