"""Find what is silently wrong in rollouts: runs of Dialoop, and dumps of TRL's trainers.

A path enters, a report leaves: findings with their evidence, and the checks that could not be made.
Nothing here changes what it reads.
"""

from dialoop_ops.audit.audit import audit
from dialoop_ops.audit.records import Claims
from dialoop_ops.audit.report import AuditFinding, AuditReport, Evidence

__all__ = ["AuditFinding", "AuditReport", "Claims", "Evidence", "audit"]
