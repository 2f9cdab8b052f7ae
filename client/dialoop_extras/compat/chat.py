"""torchrl's `torchrl.data.llm.chat`, where its first documentation has the names of `history`."""

from dialoop_extras.compat.history import *  # noqa: F403 - the same names
from dialoop_extras.compat.history import __all__ as __all__
