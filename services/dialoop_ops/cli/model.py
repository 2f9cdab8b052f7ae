"""Run `dialoop model`: look at a model's chat template, or convert a GGUF file."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dialoop.answers import grammar_of
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.templates.chat_template import ChatTemplate
from dialoop.templates.confinement import TemplateConfinement
from dialoop.templates.probe import DROPPED, TemplateProfile, TurnEnds, turn_ends
from dialoop.tokens.tokenizer import Tokenizer

from dialoop_ops.cli.console import rich_console, say, say_json


def check(arguments: argparse.Namespace) -> int:
    """Print what the template of a model directory does, and return 0.

    It renders in a process that is killed where it takes too long. Raises InvalidConfig
    (TOKENIZER_MISSING, TEMPLATE_MISSING, TEMPLATE_INVALID).
    """
    tokenizer = Tokenizer.from_directory(arguments.directory)
    confinement = TemplateConfinement()
    try:
        for name, source in (tokenizer.chat_templates or {"": ""}).items():
            if not source:
                raise InvalidConfig(
                    f"The model directory {arguments.directory} has no chat template.",
                    reason=Reason.TEMPLATE_MISSING,
                    remedy="Add chat_template.jinja there.",
                )
            template = ChatTemplate(source, name=name, make_renderer=confinement.renderer)
            profile = template.with_special_tokens_of(tokenizer).profile
            ends = turn_ends(profile, tokenizer)
            if arguments.json:
                say_json(_facts(name, profile, ends))
            else:
                _print(name, profile, ends)
    finally:
        confinement.close()
    return 0


def from_gguf(arguments: argparse.Namespace) -> int:
    """Write a GGUF file as a Hugging Face model directory, and return 0."""
    from dialoop_learning.model.gguf import convert_gguf

    directory = Path(arguments.directory)
    num_parameters = convert_gguf(Path(arguments.file), directory, dtype=arguments.dtype)
    if arguments.json:
        facts = {"directory": str(directory), "num_parameters": num_parameters}
        say_json(facts | {"dtype": arguments.dtype})
    else:
        say(f"{directory}: {num_parameters / 1e6:,.0f} million parameters in {arguments.dtype}")
    return 0


def _facts(name: str, profile: TemplateProfile, ends: TurnEnds) -> dict[str, Any]:
    return {
        "template": name,
        "opening": profile.opening,
        "calls": grammar_of(profile.written_call),
        "thought": profile.reasoning,
        "ends": ends.texts,
        "fields": [asdict(verdict) for verdict in profile.verdicts],
    }


def _print(name: str, profile: TemplateProfile, ends: TurnEnds) -> None:
    from rich.table import Table

    table = Table(title=f"template {name}", title_justify="left")
    for heading in ("field", "verdict", "form"):
        table.add_column(heading)
    for row in profile.verdicts:
        table.add_row(row.field, row.verdict, row.note)
    rich_console().print(table)
    say(f"a prompt ends with: {profile.opening!r}")
    say(f"calls: {grammar_of(profile.written_call) or 'in no form that is known'}")
    say(f"thoughts: {' ... '.join(profile.reasoning) if profile.reasoning else 'none'}")
    say(f"ends of turn: {' '.join(ends.texts) or 'none'}")
    dropped = [row.field for row in profile.verdicts if row.verdict == DROPPED]
    say(f"left out in silence: {', '.join(dropped) or 'nothing'}")
