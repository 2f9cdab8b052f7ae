"""Async clients that speak domain types: one module per service, all on a `channel.Channel`.

Domain values enter, and domain values or errors of `dialoop.errors` leave. `blocking` holds twins
of the clients for callers without an event loop.
"""
