"""Every block of README and docs is run, parsed, or marked why it is not; every path exists.

A comment above a block names its test here: `<!-- test: curl -->`; or it says `not run: REASON` or
`output: COMMAND`. TOML blocks are parsed as job files. The services that blocks talk to are a
light stack (transformers, the queue in memory) and, heavy, what `make up` starts:
`.venv/bin/python -m pytest -m heavy tests/e2e/test_docs.py`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop import BlockingDialoop, Message
from dialoop.environments.environment import Given
from dialoop.testing import ScriptedPolicy
from dialoop_learning.loss.loss_loading import load_loss
from dialoop_learning.loss.losses import LossInputs
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_ops.stack.layout import FIXED_PORTS
from dialoop_services.config.file import parse_config
from dialoop_services.config.own_data_plane import load_data_plane
from dialoop_services.runtime import load
from dialoop_services.scorer.__main__ import make_scorer
from dialoop_services.scorer.settings import ScorerSettings
from dialoop_services.trainer.records.records import RunRecords
from dialoop_services.trainer.records.trackers import trackers_of
from dialoop_services.trainer.settings import TrainerSettings

from tests.support.samples.scorer_samples import make_group
from tests.support.stack_jobs import Job, wait_for
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
DECISIONS = ROOT / "infra" / "decisions"
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    *sorted(DECISIONS.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
)
BLOCK = re.compile(r"(?:<!-- (test|not run|output): (.*?) -->\n)?^```(\w*)\n(.*?)^```", re.M | re.S)
TESTED_HERE = frozenset(
    {
        "agent",
        "capitals",
        "collates",
        "curl",
        "data_plane",
        "estimator",
        "group_estimator",
        "extra",
        "extra_points",
        "in_process",
        "loss",
        "optimizer",
        "python_environment",
        "sandbox_examine",
        "sdk",
        "template",
        "tool_state",
        "tracker",
    }
)
TESTED_ELSEWHERE = {
    "token_command": "tests/contract/runtime/test_scopes.py",
    "token_file": "tests/contract/runtime/test_scopes.py",
    "audit": "tests/unit/audit/test_own_runs.py",
    "bring": "tests/unit/tasks/test_rows_of_others.py",
    "collect": "tests/unit/test_collection.py",
    "device_plan": "tests/unit/stack/test_devices.py",
    "device_plan_lines": "tests/unit/stack/test_devices.py",
    **dict.fromkeys(
        ("plan_7b", "plan_7b_lines", "plan_70b", "plan_70b_lines"),
        "tests/unit/stack/launch/test_large_plans.py",
    ),
    "engine_options": "tests/unit/stack/test_engine_options.py",
    "compat": "tests/extras/unit/compat/test_offered.py",
    "top_k_window": "tests/unit/rl/test_monte_carlo.py",
    "train_in_python": "tests/contract/stack/test_jobs.py",
    "experiments": "tests/e2e/test_experiments.py",
    "grpo_by_hand": "tests/e2e/test_grpo_by_hand.py",
    "trial_agent": "tests/extras/contract/collector/test_token_episodes.py",
    "trials": "tests/extras/contract/collector/test_token_episodes.py",
    "add_config_key": "tests/e2e/test_places_to_touch.py",
    "add_loss": "tests/e2e/test_places_to_touch.py",
    "add_rpc": "tests/e2e/test_places_to_touch.py",
    "add_template_family": "tests/e2e/test_places_to_touch.py",
    "add_trajectory_field": "tests/e2e/test_places_to_touch.py",
    "add_wire": "tests/e2e/test_places_to_touch.py",
}
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


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: the kind and text of the comment above it, language, lines."""

    page: Path
    kind: str
    label: str
    language: str
    text: str


def blocks() -> list[Block]:
    """All fenced blocks of all pages, in order."""
    return [
        Block(page, *(part or "" for part in match.groups()))
        for page in PAGES
        for match in BLOCK.finditer(page.read_text("utf-8"))
    ]


def snippet(name: str) -> str:
    """The block that is marked with a test's name; the same wherever it stands."""
    (text,) = {block.text for block in blocks() if (block.kind, block.label) == ("test", name)}
    return text


def curl_lines() -> list[tuple[str, str]]:
    """Each command with the answer that is printed below it."""
    return re.findall(r"^\$ (curl .*)\n(.*)$", snippet("curl"), flags=re.MULTILINE)


def test_every_block_is_run_or_says_why_not() -> None:
    for block in blocks():
        where = f"{block.page.name}: {block.text[:60]!r}"
        if block.kind == "test":
            assert block.label in TESTED_HERE | TESTED_ELSEWHERE.keys(), where
        elif not block.kind:
            assert block.language in ("", "toml"), f"{where} needs a test or a reason"
    for test in TESTED_ELSEWHERE.values():
        assert (ROOT / test).is_file(), test


def test_every_config_is_a_valid_job() -> None:
    configs = [block for block in blocks() if block.language == "toml"]
    assert len(configs) >= 3
    for block in configs:
        parse_config(tomllib.loads(block.text), source=block.page.name)


def test_every_path_and_link_exists() -> None:
    roots = "client|services|tests|docs|infra|proto|benchmarks"
    for page in PAGES:
        text = page.read_text("utf-8")
        for path in re.findall(rf"`((?:{roots})/[\w./-]*\w/?)`", text):
            assert (ROOT / path).exists(), f"{page.name} names {path}"
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name} links to {link}"
            if anchor:
                assert anchor in anchors(target), f"{page.name} links to {link}#{anchor}"


def test_every_dotted_name_of_a_decision_exists() -> None:
    for page in DECISIONS.glob("0*.md"):
        for name in re.findall(r"`(dialoop\w*(?:\.\w+)+)`", page.read_text("utf-8")):
            assert importlib.util.find_spec(name) is not None, f"{page.name} names {name}"


def anchors(page: Path) -> set[str]:
    """The names that a link to a place of the page may have, as GitHub makes them."""
    text = page.read_text("utf-8")
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))


def test_every_page_that_the_product_names_exists() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "client", "services", "infra", "benchmarks", "docker-compose.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    suffixes = (".py", ".toml", ".yml", ".yaml", ".sh", ".md")
    files = [ROOT / name for name in listed.stdout.splitlines() if name.endswith(suffixes)]
    named = {
        (page, file.relative_to(ROOT))
        for file in files
        for page in re.findall(r"\b(?:docs|infra/decisions)/[\w-]+\.md", file.read_text("utf-8"))
    }
    assert len(named) > 10
    for page, file in named:
        assert (ROOT / page).is_file(), f"{file} names {page}"


def test_every_decision_is_listed() -> None:
    listed = re.findall(r"\]\((0[\w-]+\.md)\)", (DECISIONS / "README.md").read_text("utf-8"))
    assert listed == sorted(path.name for path in DECISIONS.glob("0*.md"))


def test_every_module_and_command_named_exists() -> None:
    text = "".join(page.read_text("utf-8") for page in PAGES)
    for module in set(re.findall(r"-m (dialoop[\w.]*)", text)):
        assert importlib.util.find_spec(module.rstrip(".")) is not None, module
    shown = subprocess.run(
        [sys.executable, "-m", "dialoop_ops.cli.main", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for command in set(re.findall(r"`dialoop ([a-z]+)", text)):
        assert re.search(rf"^    {command}\b", shown.stdout, re.M), command


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 1500


DEFAULT = pytest.param(
    "default",
    marks=[pytest.mark.heavy(reason="starts vLLM and Redis"), pytest.mark.timeout(480)],
)


@pytest.fixture(scope="module", params=["light", DEFAULT])
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Job]:
    """A stack on the ports that the docs name."""
    require_free_ports()
    folder = tmp_path_factory.mktemp("docs")
    arguments = ["up"]
    if request.param == "light":
        ports = "".join(f"{name} = {port}\n" for name, port in FIXED_PORTS.items())
        (folder / "up.toml").write_text(LIGHT + ports)
        arguments = ["up", "up.toml"]
    elif importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: run `make setup`")
    with Job(folder, *arguments) as job:
        wait_for(lambda: "all services are ready" in job.output or job.process.poll(), 300)
        assert job.process.poll() is None, job.output
        yield job


def require_free_ports() -> None:
    """Skip where somebody's own stack is up: these lines would talk to that."""
    for port in FIXED_PORTS.values():
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"port {port} of the docs is in use: `dialoop down` frees it")


@pytest.mark.timeout(480)
def test_every_curl_line_gives_the_answer_printed_below_it(stack: Job) -> None:
    lines = curl_lines()
    assert len(lines) >= 6
    for command, printed in lines:
        done = subprocess.run(
            ["sh", "-c", command], capture_output=True, check=True, timeout=PATIENCE_S
        )
        answer = done.stdout.decode()
        assert json.loads(answer) == json.loads(printed), f"{command}\nanswers now:\n{answer}"


@pytest.mark.timeout(480)
def test_the_sdk_snippet_plays_a_group(stack: Job) -> None:
    code = snippet("sdk")
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
def test_the_agent_of_the_docs_is_recorded(stack: Job) -> None:
    code = snippet("agent")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    reward, num_tokens, versions = done.stdout.split(maxsplit=2)
    assert float(reward) in (0.0, 1.0)
    assert int(num_tokens) > 0
    assert "PolicyVersion" in versions


def test_the_environment_of_the_docs_can_be_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("capitals.jsonl").write_text('{"id": "f", "question": "France?", "answer": "Paris"}\n')
    names: dict[str, Any] = {}
    exec(snippet("capitals"), names)
    policy = ScriptedPolicy(["<request><capital>France<call>", "Result=Paris<submit>"])
    with BlockingDialoop(environment=names["environment"], inference=policy) as dialoop:
        trajectory = dialoop.play(dialoop.task("capitals", "f", split="train"))
    assert trajectory.failures == ()
    assert [message.role for message in trajectory.history][-2:] == ["tool", "assistant"]
    assert trajectory.turns[-1].rewards[0].success


def test_the_extra_of_the_docs_is_found_by_its_entry_points(tmp_path: Path) -> None:
    (tmp_path / "my_extra.py").write_text(snippet("extra"))
    (group, points), *none = tomllib.loads(snippet("extra_points"))["project"][
        "entry-points"
    ].items()
    assert not none
    described = tmp_path / "my_extra-0.1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: my-extra\nVersion: 0.1\n")
    lines = "".join(f"{name} = {place}\n" for name, place in points.items())
    (described / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    code = (
        "from dialoop.environments.loading import load_environment\n"
        "environment = load_environment('sums', {'largest': 3})\n"
        "print(environment.name, len(list(environment.tasks.keys('train'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "sums 3\n", done.stderr


def test_the_loss_of_the_docs_is_loaded_by_name_and_points_uphill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_losses.py").write_text(snippet("loss"))
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


def test_the_collates_of_the_docs_run() -> None:
    exec(snippet("collates"), {})


async def test_the_estimator_of_the_docs_is_loaded_by_name_and_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_advantages.py").write_text(snippet("estimator"))
    monkeypatch.syspath_prepend(tmp_path)
    settings = load(ScorerSettings, advantage_estimator="my_advantages:above_median")
    scored = await make_scorer(settings).score(make_group(0.0, 1.0, 4.0))
    assert [t.sequences[0].advantage for t in scored.trajectories] == [-1.0, 0.0, 3.0]


async def test_the_estimator_of_the_docs_sees_the_groups_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_lengths.py").write_text(snippet("group_estimator"))
    monkeypatch.syspath_prepend(tmp_path)
    settings = load(ScorerSettings, advantage_estimator="my_lengths:brief")
    group = make_group(1.0, 0.0, 1.0)
    *others, last = group.trajectories
    sampled = last.sequences[0]
    longer = replace(group, trajectories=(*others, replace(last, sequences=(sampled, sampled))))
    scored = await make_scorer(settings).score(longer)
    # Rewards 1, 0 and 1 - .5, since the last of the right answers is the longest.
    expected = pytest.approx([1.0, -1.0, 0.0], abs=1e-6)
    assert [t.sequences[0].advantage for t in scored.trajectories] == expected


def test_the_tracker_of_the_docs_gets_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_tracker.py").write_text(snippet("tracker"))
    monkeypatch.syspath_prepend(tmp_path)
    settings = load(TrainerSettings, run_dir=tmp_path, trackers={"use": ["my_tracker:Lines"]})
    records = RunRecords(tmp_path, trackers=trackers_of(settings))
    records.metric("train", train_step=3, policy_version=None, reward=0.25)
    records.close()
    assert (tmp_path / "numbers.txt").read_text("utf-8") == "3 {'train/reward': 0.25}\n"


def test_the_optimizer_of_the_docs_is_loaded_by_name_and_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_optimizers.py").write_text(snippet("optimizer"))
    monkeypatch.syspath_prepend(tmp_path)
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    settings = OptimizerSettings(name="my_optimizers:momentum", learning_rate=0.5)
    optimizer = GuardedOptimizer([weight], settings)
    for expected in (0.5, -0.45):  # the second step has 0.9 of the first one's gradient too
        weight.grad = torch.tensor([1.0])
        optimizer.step(1.0)
        assert weight.item() == pytest.approx(expected, abs=1e-5)


async def test_the_data_plane_of_the_docs_moves_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_plane.py").write_text(snippet("data_plane"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MY_FOLDER", str(tmp_path))
    trainer, replica = (load_data_plane("my_plane:Folder") for _ in range(2))
    assert trainer is not None
    assert replica is not None
    (tmp_path / "weights").write_bytes(b"abc")
    address = await trainer.put(tmp_path / "weights", "main-7/model.safetensors")
    await replica.get(address, tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == b"abc"


def test_the_template_snippet_holds_as_printed() -> None:
    exec(snippet("template"), {})


def test_the_sandbox_snippet_holds_as_printed() -> None:
    exec(snippet("sandbox_examine"), {})


async def test_the_tool_of_the_docs_remembers_its_sum() -> None:
    names: dict[str, Any] = {}
    exec(snippet("tool_state"), names)
    environment = names["environment"]
    opening = environment.reset(environment.task_from(Given(query="Add up.")), seed=0)
    episode, history = opening.episode, opening.history
    for number in (1, 5):
        call = f'<tool_call>{{"name": "add", "arguments": {{"number": {number}}}}}</tool_call>'
        said = Message(role="assistant", content=call)
        outcome = await environment.step(episode, history.respond(said))
        episode, history = outcome.episode, outcome.history
    assert episode.history[-1].text == "The sum is 6."


async def test_what_the_model_writes_runs_in_the_environment_of_the_docs() -> None:
    names: dict[str, Any] = {}
    exec(snippet("python_environment"), names)
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
    code = snippet("in_process") + "\nassert len(group.trajectories) == 4\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
