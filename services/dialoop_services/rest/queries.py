"""A URL's query, as names and values."""

from __future__ import annotations

from urllib.parse import parse_qsl

from dialoop.errors import InvalidInput
from dialoop.reasons import Reason

from dialoop_services.rest.problems import FieldsRefused

_MAX_FIELDS = 64


def pairs_of(query: bytes) -> dict[str, str]:
    """The fields of a query; FieldsRefused where one is given twice."""
    try:
        found = parse_qsl(
            query.decode("latin-1"), keep_blank_values=True, max_num_fields=_MAX_FIELDS
        )
    except ValueError as error:
        raise InvalidInput("The query has too many fields.", reason=Reason.INVALID_FIELD) from error
    names = [name for name, _ in found]
    if len(set(names)) < len(names):
        raise FieldsRefused(
            "A field is given twice in the query.",
            reason=Reason.INVALID_FIELD,
            remedy="Give each field once.",
            fields=[name for name in dict.fromkeys(names) if names.count(name) > 1],
        )
    return dict(found)
