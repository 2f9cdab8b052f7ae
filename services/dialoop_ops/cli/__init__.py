"""The `dialoop` command: one module per command, imported when the command is called.

Words of the command line enter; text on the terminal and an exit code leave.
"""
