"""What a running stack does at this moment: its services, its queue, and who waits for whom.

The addresses of a stack enter, as stack.json has them; snapshots leave. Nothing here changes a run.
"""

from __future__ import annotations

from dialoop_ops.now.blocked import Blocked
from dialoop_ops.now.snapshot import Now, ServiceNow
from dialoop_ops.now.watcher import Watcher

__all__ = ["Blocked", "Now", "ServiceNow", "Watcher"]
