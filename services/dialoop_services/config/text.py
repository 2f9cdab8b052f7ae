"""A job config as TOML, each key with what it means.

engine = "vllm"  # What samples.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from dialoop_services.config.job import JobConfig


def toml_of(config: JobConfig) -> str:
    """The whole config; a key without a value is a comment."""
    return "\n".join(_lines(config, "")) + "\n"


def _lines(section: BaseModel, path: str) -> list[str]:
    """A section's own keys, then the sections inside it, as TOML wants them."""
    lines, inside = [], []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            inner = f"{path}.{name}" if path else name
            title = f"[{inner}]  # {(type(value).__doc__ or '').strip().splitlines()[0]}"
            inside += ["", title, *_lines(value, inner)]
            continue
        if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            said = " ".join((field.description or "").split())
            for one in value:
                inside += ["", f"[[{name}]]  # {said}", *_lines(one, name)]
            continue
        given = f"# {name} =" if value is None else f"{name} = {_text(value)}"
        lines.append(f"{given}  # {' '.join((field.description or '').split())}")
    return lines + inside


def _text(value: object) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(key)} = {_text(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
