"""Names and arguments of other libraries (torchrl, TRL, torchtune, verifiers) over our own classes.

A user's code with another library's names enters; calls of Dialoop's own functions leave. Nothing
else in the SDK may depend on this room.
"""
