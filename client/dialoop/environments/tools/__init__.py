"""Tools that a policy can call: the syntaxes of calls, their checks, and the built-in tools.

A policy's message enters; the results of its calls leave as messages.
"""
