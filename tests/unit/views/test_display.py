"""What a model wrote is shown as text, and steers no terminal."""

from __future__ import annotations

from dialoop_ops.runs.display import messages_of, visible


def test_escapes_of_a_model_are_shown_and_not_obeyed() -> None:
    wicked = "a\x1b[2J\x1b]0;title\x07\u202eb\n\tc\r"
    assert visible(wicked) == "a\\x1b[2J\\x1b]0;title\\x07\\u202eb\n\tc\\r"
    shown = messages_of({"messages": [{"role": "assistant", "content": wicked}]})
    assert shown.plain == f"assistant: {visible(wicked)}\n"
    assert visible("ü 漢 🙂\n") == "ü 漢 🙂\n"
