"""The environment service: sessions, episodes and tasks of chat environments.

Requests of gRPC, REST and OpenEnv enter; observations, rewards and task pages leave.
"""
