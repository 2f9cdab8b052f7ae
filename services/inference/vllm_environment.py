"""The variables that vLLM and its processes read as they start; what is set already stays."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch

_LEVEL = "WARNING"
# It warns at every start, in three processes, of what is always so on a CPU.
_TALKATIVE = "vllm.triton_utils.importing"


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
    """The logging that vLLM would set up itself, but for one logger; its processes read it too."""
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
            }
        },
        "loggers": {
            "vllm": {"handlers": ["vllm"], "level": _LEVEL, "propagate": False},
            _TALKATIVE: {"level": "ERROR"},
        },
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    return path
