"""What a running stack does at this moment: its services, its queue, and who waits for whom.

The addresses of a stack enter, as stack.json has them; snapshots leave. Nothing here changes a run.
"""

from __future__ import annotations

from dialoop_ops.now.blocked import Blocked as Blocked
from dialoop_ops.now.snapshot import Now as Now
from dialoop_ops.now.snapshot import ServiceNow as ServiceNow
from dialoop_ops.now.watcher import Watcher as Watcher
