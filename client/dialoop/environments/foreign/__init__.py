"""Environments of other systems (OpenEnv, torchrl, verifiers) played as a Dialoop environment.

A foreign environment object or address enters; an `Environment` leaves.
"""
