"""Read the query of a URL."""

from __future__ import annotations

from urllib.parse import parse_qsl

from dialoop.errors import InvalidInput
from dialoop.reasons import Reason

from dialoop_services.rest.problems import FieldsRefused

_MAX_FIELDS = 64


def read_query(query: bytes) -> dict[str, str]:
    """Return a query's values by field name. Raise FieldsRefused where a field is there twice."""
    try:
        pairs = parse_qsl(
            query.decode("latin-1"), keep_blank_values=True, max_num_fields=_MAX_FIELDS
        )
    except ValueError as error:
        raise InvalidInput(
            f"The query has more than {_MAX_FIELDS} fields.", reason=Reason.INVALID_FIELD
        ) from error
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise FieldsRefused(
            "The query has a field twice.",
            reason=Reason.INVALID_FIELD,
            remedy="Give each field once.",
            fields=[name for name in dict.fromkeys(names) if names.count(name) > 1],
        )
    return dict(pairs)
