"""Blocking twins of the async clients, made of the clients themselves, and the loop they run on.

Calls of threads without an event loop enter; results and errors of the async clients leave.
"""
