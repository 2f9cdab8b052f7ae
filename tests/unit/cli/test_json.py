"""Every command prints JSON with --json, or is on a short list with a reason."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dialoop_ops.cli.main import main, parser
from dialoop_ops.policies import export
from dialoop_ops.stack import commands as stack

WITHOUT_JSON = {
    "play": "a person, or the policy, talks with the environment in the terminal",
    "env play": "the same as play",
    "console": "serves a page, or writes one into a folder",
    "completion": "prints a script for a shell",
    "ticket": "prints a variable and its value",
    "import": "prints a job file, and what it leaves out in its comments",
}
"""The commands that have no --json, and why. Each other command has it."""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def commands_of(
    command: argparse.ArgumentParser, name: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that has no commands of its own, by its words."""
    below = [a for a in command._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        yield name, command
    for action in below:
        for word, inner in action.choices.items():
            yield from commands_of(inner, f"{name} {word}".strip())


def test_each_command_has_json_or_a_reason_why_not() -> None:
    commands = dict(commands_of(parser()))
    assert len(commands) > 20
    without = {name for name, each in commands.items() if "--json" not in each.format_help()}
    assert without == set(WITHOUT_JSON)
    assert all(WITHOUT_JSON.values())


def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    """What was printed, which is one value of JSON and nothing else."""
    return json.loads(capsys.readouterr().out)


def test_token_and_env_new_answer_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "ci", "--scope", "env", "--scope", "rollout", "--json"]) == 0
    token = answer(capsys)
    digest = hashlib.sha256(token["secret"].encode()).hexdigest()
    assert token["table"] == {"sha256": digest, "scopes": ["env", "rollout"]}
    assert main(["env", "new", "mine", "--json"]) == 0
    written = answer(capsys)
    assert written == {"environment": "mine:environment", "files": ["mine.py", "mine.toml"]}
    assert all(Path(name).is_file() for name in written["files"])


def test_down_answers_in_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("runs/mine").mkdir(parents=True)
    with Path("runs/.mine.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("12345")
        lock.flush()
        monkeypatch.setattr(os, "kill", lambda *_: fcntl.flock(lock, fcntl.LOCK_UN))
        assert main(["down", "mine", "--json"]) == 0
    assert answer(capsys) == {"run_dir": "runs/mine", "pid": 12345}


def test_a_config_is_checked_and_printed_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.toml").write_text('run = "small"\nengine = "transformers"\n')
    assert main(["config", "check", "job.toml", "--json"]) == 0
    checked = answer(capsys)
    assert (checked["config"], checked["mistakes"]) == ("job.toml", [])
    assert main(["config", "check", "job.toml"]) == 0
    text = capsys.readouterr().out
    lines = [f"Warning: {each}." for each in checked["warnings"]]
    lines += [f"value    {each}" for each in checked["values"]]
    lines += checked["devices"]
    assert text.splitlines()[: len(lines)] == lines
    assert len(text.splitlines()) == len(lines) + len(checked["estimates"]) + 1
    words = [
        "config",
        "print",
        "job.toml",
        "--set",
        "train.learning_rate=0.5",
        "--origins",
        "--json",
    ]
    assert main(words) == 0
    printed = answer(capsys)
    assert printed["config"]["train"]["learning_rate"] == 0.5
    assert printed["origins"]["train.learning_rate"] == "--set"


def test_mistakes_of_a_config_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.toml").write_text('environment = "nowhere:environment"\n')
    assert main(["config", "check", "job.toml", "--json"]) == 2
    printed = capsys.readouterr()
    (mistake,) = json.loads(printed.out)["mistakes"]
    assert "nowhere" in mistake
    assert mistake in printed.err


def test_train_prints_the_summary_of_each_run_and_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: Any, run_dir: Any, _: Path, options: argparse.Namespace) -> int:
        stack._console(options).print("what people read")
        summary = {"run": config.run, "gates": {"learns": config.seed == 0}}
        (run_dir.path / "summary.json").write_text(json.dumps(summary))
        return int(config.seed != 0)

    monkeypatch.setattr(stack, "_run", run)
    monkeypatch.setattr(stack, "compare", lambda _, console: console.print("a table"))
    Path("job.toml").write_text('run = "small"\nengine = "transformers"\n')
    words = ["train", "job.toml", "--seeds", "0,1", "--json"]
    for _ in range(2):  # the second time both have ended already
        assert main(words) == 1
        printed = capsys.readouterr()
        first, second = map(json.loads, printed.out.splitlines())
        assert (first["run_dir"], first["exit_code"]) == ("runs/small-seed-0", 0)
        assert second["summary"]["gates"] == {"learns": False}
        assert "a table" in printed.err


def test_export_answers_in_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Policies:
        stop = ("<call>",)

        @classmethod
        def of(cls, _: Path) -> Policies:
            return cls()

        def policy(self, version: str) -> Path:
            return tmp_path / version

    monkeypatch.setattr(export, "RunPolicies", Policies)
    monkeypatch.setattr(export, "export_policy", lambda _, __, out, **___: out)
    assert main(["export", "runs/mine", "main-2", "model", "--json"]) == 0
    exported = answer(capsys)
    assert exported == {"policy": "main-2", "directory": "model", "stop_strings": ["<call>"]}
