"""The REST server: HTTP and JSON in front of the same servicers that gRPC calls.

HTTP requests enter; protobuf messages go to a servicer, and JSON or problem documents leave.
"""
