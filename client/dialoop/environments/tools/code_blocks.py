r"""Blocks of Python in a text, as models write them.

python_blocks("So:\n```python\nprint(1)\n```\n")      # ("print(1)\n",)
"""

from __future__ import annotations

import re
import textwrap

_FENCE = "```"
_OPENING = re.compile(rf"{_FENCE}(?:python3?|py)[ \t]*\r?\n", re.IGNORECASE)
# A fence that ends a line: alone on it, or after the last line of code.
_CLOSING = re.compile(rf"^(?P<before>[^\n]*?){_FENCE}[ \t]*\r?$", re.MULTILINE)


def python_blocks(text: str) -> tuple[str, ...]:
    """The code of each closed ```python or ```py block, in order.

    CRLF, blanks after the fences and a closing fence without a line of its own are understood. A
    fence that is indented deeper than the block's own (in a docstring) does not close it.
    """
    blocks, position = [], 0
    while opening := _OPENING.search(text, position):
        following = _OPENING.search(text, opening.end())
        region_end = following.start() if following else len(text)
        before = text[text.rfind("\n", 0, opening.start()) + 1 : opening.start()]
        indent = len(before) if not before.strip() else 0
        end, position = _closed(text, opening.end(), region_end, indent)
        if end < 0:
            position = opening.end()
            continue
        code = text[opening.end() : end].replace("\r\n", "\n")
        blocks.append(textwrap.dedent(code) if indent else code)
    return tuple(blocks)


def _closed(text: str, start: int, region_end: int, indent: int) -> tuple[int, int]:
    """Where the code ends and where to go on; -1 twice when nothing closes it."""
    region = text[start:region_end]
    for closing in _CLOSING.finditer(region):
        before = closing["before"]
        alone = not before.strip()
        if alone and len(before) > indent:
            continue
        end = closing.start() if alone else closing.end("before")
        return start + end, start + closing.end()
    inline = region.find(_FENCE)
    return (start + inline, start + inline + len(_FENCE)) if inline >= 0 else (-1, -1)
