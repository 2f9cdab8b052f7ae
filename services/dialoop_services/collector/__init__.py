"""The collector: it leases tasks, plays groups of episodes, and appends them to the queue.

Task leases enter; groups of trajectories leave, or the lease goes back with a reason.
"""
