"""OpenAI's wire: chat completions, completions and models.

OpenAI's JSON enters; OpenAI's JSON or server-sent events leave.
"""
