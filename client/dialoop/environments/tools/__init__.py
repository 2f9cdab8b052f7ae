"""Tools a policy may call: how calls are written, checked and run, and the tools that ship.

A policy's message enters; results of its calls, as messages, leave.
"""
