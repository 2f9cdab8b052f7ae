"""Names of older APIs that the users' documents show."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from dialoop.chat import History
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.user_functions import call_now
from dialoop.views.views import Masks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dialoop.messages import Message
    from dialoop.templates.registry import TemplateInfo, TemplateRegistry


def add_chat_template(
    registry: TemplateRegistry,
    template_name: str,
    template: str,
    inverse_parser: Callable[[str], Iterable[Message]] | None = None,
    model_family_keywords: Iterable[str] | None = None,
) -> TemplateInfo:
    """Add a template with the older parameter names; replace one of the same name."""
    return registry.add_chat_template(
        template_name,
        template,
        inverse_parser,
        model_family_keywords or (),
        replace=True,
    )


def add_default_template(
    template_name: str,
    template: str,
    inverse_parser: Callable[[str], Iterable[Message | History]] | None = None,
    model_family_keywords: Iterable[str] | None = None,
) -> TemplateInfo:
    """Add a template to this process's registry, which is used where a call gives none.

    inverse_parser: from a text to its messages, or to histories of them.
    """
    from dialoop.templates.registry import DEFAULT_REGISTRY

    def parse(text: str) -> list[Message]:
        parts = () if inverse_parser is None else call_now(inverse_parser, text)
        return [m for part in parts for m in (part if isinstance(part, History) else (part,))]

    parser = None if inverse_parser is None else parse
    return add_chat_template(
        DEFAULT_REGISTRY, template_name, template, parser, model_family_keywords
    )


MASK_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "attention_mask_all": "all_attention_mask",
        "assistant_mask_all": "all_assistant_mask",
    }
)
"""Other names of the masks."""


def masks_of(named: Mapping[str, Any]) -> Masks:
    """Read masks by their names or the older ones; InvalidInput for others, or for both at once."""
    masks: dict[str, Any] = {}
    for name, values in named.items():
        mask = MASK_ALIASES.get(name, name)
        if mask not in MASK_ALIASES.values() or mask in masks:
            raise InvalidInput(
                f"There is no mask '{name[:40]}', or it is given twice.",
                reason=Reason.UNKNOWN_FIELD,
                remedy=f"Give each of {', '.join(MASK_ALIASES.values())} once.",
            )
        masks[mask] = np.array(values, dtype=np.bool_)
    return Masks(**masks)
