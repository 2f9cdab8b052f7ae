"""The variables that vLLM and its processes read as they start; what is set already stays."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

LOGGING = Path(__file__).with_name("logging.json")
"""The logging that vLLM would set up itself, with our filter; all its processes read it."""

# What vLLM warns of at every start and end on a CPU, where it is always so, and known.
_KNOWN = (
    "Triton",
    "Enforce eager set",
    "Inductor compilation was disabled",
    "SSM cache type",
    "not found in LD_PRELOAD",
    "force killing",
)


def prepare() -> None:
    """Nothing from the network, no compiler on a CPU, and warnings only of what matters."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not torch.cuda.is_available():
        # All layers run eagerly; what is left would ask for a C++ compiler at the first token.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if "VLLM_LOGGING_LEVEL" not in os.environ:  # who asks for more gets all of it
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(LOGGING))


class Unknown(logging.Filter):
    """Lets pass what somebody may have to act on."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record says something that is not known already."""
        text = record.getMessage()
        return record.levelno > logging.WARNING or not any(known in text for known in _KNOWN)
