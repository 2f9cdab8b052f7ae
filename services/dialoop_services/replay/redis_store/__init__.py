"""The queue on Redis: streams, hashes and one Lua script for each change.

Store calls enter; their answers leave, durable as far as Redis is set to be.
"""
