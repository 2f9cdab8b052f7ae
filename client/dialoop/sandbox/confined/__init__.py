"""The fork server and the interpreters that confine themselves and run code.

`python -I -S` starts them by path, so they import only the standard library and each other. Code
enters on a channel; a status and two output files leave.
"""
