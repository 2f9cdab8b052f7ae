"""The queue on Redis: streams, hashes and one Lua script for each change.

Requests of ReplayService enter; their answers leave. State is as durable as Redis is configured.
"""
