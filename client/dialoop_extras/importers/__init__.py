"""Configs of other trainers as keys of ours.

A file of verl or TRL enters; a job file leaves, with what became of each key.
"""
