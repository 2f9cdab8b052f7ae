"""The session engine: what a session does, in the environment service and in one process alike.

Calls (create, reset, step, close) enter; openings, outcomes and typed refusals leave. The service
adds encoding and the reaper; `dialoop.local` adds nothing but the caller's view of the results.
"""
