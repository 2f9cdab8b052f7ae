"""The README's curl lines and SDK snippet, read from it and run against a stack.

Against a light one (transformers, the queue in memory), and, heavy, against what `make up` starts:
`.venv/bin/python -m pytest -m heavy tests/e2e/test_readme.py`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop import BlockingDialoop, Message
from dialoop.environments.environment import Given
from dialoop.testing import ScriptedPolicy
from dialoop_services.learning.loss.loss_loading import load_loss
from dialoop_services.learning.loss.losses import LossInputs
from dialoop_services.stack.__main__ import FIXED_PORTS

from tests.support.patience import PATIENCE_S
from tests.support.stack_jobs import Job, wait_for

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
LIGHT = """
run = "default"
engine = "transformers"
store = "memory"
[train]
num_steps = 0
[evaluation]
num_tasks = 0
[ports]
"""


def curl_lines() -> list[tuple[str, str]]:
    """Each command with the answer that is printed below it."""
    blocks = re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL)
    return re.findall(r"^\$ (curl .*)\n(.*)$", "".join(blocks), flags=re.MULTILINE)


def snippet(marker: str) -> str:
    """The Python block that contains the marker."""
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    (found,) = [block for block in blocks if marker in block]
    return str(found)


DEFAULT = pytest.param(
    "default",
    marks=[pytest.mark.heavy(reason="starts vLLM and Redis"), pytest.mark.timeout(480)],
)


@pytest.fixture(scope="module", params=["light", DEFAULT])
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Job]:
    """A stack on the ports that the README names."""
    require_free_ports()
    folder = tmp_path_factory.mktemp("readme")
    arguments = []
    if request.param == "light":
        ports = "".join(f"{name} = {port}\n" for name, port in FIXED_PORTS.items())
        (folder / "up.toml").write_text(LIGHT + ports)
        arguments = ["up.toml"]
    elif importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: run `make setup`")
    with Job(folder, *arguments) as job:
        wait_for(lambda: "all services are ready" in job.output or job.process.poll(), 300)
        assert job.process.poll() is None, job.output
        yield job


def require_free_ports() -> None:
    """Skip where somebody's own stack is up: the README's lines would talk to that."""
    for port in FIXED_PORTS.values():
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"port {port} of the README is in use: `dialoop down` frees it")


@pytest.mark.timeout(480)
def test_every_curl_line_of_the_readme_gives_the_answer_printed_below_it(stack: Job) -> None:
    lines = curl_lines()
    assert len(lines) >= 6
    for command, printed in lines:
        done = subprocess.run(
            ["sh", "-c", command], capture_output=True, check=True, timeout=PATIENCE_S
        )
        told = done.stdout.decode()
        assert json.loads(told) == json.loads(printed), f"{command}\nanswers now:\n{told}"


@pytest.mark.timeout(480)
def test_the_sdk_snippet_plays_a_group(stack: Job) -> None:
    code = snippet("BlockingDialoop(environment=")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PolicyVersion") == 4, done.stdout


@pytest.mark.timeout(480)
def test_the_agent_of_the_readme_is_recorded(stack: Job) -> None:
    code = snippet("my_agent.py")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    reward, num_tokens, versions = done.stdout.split(maxsplit=2)
    assert float(reward) in (0.0, 1.0)
    assert int(num_tokens) > 0
    assert "PolicyVersion" in versions


def test_the_environment_of_the_readme_can_be_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("capitals.jsonl").write_text('{"id": "f", "question": "France?", "answer": "Paris"}\n')
    names: dict[str, Any] = {}
    exec(snippet("CAPITALS"), names)
    policy = ScriptedPolicy(["<request><capital>France<call>", "Result=Paris<submit>"])
    with BlockingDialoop(environment=names["environment"], inference=policy) as dialoop:
        trajectory = dialoop.play(dialoop.task("capitals", "f", split="train"))
    assert trajectory.failures == ()
    assert [message.role for message in trajectory.history][-2:] == ["tool", "assistant"]
    assert trajectory.turns[-1].rewards[0].success


def test_the_loss_of_the_readme_is_loaded_by_name_and_points_uphill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_losses.py").write_text(snippet("LossInputs"))
    monkeypatch.syspath_prepend(tmp_path)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = LossInputs(
        policy_logprobs=logprobs,
        sequence_index=torch.zeros(2, dtype=torch.int64),
        loss_mask=torch.ones(2, dtype=torch.bool),
        num_tokens=2,
        num_sequences=1,
        inference_logprobs=logprobs.detach(),
        advantages=torch.tensor([1.0, -1.0]),
    )
    output = load_loss("my_losses:mine", {"cap": 3.0})(inputs)
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 0.5]


def test_the_template_snippet_holds_as_printed() -> None:
    exec(snippet("return_assistant_tokens_mask"), {})


async def test_what_the_model_writes_runs_in_the_environment_of_the_readme() -> None:
    names: dict[str, Any] = {}
    exec(snippet("PythonInterpreter"), names)
    environment = names["environment"]
    await environment.acquire()
    try:
        opening = environment.reset(environment.task_from(Given(query="What is 6*7?")), seed=0)
        code = Message(role="assistant", content="```python\nprint(6 * 7)\n```")
        outcome = await environment.step(opening.episode, opening.history.respond(code))
        assert "42" in outcome.history.require_prompt()[-1].text
    finally:
        await environment.close(outcome.episode)
        await environment.release()


@pytest.mark.timeout(240)
def test_every_service_runs_in_one_process_as_printed() -> None:
    code = snippet("blocking_in_process") + "\nassert len(group.trajectories) == 4\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
