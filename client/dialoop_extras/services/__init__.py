"""What services offer where extras are installed.

Runs of text environments and trials enter over gRPC and REST, and OpenEnv's clients over a socket.
"""
