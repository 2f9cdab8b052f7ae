"""Names and arguments of other libraries (torchrl, TRL, torchtune, verifiers) over our own classes.

A user's code with another library's names enters; calls of Dialoop's own functions leave. Nothing
else in the SDK may depend on this room. `names`, `trl_text` and `verifiers` are imported by name.
"""

from dialoop.compat.sampling import GenerateOptions, generate_options
from dialoop.compat.trials import trial_keys

__all__ = ["GenerateOptions", "generate_options", "trial_keys"]
