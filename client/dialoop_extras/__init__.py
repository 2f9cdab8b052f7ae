"""Extras: what other libraries and the first documents call things, on top of the core.

Their names, files and protocols enter; calls of Dialoop's own functions leave. Lower packages reach
what is here through the entry points of the group `dialoop.extras` alone.
"""
