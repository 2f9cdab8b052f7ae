"""Processes of one machine: start, watch, restart and end them, with their ports and logs.

Commands with variables enter; ready services, or the reason why one is not, leave.
"""
