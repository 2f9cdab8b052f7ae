"""Which Python a message holds."""

from __future__ import annotations

import time

import pytest
from dialoop.environments.tools.python_interpreter import python_blocks


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)\n```",
        "```py\nprint(1)\n```",
        "```Python\nprint(1)\n```",
        "```python3\nprint(1)\n```",
        "```python  \t\nprint(1)\n```  ",
        "```python\r\nprint(1)\r\n```\r\n",
        "Here it is: ```python\nprint(1)\n```\nDone.",
    ],
)
def test_a_block_is_found_however_it_is_fenced(text):
    assert python_blocks(text) == ("print(1)\n",)


@pytest.mark.parametrize(
    "text", ["```python\nprint(1)```", "```python\nprint(1)```  \nmore", "```py\nprint(1)``` more"]
)
def test_the_closing_fence_needs_no_line_of_its_own(text):
    assert python_blocks(text) == ("print(1)",)


def test_blocks_come_in_order_and_others_are_left_out():
    text = "```python\na\n```\n```text\nb\n```\n```\nc\n```\n```py\nd```\n```python\ne\n```"
    assert python_blocks(text) == ("a\n", "d", "e\n")


@pytest.mark.parametrize("text", ["", "print(1)", "```python\nprint(1)", "``python\nprint(1)\n``"])
def test_no_closed_block_is_no_block(text):
    assert python_blocks(text) == ()


def test_an_unclosed_block_does_not_swallow_the_next():
    assert python_blocks("```python\na\n```python\nb\n```") == ("b\n",)


def test_an_indented_block_is_dedented():
    text = "1. So:\n   ```python\n   if x:\n       y\n   ```\n"
    assert python_blocks(text) == ("if x:\n    y\n",)


def test_a_fence_in_a_docstring_does_not_end_the_block():
    code = 'def f():\n    """\n    ```\n    f()\n    ```\n    """\n'
    assert python_blocks(f"```python\n{code}```") == (code,)


def test_a_long_line_takes_no_long_time():
    started = time.perf_counter()
    assert python_blocks("`" * 200_000 + "x" * 200_000 + "```python\nx```" + " " * 200_000) == (
        "x",
    )
    assert time.perf_counter() - started < 30
