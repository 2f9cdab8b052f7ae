"""The checks that any environment must pass, and a scripted play to run them on.

An environment enters; a report of what it breaks leaves.
"""

from dialoop_ops.conformance.environment.checks import CHECKS, Finding, check_environment

__all__ = [
    "CHECKS",
    "Finding",
    "check_environment",
]
