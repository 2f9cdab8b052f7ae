"""The durable queue between collector, scorer and trainer: tasks, groups, leases, credits."""
