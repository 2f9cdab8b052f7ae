"""A job config as TOML, each key with what it means.

engine = "vllm"  # What samples.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from services.stack.config import JobConfig


def toml_of(config: JobConfig) -> str:
    """The whole config; a key without a value is a comment."""
    sections = {
        name: value
        for name in type(config).model_fields
        if isinstance(value := getattr(config, name), BaseModel)
    }
    lines = _lines(config, without=set(sections))
    for name, section in sections.items():
        lines += ["", f"[{name}]  # {(type(section).__doc__ or '').strip()}", *_lines(section)]
    return "\n".join(lines) + "\n"


def _lines(section: BaseModel, *, without: set[str] | None = None) -> list[str]:
    lines = []
    for name, field in type(section).model_fields.items():
        if name in (without or ()):
            continue
        value = getattr(section, name)
        given = f"# {name} =" if value is None else f"{name} = {_text(value)}"
        lines.append(f"{given}  # {' '.join((field.description or '').split())}")
    return lines


def _text(value: object) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(key)} = {_text(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
