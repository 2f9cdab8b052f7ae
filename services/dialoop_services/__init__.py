"""The services of Dialoop: one package per process, and the rooms that they share.

Messages of `dialoop.v1` enter and leave over gRPC or REST. The services do not import each other.
"""

import os

# Before anything imports gRPC, whose own log holds what strangers send, unescaped and without end.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from dialoop.old_names import tell_old_names

tell_old_names()
