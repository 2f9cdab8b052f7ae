"""Why a process ended: one error of several, and the exit code that it asks for."""

from __future__ import annotations

import pytest
from dialoop.errors import InternalError, InvalidConfig, NotFound, Unavailable
from dialoop.reasons import Reason
from dialoop_ops.cli.main import main
from dialoop_ops.stack import commands as stack
from dialoop_services.runtime.exit_reason import CONFIG_ERROR, ExitReason, known_error

AWAY = Unavailable("The queue is away.")
MISTAKE = InvalidConfig("`group_size` is 0.", remedy="Use 2 or more.")
NO_SPLIT = NotFound("There is no split 'tarin'.", reason=Reason.SPLIT_NOT_FOUND)


@pytest.mark.parametrize("mistake", [MISTAKE, NO_SPLIT])
def test_a_mistake_in_the_settings_explains_the_failures_beside_it(mistake: Exception) -> None:
    group = ExceptionGroup("tasks", [AWAY, ExceptionGroup("inner", [InternalError("?"), mistake])])
    assert known_error(group) is mistake
    assert ExitReason.of(group).exit_code == CONFIG_ERROR
    assert known_error(ExceptionGroup("tasks", [ZeroDivisionError(), AWAY])) is AWAY
    assert known_error(ExceptionGroup("tasks", [ZeroDivisionError()])) is None


def test_a_stack_ends_as_its_services_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise ExceptionGroup("tasks", [AWAY, NO_SPLIT])

    monkeypatch.setattr(stack, "_config", fail)
    assert main(["config", "print"]) == CONFIG_ERROR
    assert capsys.readouterr().err == f"dialoop: {NO_SPLIT}\n"
