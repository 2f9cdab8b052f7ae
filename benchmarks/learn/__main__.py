"""Train every shipped algorithm from one warm start (`make learn`); exit 1 if one does not learn.

    python -m benchmarks.learn infra/configs/demo.toml infra/configs/learn [--only grpo,lora]

runs the demo unless a finished one is there, exports its first policy as runs/learn/warm_start and
its last as runs/learn/teacher, trains each config of the folder, and sums all up in one table and
runs/learn/summary.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.errors import DialoopError, InvalidConfig
from dialoop_ops.cli.main import ROOT
from dialoop_ops.cli.main import main as stack
from dialoop_ops.stack.branch import export_policy
from dialoop_services.config.file import load_config
from rich.console import Console

from benchmarks.learn.report import AlgorithmResult, failures_of, kept_outcomes, table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dialoop_services.config.job import JobConfig

    Train = Callable[[Path], int]
    Export = Callable[[Path, str, Path], None]

FOLDER = "learn"
"""Folder under runs/ for the exported models and the summary."""
_EXPORTS = (("main-1", "warm_start"), ("latest", "teacher"))
_STOPPED_BY_SIGNAL = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnCase:
    """One config to train. `name` is its file's, as `--only` takes it."""

    name: str
    path: Path
    config: JobConfig

    def needs_demo(self, root: Path) -> bool:
        """Return whether a model of the demo is its start or its teacher."""
        named = (self.config.model.directory, self.config.scorer.reference_model)
        own = (root / FOLDER).resolve()
        return any(Path(path).resolve().parent == own for path in named if path)


def cases_of(folder: Path, only: str = "") -> list[LearnCase]:
    """Return the folder's configs, or those in `only`; InvalidConfig when one is missing."""
    paths = {path.stem: path for path in sorted(folder.glob("*.toml"))}
    names = [name.strip() for name in only.split(",") if name.strip()] or list(paths)
    unknown = [name for name in names if name not in paths]
    if unknown or not names:
        raise InvalidConfig(
            f"There is no config {', '.join(unknown) or 'at all'} in {folder}.",
            remedy=f"Choose from {', '.join(paths)}." if paths else "Name a folder of configs.",
        )
    loaded = {name: load_config(paths[name], environment=os.environ) for name in names}
    return [
        LearnCase(name=name, path=paths[name], config=config)  # in the order of `only`
        for name, config in loaded.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Everything that `make learn` does, with the functions that train and export."""

    demo: Path
    root: Path
    train: Train
    export: Export
    console: Console

    def run(self, cases: Sequence[LearnCase]) -> int:
        """Train all cases; return 0 if every gate holds, 1 if one fails, 128 + n when stopped."""
        code = self._prepare() if any(case.needs_demo(self.root) for case in cases) else 0
        if code:
            return code
        outcomes: list[AlgorithmResult] = []
        for case in cases:
            self.console.rule(f"learn: {case.name}")
            # An earlier run's summary must not count for a run that does not even begin.
            (self.root / case.config.run / "summary.json").unlink(missing_ok=True)
            code = self.train(case.path)
            if code > _STOPPED_BY_SIGNAL:
                return code
            outcomes.append(self._outcome(case, code))
            self._write(outcomes)
        self.console.print(table_of(outcomes))
        for failure in failures_of(outcomes):
            self.console.print(f"FAILS: {failure}", style="bold red", soft_wrap=True)
        self.console.print(f"{self.root / FOLDER}/summary.json", highlight=False)
        return 0 if all(outcome.holds for outcome in outcomes) else 1

    def _prepare(self) -> int:
        """Finish the demo and export its models; return the demo's exit code when it is not 0."""
        if not self._demo_id():
            self.console.rule("learn: the demo, for its warm start and as a teacher")
            code = self.train(self.demo)
            if code:  # a demo that has not learned makes all that follows meaningless
                return code
        for version, name in _EXPORTS:
            target = self.root / FOLDER / name
            shutil.rmtree(target, ignore_errors=True)
            self.export(self._demo_dir, version, target)
        return 0

    @property
    def _demo_dir(self) -> Path:
        return self.root / load_config(self.demo, environment={}).run

    def _demo_id(self) -> str:
        """Return the run id of a demo whose gates all hold, else an empty string."""
        summary = self._demo_dir / "summary.json"
        if not summary.is_file():
            return ""
        if not all(json.loads(summary.read_text("utf-8"))["gates"].values()):
            return ""
        return str(json.loads((self._demo_dir / "run.json").read_text("utf-8"))["run_id"])

    def _outcome(self, case: LearnCase, code: int) -> AlgorithmResult:
        start = self._demo_id() if case.needs_demo(self.root) else ""
        path = self.root / case.config.run / "summary.json"
        summary = json.loads(path.read_text("utf-8")) if path.is_file() and code in (0, 1) else None
        return AlgorithmResult.of(case.name, summary, start=start, seed=case.config.seed)

    def _write(self, outcomes: Sequence[AlgorithmResult]) -> None:
        """Write the summary, with results of earlier calls for other configs and seeds."""
        path = self.root / FOLDER / "summary.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = kept_outcomes(path, outcomes, start=self._demo_id())
        rows = [asdict(outcome) for outcome in (*kept, *outcomes)]
        path.write_text(json.dumps({"runs": rows}, indent=2) + "\n", encoding="utf-8")


def train_fresh(config: Path) -> int:
    """Run a whole job in place of an earlier one, and return its exit code."""
    return stack(["train", str(config), "--fresh"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every gate of every run holds, 2 for a wrong setting or argument, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learn", description=__doc__)
    parser.add_argument("demo", type=Path, help="config of the demo")
    parser.add_argument("folder", type=Path, help="folder of configs to train")
    parser.add_argument("--only", default="", help="names of configs, as grpo,lora")
    options = parser.parse_args(arguments)
    suite = Suite(
        demo=options.demo, root=ROOT, train=train_fresh, export=export_policy, console=Console()
    )
    try:
        return suite.run(cases_of(options.folder, options.only))
    except DialoopError as error:
        sys.stderr.write(f"dialoop learn: {error}\n")
        return 2 if isinstance(error, InvalidConfig) else 1


if __name__ == "__main__":
    sys.exit(main())
