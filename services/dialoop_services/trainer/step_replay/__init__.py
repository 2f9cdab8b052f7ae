"""Train steps that are kept, and repeated later: `dialoop replay-step`.

A step's groups and all its numbers enter as files; what differs in a repetition leaves.
"""
