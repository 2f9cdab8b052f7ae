"""One replica: admission, batching, pauses for loads, and the lease of its device.

Requests enter; they reach the engine in order, or leave as a typed refusal.
"""
