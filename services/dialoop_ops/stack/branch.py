"""Start a run from a policy of another: `dialoop train CONFIG --from RUN@STEP --run NAME`.

The new run begins at step 0 with the weights that the other run published after that train step.
Its optimizer state and its position in the data are new. A LoRA adapter is merged into its model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dialoop.errors import InvalidConfig, NotFound, Unavailable
from dialoop.reasons import Reason
from dialoop_services.config.file import Override

from dialoop_ops.runs.policies import RunPolicies
from dialoop_ops.runs.run_config import find_run

_BEFORE = ("heldout_greedy_before_at_most", "heldout_sampled_gain_at_least")
"""Gates that compare with an untrained policy, which a branch does not start from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A policy of another run to start from. `train_step`: the step that made it."""

    run_dir: Path
    train_step: int
    policy: str

    @property
    def model_dir(self) -> Path:
        """Return where the policy lies as a model directory once `export` has run."""
        return self.run_dir / "branches" / self.policy

    def export(self) -> None:
        """Write the policy as a model directory, unless an earlier branch did."""
        if self.model_dir.is_dir():
            return
        adapter = self.run_dir / "policies" / self.policy / "adapter_model.safetensors"
        export_policy(self.run_dir, self.policy, self.model_dir, merged=adapter.is_file())

    def overrides(self) -> list[Override]:
        """Return what a job that starts here changes in its config."""
        values = {
            "model.directory": str(self.model_dir.resolve()),
            "warm_start.num_steps": 0,
            **{f"gates.{name}": None for name in _BEFORE},
        }
        origin = f"--from {self.run_dir.name}@{self.train_step}"
        return [Override(path=path, value=value, origin=origin) for path, value in values.items()]

    def as_json(self) -> dict[str, Any]:
        """Return what run.json says about it."""
        mark = json.loads((self.run_dir / "run.json").read_text("utf-8"))
        return {
            "run": self.run_dir.name,
            "run_id": mark["run_id"],
            "train_step": self.train_step,
            "policy": self.policy,
        }


def find_branch(text: str, root: Path) -> Branch:
    """Return the branch point that RUN@STEP names; RUN is a name under `root`, or a directory.

    Raises InvalidConfig for another form, and (RUN_NOT_FOUND, POLICY_NOT_FOUND, POLICY_GONE) where
    there is no such run, step or policy.
    """
    name, at, step = text.rpartition("@")
    if not (name and at and step.isdecimal()):
        raise InvalidConfig(f"--from {text} is not RUN@STEP.", remedy="Write it as --from demo@20.")
    run_dir = find_run(name, root)
    number = int(step)
    try:
        run = RunPolicies.of(run_dir)
        published = dict(run.published())
        if number not in published:
            steps = [str(at) for at, name in published.items() if name in run.versions]
            raise InvalidConfig(
                f"{run_dir} published no policy after step {number}.",
                reason=Reason.POLICY_NOT_FOUND,
                remedy=f"Its steps with a policy on disk: {', '.join(steps) or 'none'}.",
            )
        policy = run.policy(published[number])
    except NotFound as error:
        raise InvalidConfig(error.message, reason=error.reason, remedy=error.remedy) from error
    return Branch(run_dir=run_dir, train_step=number, policy=policy.name)


def export_policy(run_dir: Path, version: str, target: Path, *, merged: bool = False) -> None:
    """Write a published policy as a model directory, with the trainer's export.

    Raises Unavailable (EXPORT_FAILED) where that fails; its reason is on the standard error.
    """
    # In a process of its own: the stack imports neither torch nor safetensors.
    words = [sys.executable, "-m", "dialoop_ops.stack", "export"]
    words += [str(run_dir), version, str(target), *(["--merged"] if merged else [])]
    if subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode:
        raise Unavailable(
            f"{version} of {run_dir} could not be exported.",
            reason=Reason.EXPORT_FAILED,
            remedy="The line above says why.",
        )
