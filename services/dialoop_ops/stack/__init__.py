"""The embedded stack: start, supervise and stop every service on one machine with one command.

A job config enters. Running services leave, and for a job its summary and exit code.
"""
