"""Environments of this process behind the interface of the environment service's client.

Tasks and the policy's answers enter; openings, outcomes and finished episodes leave, without a
server.
"""
