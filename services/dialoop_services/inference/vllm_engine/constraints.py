"""SamplingParams.constraint as vLLM's structured outputs.

structured_outputs('{"type": "json_object"}')      # StructuredOutputsParams(json_object=True)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from vllm.sampling_params import StructuredOutputsParams


def structured_outputs(constraint: str) -> StructuredOutputsParams | None:
    """Return what to ask of vLLM; None without a constraint.

    Raise InvalidInput (INVALID_CONSTRAINT) for a text that is no constraint.
    """
    if not constraint:
        return None
    try:
        form = json.loads(constraint)
        match form["type"]:
            case "json_object":
                return StructuredOutputsParams(json_object=True)
            case "json_schema":
                return StructuredOutputsParams(json=dict(form["schema"]))
            case "tagged":
                tags = [_tag(tag) for tag in form["tags"]]
                return _outputs_of_tags(tags, is_single=bool(form.get("is_single")))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise unfit_constraint() from error
    raise unfit_constraint()


def unfit_constraint() -> InvalidInput:
    """Return the error of a constraint that vLLM cannot follow."""
    return InvalidInput(
        "The form that the answer is to have is malformed, or more than the engine can follow.",
        reason=Reason.INVALID_CONSTRAINT,
        remedy="Give a JSON schema of common keywords, as type, properties, required, items, enum.",
    )


def _tag(tag: Mapping[str, Any]) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": dict(tag["schema"])}
    return {"begin": str(tag["begin"]), "content": content, "end": str(tag["end"])}


def _outputs_of_tags(tags: list[dict[str, Any]], *, is_single: bool) -> StructuredOutputsParams:
    form = {
        "type": "tags_with_separator",
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": is_single,
        "tags": tags,
    }
    return StructuredOutputsParams(
        structural_tag=json.dumps({"type": "structural_tag", "format": form})
    )
