"""Run a job once for each of several seeds: `dialoop train CONFIG --seeds 0,1,2`.

Each seed is a run of its own, named after the config's run: demo-seed-0, demo-seed-1, ...
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from dialoop.errors import InvalidConfig
from dialoop_services.config.file import LoadedConfig, parse_config
from dialoop_services.config.job import JobConfig

_ORIGIN = "--seeds"


def seeds_of(text: str) -> tuple[int, ...]:
    """Return the seeds that "0,1,2" lists; InvalidConfig for anything else, or one seed twice."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words) or len(set(map(int, words))) < len(words):
        raise InvalidConfig(
            f"--seeds {text} is not a list of different whole numbers.",
            remedy="Write it as --seeds 0,1,2.",
        )
    return tuple(map(int, words))


def for_seed(loaded: LoadedConfig, seed: int) -> LoadedConfig:
    """Return the job with this seed, under a run name that ends in it.

    Raises InvalidConfig where SEED sets the seed too.
    """
    if loaded.origins.get("seed") == "SEED":
        raise InvalidConfig(
            "SEED and --seeds both set the seed.", remedy="Unset the variable SEED."
        )
    run = f"{loaded.config.run}-seed-{seed}"
    # A preset's defaults are in the values already.
    values = loaded.config.model_dump(exclude_unset=True) | {"seed": seed, "run": run}
    return replace(
        loaded,
        config=parse_config(values, source=_ORIGIN),
        origins={**loaded.origins, "seed": _ORIGIN, "run": _ORIGIN},
    )


def ended_with(root: Path, config: JobConfig) -> int | None:
    """Return the exit code of a run that has ended under this very config; None for others."""
    run_dir = root / config.run
    try:
        before = json.loads((run_dir / "run.json").read_text("utf-8"))["config"]
        gates = json.loads((run_dir / "summary.json").read_text("utf-8"))["gates"]
    except (OSError, ValueError, KeyError):
        return None
    if before != config.model_dump(mode="json"):
        return None
    return 0 if all(gates.values()) else 1
