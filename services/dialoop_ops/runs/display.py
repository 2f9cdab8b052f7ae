"""Trajectories of a run on the terminal, coloured by who wrote each token.

A row is a line of trajectories.jsonl, as a dict.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dialoop.sequences import Source
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pathlib import Path

    from dialoop.tokens.tokenizer import Tokenizer

STYLES = {
    Source.PROMPT: "blue",
    Source.TEMPLATE: "dim",
    Source.MODEL: "bold green",
    Source.ENVIRONMENT: "yellow",
    Source.TOOL: "bold magenta",
}

Row = Mapping[str, Any]


def read_rows(*paths: Path) -> Iterator[Row]:
    """Yield the rows of the files; leave out a last line that is still being written."""
    for path in paths:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield json.loads(line)


def visible(text: str) -> str:
    """Return the text with what would steer a terminal, or turn its direction, as escapes."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode()
        for each in text
    )


def transcript(row: Row, tokenizer: Tokenizer) -> Text:
    """Return the text of all sequences of a trajectory; the cause of each fork stands before it."""
    text = Text()
    for index, sequence in enumerate(row["sequences"]):
        if index:
            text.append(f"\n[fork: {sequence['fork_cause']}]\n", style="bold red")
        ids = sequence["token_ids"]
        for segment in sequence["segments"]:
            part = ids[segment["start"] : segment["start"] + segment["length"]]
            text.append(visible(tokenizer.decode(part)), style=STYLES[Source[segment["source"]]])
    return text


def messages_of(row: Row) -> Text:
    """Return the conversation by role, for a run whose tokenizer is not at hand."""
    text = Text()
    styles = {"assistant": STYLES[Source.MODEL], "tool": STYLES[Source.TOOL]}
    for message in row["messages"]:
        text.append(f"{message['role']}: ", style=STYLES[Source.TEMPLATE])
        style = styles.get(message["role"], STYLES[Source.PROMPT])
        text.append(visible(f"{message['content']}\n"), style=style)
    return text


def token_table(row: Row, sequence: Row, tokenizer: Tokenizer | None) -> Table:
    """Return a line per token: text, writer, log-prob, whether it was trained, advantage, version.

    A dash is a token that nobody sampled, which has neither.
    """
    table = Table(*("#", "token", "by", "log-prob", "trained", "advantage", "policy"))
    logprobs = iter(sequence["inference_logprobs"])
    advantages = iter(sequence.get("token_advantages") or ())
    for segment in sequence["segments"]:
        source = Source[segment["source"]]
        for index in range(segment["start"], segment["start"] + segment["length"]):
            cells = ["-"] * 4
            if source is Source.MODEL:
                advantage = next(advantages, sequence["advantage"])
                trained = row["outcome"] == "trained" and advantage is not None
                cells = [
                    _number(next(logprobs, None), 4),
                    "yes" if trained else "no",
                    _number(advantage, 3),
                    f"{segment['lineage']}-{segment['policy_version']}",
                ]
            token = _token_text(sequence["token_ids"][index], tokenizer)
            style = STYLES[source]
            table.add_row(str(index), Text(token, style=style), source.name.lower(), *cells)
    return table


def policy_of(row: Row) -> str:
    """Return the policy versions that sampled a trajectory: "main-1", or "main-4, main-5"."""
    segments = (segment for sequence in row["sequences"] for segment in sequence["segments"])
    names = (
        f"{s['lineage']}-{s['policy_version']}" for s in segments if s["policy_version"] is not None
    )
    return ", ".join(dict.fromkeys(names))


def legend() -> Text:
    """Return which colour stands for which writer."""
    parts = (Text(source.name.lower(), style=style) for source, style in STYLES.items())
    return Text(" ").join(parts)


def _token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """Return a token's text in Python's notation, which shows spaces and line ends; else its id."""
    return str(token_id) if tokenizer is None else repr(tokenizer.decode([token_id]))[1:-1]


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}"
