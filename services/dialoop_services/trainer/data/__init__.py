"""The data of a train step: leased groups, demonstrations, and what of them cannot be trained.

Leases and files enter; sorted batches, and groups to drop with a reason, leave.
"""
