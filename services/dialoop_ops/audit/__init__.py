"""Find what is silently wrong in rollouts: runs of Dialoop, and dumps of TRL's trainers.

A path enters, a report leaves: findings with their evidence, and the checks that could not be made.
Nothing here changes what it reads.
"""

from dialoop_ops.audit.audit import audit as audit
from dialoop_ops.audit.records import Claims as Claims
from dialoop_ops.audit.report import AuditFinding as AuditFinding
from dialoop_ops.audit.report import AuditReport as AuditReport
from dialoop_ops.audit.report import Evidence as Evidence
