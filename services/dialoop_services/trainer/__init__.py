"""The trainer: leases scored groups, trains on them, publishes weights, survives being killed."""
