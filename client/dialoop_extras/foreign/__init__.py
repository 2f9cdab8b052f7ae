"""Environments of other libraries (OpenEnv, TorchRL) as Dialoop environments.

A foreign environment or its address enters; an `Environment` leaves.
"""
