"""The job file and the settings that services share.

TOML and variables enter; validated settings with the origin of each value leave.
"""
