"""Names and arguments of other libraries (torchrl, TRL, torchtune, verifiers) over our own classes.

A user's code with another library's names enters; calls of Dialoop's own functions leave. Nothing
else in the SDK may depend on this room. `from dialoop_extras.compat import GRPOLoss` works for
every name of `offered.OFFERED`; `verifiers` is imported by its module's name.
"""

from typing import Any

from dialoop_extras.compat.offered import LEFT_OUT, OFFERED
from dialoop_extras.compat.sampling import GenerateOptions, generate_options
from dialoop_extras.compat.trials import trial_keys

__all__ = ["LEFT_OUT", "OFFERED", "GenerateOptions", "generate_options", "trial_keys"]


def __getattr__(name: str) -> Any:
    """Load what stands for a source's name; AttributeError for one that is left out says why."""
    if name in LEFT_OUT:
        raise AttributeError(f"dialoop_extras.compat has no {name}. {LEFT_OUT[name]}")
    if name not in OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dialoop_extras.compat.arguments import load_home

    value = load_home(name, OFFERED[name])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *OFFERED})
