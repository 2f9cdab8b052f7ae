"""The policies that a run has on disk, and those that it published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dialoop.errors import NotFound
from dialoop.reasons import Reason
from dialoop_learning.rl.staleness import publish_order, version_of_name
from dialoop_services.trainer.records.rows import METRICS

from dialoop_ops.runs.display import read_rows
from dialoop_ops.runs.index import Point, RunIndex
from dialoop_ops.runs.run_config import flat_config

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
_LATEST = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicies:
    """A run's policies on disk, and the model directory it started from.

    stop: strings that end its answers.
    """

    policies: Path
    model_dir: Path
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, run_dir: Path) -> RunPolicies:
        """Return the policies of a run's directory; raise NotFound when it is not a run."""
        mark = run_dir / "run.json"
        if not mark.is_file():
            raise NotFound(
                f"{run_dir} is not a run of Dialoop (it has no {mark.name}).",
                reason=Reason.RUN_NOT_FOUND,
                remedy="Give the directory of a run, such as runs/demo.",
            )
        config = json.loads(mark.read_text("utf-8"))["config"]
        directory = config["model"]["directory"]
        return cls(
            policies=run_dir / "policies",
            model_dir=Path(directory) if directory else run_dir / "model",
            stop=tuple(config.get("collector", {}).get("stop") or ()),
        )

    @property
    def versions(self) -> tuple[str, ...]:
        """Return the published versions that are still on disk, oldest first."""
        return tuple(sorted(versions_in(self.policies), key=_place_of))

    def policy(self, version: str) -> Path:
        """Return the directory of a version, of `latest`, or of a number that one lineage has.

        Raises NotFound (POLICY_NOT_FOUND) when no policy or several match.
        """
        versions = self.versions
        matches = [name for name in versions if name == version or name.endswith(f"-{version}")]
        if version == _LATEST and versions:
            matches = [self._latest(versions)]
        if version in versions:
            matches = [version]
        if len(matches) != 1:
            if version in (name for _, name in self.published()):
                raise NotFound(
                    f"The policy {version} was deleted to save disk space.",
                    reason=Reason.POLICY_GONE,
                    remedy=f"Use one of: {', '.join(versions)}. To keep all of a later run, "
                    "set keep_policies = 0 in [train].",
                )
            raise NotFound(
                f"{self.policies} has {'several' if matches else 'no'} policies {version!r}.",
                reason=Reason.POLICY_NOT_FOUND,
                remedy=f"Use one of: {', '.join(versions) or 'none'}.",
            )
        return self.policies / matches[0]

    def published(self) -> list[tuple[int | None, str]]:
        """Return each version that the run has published with its train step, by its metrics.

        A restore leaves several of one step; the last belongs to the weights that went on.
        """
        metrics = self.policies.parent / METRICS
        rows = read_rows(metrics) if metrics.is_file() else ()
        return [
            (row.get("train_step"), f"{row['lineage']}-{row['policy_version']}")
            for row in rows
            if row.get("kind") == "publish"
        ]

    def _latest(self, versions: Sequence[str]) -> str:
        try:
            latest = json.loads((self.policies / "latest.json").read_text("utf-8"))
        except (OSError, ValueError):  # it is missing, or a disk damaged it
            latest = {}
        name = str(Path(str(latest.get("path", ""))).parent)
        return name if name in versions else versions[-1]


def versions_in(policies: Path) -> set[str]:
    """Return the names of the policies whose weights are in a run's folder of policies."""
    return {path.parent.name for name in (WEIGHTS, ADAPTER) for path in policies.glob(f"*/{name}")}


def _place_of(version: str) -> tuple[tuple[int, int], str]:
    return publish_order(version_of_name(version)), version


_NUMBERS = ("publish_s", "max_logprob_difference", "num_replicas", "num_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """A publish. Numbers that its row lacks are None; one that is not finite is NaN.

    max_logprob_difference: the proof, the largest difference in nats between the trainer's and any
    replica's log-probs of the probe prompts. publish_s: until the last replica had the weights.
    is_on_disk: `dialoop export` can still write it.
    """

    time: float
    train_step: int
    lineage: str
    policy_version: int | None
    publish_s: float | None
    max_logprob_difference: float | None
    num_replicas: float | None
    num_bytes: float | None
    is_on_disk: bool


def publishes_of(index: RunIndex) -> tuple[Publish, ...]:
    """Return the publishes in the order of writing, without those that a restore discarded."""
    heads: dict[int, Point] = {}
    values: dict[int, dict[str, float]] = {}
    for name in _NUMBERS:
        for point in index.points(f"publish/{name}"):
            heads[point.row] = point
            values.setdefault(point.row, {})[name] = point.value
    on_disk = versions_in(index.run_dir / "policies")
    return tuple(
        Publish(
            time=head.time,
            train_step=head.train_step,
            lineage=head.lineage or "",
            policy_version=head.policy_version,
            is_on_disk=f"{head.lineage}-{head.policy_version}" in on_disk,
            **{name: values[row].get(name) for name in _NUMBERS},
        )
        for row, head in sorted(heads.items())
    )


def proof_bound(index: RunIndex) -> float | None:
    """Return the largest difference in nats that the run's gate allows; None where it has none."""
    text = flat_config(index.run_dir).get("gates.logprob_difference_at_most", "null")
    bound = json.loads(text)
    return None if bound is None else float(bound)
