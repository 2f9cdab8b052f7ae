"""What every service needs: a gRPC server, settings, logs, errors on the wire, and a clean end.

Servicers and settings enter; a server that serves them leaves. Nothing here knows a service.
"""

from dialoop_services.runtime.hosting import Connect, Host, OwnProcess
from dialoop_services.runtime.logs import configure_logs, log_fields
from dialoop_services.runtime.process import run
from dialoop_services.runtime.server import GrpcServer
from dialoop_services.runtime.settings import ServerSettings, load

__all__ = [
    "Connect",
    "GrpcServer",
    "Host",
    "OwnProcess",
    "ServerSettings",
    "configure_logs",
    "load",
    "log_fields",
    "run",
]
