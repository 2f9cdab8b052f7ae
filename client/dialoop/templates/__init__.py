"""Chat templates: render a history as text, parse text back, and mark who wrote which character.

Histories and Jinja sources enter; text, character masks and histories leave. No token id is known
here.
"""
