"""Write documents as YAML that people read: texts of several lines stay as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, and repeats what stands in several places."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return that nothing is written as a reference."""
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        """Return the text as a block where it has several lines."""
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def yaml_of(documents: Iterable[Any]) -> str:
    """Return the documents as one file."""
    texts = (yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=100) for each in documents)
    return "---\n".join(texts)
