"""The variables that vLLM and its processes read as they start; what is set already stays."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path

import torch

_LEVEL = "WARNING"
# What vLLM warns of at every start and end on a CPU, where it is always so, and known.
_KNOWN = (
    "Triton",
    "Enforce eager set",
    "Inductor compilation was disabled",
    "SSM cache type",
    "not found in LD_PRELOAD",
    "force killing",
)


class Unknown(logging.Filter):
    """Lets pass what somebody may have to act on."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record says something that is not known already."""
        text = record.getMessage()
        return record.levelno > logging.WARNING or not any(known in text for known in _KNOWN)


def prepare() -> None:
    """Nothing from the network, no compiler on a CPU, and warnings only of what matters."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", _LEVEL)
    if not torch.cuda.is_available():
        # All layers run eagerly; what is left would ask for a C++ compiler at the first token.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if os.environ["VLLM_LOGGING_LEVEL"] == _LEVEL:
        os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(_logging_file()))


def _logging_file() -> Path:
    """The logging that vLLM would set up itself, with our filter; its processes read it too."""
    path = Path(tempfile.mkdtemp(prefix="dialoop-vllm-")) / "logging.json"
    form = "(%(processName)s pid=%(process)d) %(levelname)s %(asctime)s [%(name)s] %(message)s"
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"vllm": {"format": form, "datefmt": "%m-%d %H:%M:%S"}},
        "handlers": {
            "vllm": {
                "class": "logging.StreamHandler",
                "formatter": "vllm",
                "level": _LEVEL,
                "stream": "ext://sys.stdout",
                "filters": ["unknown"],
            }
        },
        "filters": {"unknown": {"()": f"{__name__}.{Unknown.__name__}"}},
        "loggers": {"vllm": {"handlers": ["vllm"], "level": _LEVEL, "propagate": False}},
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    return path
