"""The embedded stack: every service on one machine, in one command, supervised."""
