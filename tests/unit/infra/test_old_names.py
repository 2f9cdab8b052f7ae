"""A name that moved is told with the place where it is now, however it is asked for."""

from __future__ import annotations

import importlib
import subprocess
import sys

import dialoop
import pytest
from dialoop.old_names import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_refused_with_the_new_one(old: str) -> None:
    package, _, name = old.rpartition(".")
    code = f"from {package} import {name}"
    with pytest.raises(ImportError) as caught:
        exec(code)
    assert f"{old} is {MOVED[old]} now." in str(caught.value)


@pytest.mark.parametrize("new", sorted(set(MOVED.values())))
def test_a_new_place_is_there(new: str) -> None:
    try:
        importlib.import_module(new)
    except ModuleNotFoundError as error:
        if error.name != new:  # a library of theirs
            return
        package, _, name = new.rpartition(".")
        assert hasattr(importlib.import_module(package), name)


def test_what_lies_below_a_moved_package_is_told_too() -> None:
    with pytest.raises(ImportError, match=r"dialoop\.compat is dialoop_extras\.compat now"):
        importlib.import_module("dialoop.compat.arguments")
    with pytest.raises(ImportError, match=r"dialoop\.train is dialoop_ops\.train now"):
        _ = dialoop.train


def test_a_command_of_an_old_module_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dialoop_services.stack"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "dialoop_services.stack is dialoop_ops.stack now" in done.stderr


def test_a_name_that_never_was_is_unknown_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("dialoop.nothing")
    with pytest.raises(AttributeError):
        _ = dialoop.nothing
