"""The session engine: which episode a session plays, in which order, and what a retry gets.

Calls (create, reset, step, close) enter; openings, outcomes and typed refusals leave. The
environment service adds encoding and time-to-live around it.
"""
