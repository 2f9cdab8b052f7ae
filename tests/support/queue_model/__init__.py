"""The queue as a readable model: what its store in Redis shall do, in plain Python."""
