"""Async clients that speak domain types: one module per service, all on a `channel.Channel`."""
