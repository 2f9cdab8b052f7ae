"""Conformance kits: of environments and of inference engines.

An address or an engine enters; a list of checks leaves, each passed or failed with a reason.
"""
