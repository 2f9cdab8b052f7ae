"""Who may call a service: bearer tokens with scopes, and TLS.

Settings and the headers of a call enter; a refusal leaves, or nothing does and the call goes on.
"""
