"""Run `dialoop audit`: what is silently wrong in runs and in dumps of rollouts."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from dialoop.errors import InvalidInput
from dialoop.templates.chat_template import ended_as_written
from dialoop.tokens.tokenizer import Tokenizer
from pydantic import TypeAdapter, ValidationError

from dialoop_ops.audit import AuditReport, Claims
from dialoop_ops.audit import audit as audit_path
from dialoop_ops.cli.console import say


def audit(arguments: argparse.Namespace) -> int:
    """Print what is wrong with each path; return 1 where a fault shows, else 0."""
    claims = _claims(arguments.claim)
    tokenizer = None
    if arguments.tokenizer:
        tokenizer = ended_as_written(Tokenizer.from_directory(arguments.tokenizer))
    reports = [
        audit_path(_path(name, arguments.root), claims=claims, tokenizer=tokenizer)
        for name in arguments.path
    ]
    if arguments.json:
        say(json.dumps([report.as_json() for report in reports], indent=2, ensure_ascii=False))
    else:
        for report in reports:
            _print(report)
    return int(any(report.findings for report in reports))


def _path(name: str, root: Path) -> Path:
    """Return the path, or the run of that name."""
    path = Path(name)
    return path if path.exists() or not (root / name).is_dir() else root / name


def _claims(words: list[str]) -> Claims:
    types = get_type_hints(Claims)
    names = [field.name for field in fields(Claims)]
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in names or not equals:
            raise InvalidInput(
                f"--claim {word} names no claim.", remedy=f"Use NAME=VALUE with {', '.join(names)}."
            )
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if name in ("stop", "rewards"):
            value = (*values.get(name, ()), text)
        try:
            values[name] = TypeAdapter(types[name]).validate_python(value)
        except ValidationError:
            raise InvalidInput(
                f"--claim {word} has no value of its kind.", remedy="Give a number, or a text."
            ) from None
    return Claims(**values)


def _print(report: AuditReport) -> None:
    say(f"{report.path}: {report.num_rollouts} trajectories ({report.kind})")
    for note in report.notes:
        say(f"  note         {note}")
    for finding in report.findings:
        say(f"  {finding.severity.upper():<12} {finding.fault}: {finding.message}")
        say(f"               {finding.count} of {finding.total}; {finding.remedy}")
        for evidence in finding.evidence:
            say(f"               - {evidence}")
    faults = {finding.fault for finding in report.findings}
    clean = [fault for fault in report.checked if fault not in faults | report.limits.keys()]
    if clean:
        say(f"  not found    {', '.join(clean)}")
    for fault, limit in report.limits.items():
        if fault not in faults:
            say(f"  in part      {fault}: not found, but {limit}")
    for fault, reason in report.not_checked.items():
        say(f"  not checked  {fault}: {reason}")
