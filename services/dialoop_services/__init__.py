"""The services of Dialoop: one package per process, and the rooms that they share."""
