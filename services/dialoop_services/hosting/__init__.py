"""The servers of a service: gRPC and REST, in a process of their own or all in one process.

Servicers and settings enter; a server that serves them leaves. Nothing here knows a service.
"""

from dialoop_services.hosting.hosts import Connect, Host, OwnProcess
from dialoop_services.hosting.server import GrpcServer

__all__ = ["Connect", "GrpcServer", "Host", "OwnProcess"]
