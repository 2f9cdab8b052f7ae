"""The text form of tool calls: `<request><Calculator>35+40<call>75<response>Result=75<submit>`.

parse_call("<request><Calculator>35+40<call>")     # ("Calculator", "35+40")
parse_call("It is 75")                             # (None, None)
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """The markers of calls; a policy's message stops at `call` and at `submit`."""

    request: str = "<request>"
    call: str = "<call>"
    response: str = "<response>"
    submit: str = "<submit>"

    def spans(self, text: str) -> list[str]:
        """Return each text between `request` and `call`."""
        pattern = f"{re.escape(self.request)}(.*?){re.escape(self.call)}"
        return re.findall(pattern, text, re.DOTALL)


def parse_span(span: str) -> tuple[str | None, str | None]:
    """Return tool and query of one span; (None, None) when it has no `<tool>`.

    The tool is in the first `<...>`; the query is all that follows the first `>`.
    """
    tool = re.search(r"<(.*?)>", span)
    if tool is None:
        return None, None
    return tool.group(1), span.partition(">")[2]


def parse_call(text: str, syntax: CallSyntax | None = None) -> tuple[str | None, str | None]:
    """Return tool and query of the first call in a text; (None, None) when there is none."""
    spans = (syntax or CallSyntax()).spans(text)
    return parse_span(spans[0]) if spans else (None, None)
