"""The durable queue between collector, scorer and trainer: tasks, groups, leases, credits.

Tasks and groups enter by offer and append; leases of them leave, and end by acknowledgement or
return.
"""
