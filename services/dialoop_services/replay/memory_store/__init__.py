"""The queue in memory: the readable specification of the Redis store, and its twin in tests.

Requests of ReplayService enter; their answers leave. Nothing survives the process.
"""
