"""What every service needs beside its servers: settings, logs, errors on the wire, and a clean end.

Nothing here knows a service, or that there is REST.
"""

from dialoop_services.runtime.logs import configure_logs, log_fields
from dialoop_services.runtime.process import run
from dialoop_services.runtime.settings import ServerSettings, load

__all__ = ["ServerSettings", "configure_logs", "load", "log_fields", "run"]
