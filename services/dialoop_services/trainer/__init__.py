"""The trainer: it leases scored groups, trains on them, publishes weights and survives a kill.

Scored groups and demonstrations enter; policy versions, checkpoints and metrics leave.
"""
