"""What a console and a notebook show of messages and records."""

from __future__ import annotations

import pytest
from dialoop.chat import History, Message
from dialoop.messages import ContentPart, ToolCall
from dialoop.testing import group, trajectory
from dialoop.trajectory import Failure, Owner
from rich.console import Console

HI = Message(role="user", content="What is 3+4?")


def print_to_text(value: object) -> str:
    console = Console(width=300, force_terminal=False)
    with console.capture() as capture:
        console.print(value)
    return capture.get()


def test_a_message_shows_what_it_has_on_one_line():
    assert repr(HI) == "Message(role='user', content='What is 3+4?')"
    call = ToolCall(name="add", arguments_json="{}")
    assert "tool_calls=" in repr(Message(role="assistant", tool_calls=(call,)))
    assert "is_complete=False" in repr(Message(role="assistant", is_complete=False))
    long = repr(Message(role="user", content="x" * 10_000))
    assert len(long) < 120
    assert "\n" not in repr(Message(role="user", content="a\nb"))


def test_a_history_shows_its_roles_and_the_ends_of_a_long_one():
    history = History((HI, Message(role="assistant", content="7")))
    assert repr(history) == "History(2 messages: user 'What is 3+4?', assistant '7')"
    many = History([Message(role="user", content=str(number)) for number in range(100)])
    assert "user '0'" in repr(many)
    assert "... 94 more ..." in repr(many)
    assert "user '99'" in repr(many)


def test_a_trajectory_and_a_group_are_a_line_each():
    episode = trajectory(reward=0.5)
    assert repr(episode).startswith("Trajectory('t0', task '1+2', reward 0.5, 1 turns, 2 sampled")
    assert repr(group(0.0, 1.0)) == "Group('t#1', 2 trajectories, rewards 0, 1)"
    for value in (episode, group(*[1.0] * 8)):
        assert len(repr(value)) < 250
        assert "\n" not in repr(value)


@pytest.mark.parametrize("value", [HI, History((HI,)), trajectory(), group(0.0, 1.0)])
def test_a_notebook_gets_html_and_a_console_text(value):
    html = value._repr_html_()
    assert html.count("<table>") == html.count("</table>") >= 1
    assert print_to_text(value).strip()


def test_what_a_model_wrote_is_text_in_html_and_no_markup():
    attack = Message(role="assistant", content="<script>alert(1)</script> [bold]x[/bold]")
    failed = trajectory(
        history=History((attack,)),
        failures=(Failure(owner=Owner.TOOL, reason="X", message="<b>"),),
    )
    for html in (attack._repr_html_(), History((attack,))._repr_html_(), failed._repr_html_()):
        assert "<script>" not in html
        assert "&lt;script&gt;" in html
    assert "[bold]x[/bold]" in print_to_text(attack)
    assert "&lt;b&gt;" in failed._repr_html_()


def test_calls_and_images_are_shown_by_name():
    parts = (ContentPart(type="text", text="see "), ContentPart(type="image", url="u"))
    call = ToolCall(name="add", arguments_json='{"a": 1}')
    message = Message(role="assistant", content=parts, tool_calls=(call,))
    assert "see &lt;image&gt;&lt;call add(" in message._repr_html_()
