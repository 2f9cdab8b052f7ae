"""The completion that `dialoop completion bash` prints, in a bash."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from dialoop_ops.cli.main import main

COMPLETE = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_dialoop
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("dialoop wat", {"watch"}),
        ("dialoop co", {"compare", "completion", "config", "console"}),
        ("dialoop train --s", {"--seeds", "--set"}),
        ("dialoop env ch", {"check"}),
    ],
)
def test_bash_completes_commands_and_options(tmp_path: Path, capsys, words, expected) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    command = ["bash", "-c", COMPLETE.format(script=script, words=words)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(answer.stdout.split()) == expected


def test_a_shell_that_is_not_known_is_a_wrong_argument() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["completion", "fish"])
    assert caught.value.code == 2
