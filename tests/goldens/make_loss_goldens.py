"""Write tests/goldens/losses_trl.json and losses_torchrl.json with the peers' own code.

Run in an environment that has both; infra/test_compat.sh makes one, and compares anew:

PYTHONPATH=. /tmp/dialoop-compat/peers/bin/python tests/goldens/make_loss_goldens.py
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from tests.goldens.losses_from_torchrl import torchrl_results
from tests.goldens.losses_from_trl import trl_results
from tests.goldens.losses_samples import draw_tensors


def peer_goldens() -> dict[str, dict[str, Any]]:
    """Of each peer its versions, the tensors, and all it makes of them."""
    tensors = draw_tensors()
    trl = trl_results(tensors)
    tensors["advantages"] = trl["advantages"]["group"]
    inputs = {"tensors": tensors}
    return {
        "trl": {"made_with": _versions("trl", "transformers", "torch")} | inputs | trl,
        "torchrl": {"made_with": _versions("torchrl", "tensordict", "torch")}
        | inputs
        | torchrl_results(tensors),
    }


def _versions(*packages: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in packages}


def main() -> None:
    """One file per peer, one line per case."""
    for name, parts in peer_goldens().items():
        lines = []
        for part, rows in parts.items():
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(row)}" for k, row in rows.items())
            lines.append(f"{json.dumps(part)}: {{\n{inner}\n}}")
        path = Path(__file__).with_name(f"losses_{name}.json")
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
