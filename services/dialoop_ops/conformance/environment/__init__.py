"""The checks that any environment must pass, and a scripted play to run them on.

An environment enters; a report of what it breaks leaves.
"""

from dialoop_ops.conformance.environment.checks import CHECKS as CHECKS
from dialoop_ops.conformance.environment.checks import Finding as Finding
from dialoop_ops.conformance.environment.checks import check_environment as check_environment
