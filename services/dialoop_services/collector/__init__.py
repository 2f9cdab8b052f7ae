"""Plays groups of episodes: leases tasks, plays them, appends what was played."""
