"""Say where a name is now that README, docs or examples once used: one table, one error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

MOVED: Final = {
    "dialoop.BlockingJob": "dialoop_ops.BlockingJob",
    "dialoop.Job": "dialoop_ops.Job",
    "dialoop.JobResult": "dialoop_ops.JobResult",
    "dialoop.audit": "dialoop_ops.audit",
    "dialoop.cli": "dialoop_ops.cli",
    "dialoop.cli.running_stacks": "dialoop.running_stacks",
    "dialoop.compat": "dialoop_extras.compat",
    "dialoop.conformance": "dialoop_ops.conformance.environment",
    "dialoop.environments.BrowserTools": "dialoop_extras.browser.BrowserTools",
    "dialoop.environments.foreign": "dialoop_extras.foreign",
    "dialoop.environments.game_environment": "dialoop_extras.games.game_environment",
    "dialoop.environments.games": "dialoop_extras.games",
    "dialoop.environments.tools.browser": "dialoop_extras.browser",
    "dialoop.evaluation": "dialoop_ops.evaluation",
    "dialoop.jobs": "dialoop_ops.jobs",
    "dialoop.local.runs": "dialoop_extras.services.runs_client",
    "dialoop.now": "dialoop_ops.now",
    "dialoop.runs": "dialoop_ops.runs",
    "dialoop.tasks.files": "dialoop.environments.tasks.files",
    "dialoop.tasks.messages": "dialoop_extras.importers.messages",
    "dialoop.tasks.mlgym": "dialoop_extras.mlgym",
    "dialoop.tasks.trl": "dialoop_extras.importers.trl",
    "dialoop.tasks.verl": "dialoop_extras.importers.verl",
    "dialoop.text_environment": "dialoop_extras.text_environment",
    "dialoop.token_episodes": "dialoop_extras.token_episodes",
    "dialoop.train": "dialoop_ops.train",
    "dialoop.train_async": "dialoop_ops.train_async",
    "dialoop.trials": "dialoop_extras.trials",
    "dialoop.views.display": "dialoop_ops.runs.display",
    "dialoop.views.pad_output": "dialoop_extras.padding.pad_output",
    "dialoop.views.padding": "dialoop_extras.padding",
    "dialoop.views.run_files": "dialoop_services.trainer.records.rows",
    "dialoop.views.torchrl": "dialoop_extras.torchrl_view",
    "dialoop.wire.runs": "dialoop_extras.services.runs_wire",
    "dialoop_services.collector.partial_answer": "dialoop_services.collector.replicas",
    "dialoop_services.collector.token_episodes": "dialoop_extras.task_players",
    "dialoop_services.config.foreign_keys": "dialoop_extras.importers.foreign_keys",
    "dialoop_services.config.from_trl": "dialoop_extras.importers.from_trl",
    "dialoop_services.config.from_verl": "dialoop_extras.importers.from_verl",
    "dialoop_services.config.imported": "dialoop_extras.importers.imported",
    "dialoop_services.config.losses": "dialoop_learning.loss.facts",
    "dialoop_services.console": "dialoop_ops.console",
    "dialoop_services.environment.openenv_documents": "dialoop_extras.services.openenv_documents",
    "dialoop_services.environment.openenv_door": "dialoop_extras.services.openenv_server",
    "dialoop_services.environment.runs": "dialoop_extras.services.runs",
    "dialoop_services.inference.conformance": "dialoop_ops.conformance.inference",
    "dialoop_services.inference.openai": "dialoop_services.inference.wires.openai",
    "dialoop_services.learning": "dialoop_learning",
    "dialoop_services.learning.loss.loss_inputs": "dialoop_learning.loss.losses",
    "dialoop_services.learning.loss.source_names": "dialoop_extras.source_names",
    "dialoop_services.learning.packing.collates": "dialoop_extras.collates",
    "dialoop_services.learning.packing.seed_interface": "dialoop_extras.seed_interface",
    "dialoop_services.rest.lenient_json": "dialoop_extras.rest.lenient_json",
    "dialoop_services.rest.old_field_names": "dialoop_extras.rest.old_field_names",
    "dialoop_services.rest.padded": "dialoop_extras.rest.padded",
    "dialoop_services.rl": "dialoop_learning.rl",
    "dialoop_services.stack": "dialoop_ops.stack",
    "dialoop_services.stack.launch": "dialoop_ops.launch",
    "dialoop_services.trainer.job.placement": "dialoop_services.trainer.publish.placement",
    "dialoop_services.trainer.recovery.journal": "dialoop_services.trainer.recovery.checkpoint",
}
"""Old dotted name -> new one. What lies below a package moved with it."""


def now_at(name: str) -> str | None:
    """Return the new name of a module or attribute, or None where it never moved."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        if new := MOVED.get(".".join(parts[:length])):
            return ".".join([new, *parts[length:]])
    return None


def refuse(name: str) -> None:
    """Raise ImportError with the new name if `name` moved."""
    if new := now_at(name):
        package = new.partition(".")[0].replace("_", "-")
        inner = "".join(
            f" {old} is {MOVED[old]} now." for old in MOVED if old.startswith(f"{name}.")
        )
        raise ImportError(
            f"{name} is {new} now. Write that instead; the package {package} has it.{inner}",
            name=name,
        )


class _OldNames:
    """Answers for modules that nothing else finds."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        refuse(name)
        return None


def tell_old_names() -> None:
    """Put the finder of old names behind all others, once."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())
