"""The `dialoop` command: one module per command, imported when it is asked for."""
