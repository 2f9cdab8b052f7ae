"""The servers of a service: gRPC and REST, in a process of their own or all in one process.

Servicers and settings enter; a server that serves them leaves. Nothing here knows a service.
"""

from dialoop_services.hosting.hosts import Connect as Connect
from dialoop_services.hosting.hosts import Host as Host
from dialoop_services.hosting.hosts import OwnProcess as OwnProcess
from dialoop_services.hosting.server import GrpcServer as GrpcServer
