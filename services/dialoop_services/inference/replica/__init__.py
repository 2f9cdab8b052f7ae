"""One replica: admission, batching, pauses for loads, and whose turn the device is.

Requests enter; they reach the engine in order, or leave as a typed refusal.
"""
