"""The session engine, which the environment service and `dialoop.local` share.

Calls (create, reset, step, close) enter; openings, outcomes and typed errors leave. The service
adds encoding and the reaper; `dialoop.local` adds only the caller's view of the results.
"""
