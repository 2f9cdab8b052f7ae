"""The environment service: sessions, episodes and tasks of chat environments over gRPC."""
