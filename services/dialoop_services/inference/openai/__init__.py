"""The OpenAI door: chat completions, completions and models, over the same replica.

OpenAI's JSON enters; OpenAI's JSON or server-sent events leave.
"""
