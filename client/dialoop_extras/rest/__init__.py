"""Readers of requests in older forms, in front of every REST server.

A body that the first documents wrote enters; one in today's form leaves.
"""
