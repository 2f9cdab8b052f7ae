"""What every service needs beside its servers: settings, logs, errors on the wire, and a clean end.

Nothing here knows a service, or that there is REST.
"""

from dialoop_services.runtime.logs import configure_logs as configure_logs
from dialoop_services.runtime.logs import log_fields as log_fields
from dialoop_services.runtime.process import run as run
from dialoop_services.runtime.settings import ServerSettings as ServerSettings
from dialoop_services.runtime.settings import load as load
