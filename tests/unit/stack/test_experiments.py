"""`--set`, `--seeds`, `--from` and `dialoop compare`, without running anything."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import dialoop
import pytest
from dialoop.errors import InvalidConfig, NotFound
from dialoop_ops.cli.main import main
from dialoop_ops.stack.branch import find_branch
from dialoop_ops.stack.commands import ended_with, for_seed, seeds_of
from dialoop_ops.stack.report.compare import as_json, variants_of
from dialoop_ops.stack.run_dir import open_run, started_with
from dialoop_services.config.file import load_with_origins, overrides_of_words


def job_file(folder: Path) -> Path:
    path = folder / "job.toml"
    path.write_text('run = "mine"\n[train]\nnum_steps = 2\n')
    return path


def load(folder: Path, *words: str, **variables: str) -> Any:
    overrides = overrides_of_words(words)
    return load_with_origins(job_file(folder), environment=variables, overrides=overrides)


def test_what_the_command_line_sets_wins_and_says_so(tmp_path: Path) -> None:
    loaded = load(tmp_path, "train.learning_rate=1e-5", "train.loss=dapo", 'run="a"')
    train = loaded.config.train
    assert (train.learning_rate, train.loss, train.num_steps) == (1e-5, "dapo", 2)
    assert loaded.config.run == "a"
    assert loaded.origins["train.loss"] == "--set"
    assert loaded.origins["train.num_steps"].endswith("job.toml")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.num_stes=3", "--set has an unknown key 'num_stes' in [train]"),
        ("trian.num_steps=3", "--set has an unknown key 'trian'; did you mean 'train'?"),
        (
            'train.loss="gpro"',
            "--set, train.loss is 'gpro': there is no such loss; did you mean 'grpo'?",
        ),
        ("train.num_steps=-3", "--set, train.num_steps is -3"),
        ("train.num_steps.x=3", "--set sets train.num_steps.x, and num_steps is no table"),
        ("seed", "--set seed is not KEY=VALUE"),
        ("=3", "--set =3 is not KEY=VALUE"),
        ("train..loss=dapo", "is not KEY=VALUE"),
    ],
)
def test_a_wrong_setting_is_named_with_the_command_line(
    tmp_path: Path, word: str, message: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(tmp_path, word)
    assert message in str(caught.value)


def test_a_value_cannot_smuggle_in_another_key(tmp_path: Path) -> None:
    assert overrides_of_words(["run=1\nx = 2"])[0].value == "1\nx = 2"


def test_each_seed_is_a_run_of_its_own(tmp_path: Path) -> None:
    jobs = [for_seed(load(tmp_path), seed) for seed in seeds_of("0, 7")]
    assert [(job.config.run, job.config.seed) for job in jobs] == [
        ("mine-seed-0", 0),
        ("mine-seed-7", 7),
    ]
    assert jobs[0].origins["seed"] == "--seeds"
    with pytest.raises(InvalidConfig, match="SEED and --seeds"):
        for_seed(load(tmp_path, SEED="3"), 1)


@pytest.mark.parametrize("text", ["", "a", "1,", "1,1", "-1", "01,1"])
def test_a_list_of_seeds_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="not a list of different whole numbers"):
        seeds_of(text)


def test_a_seed_counts_as_done_under_the_very_same_config(tmp_path: Path) -> None:
    config = load(tmp_path).config
    with open_run(tmp_path, config, fresh=False, started_with={"code": {}}) as run_dir:
        assert ended_with(tmp_path, config) is None
        (run_dir.path / "summary.json").write_text('{"gates": {"x": false}}')
    assert ended_with(tmp_path, config) == 1
    assert ended_with(tmp_path, load(tmp_path, "train.num_steps=3").config) is None
    assert json.loads((run_dir.path / "run.json").read_text())["started_with"] == {"code": {}}


def test_what_a_run_was_started_with_names_code_and_packages() -> None:
    start = started_with(["train", "job.toml"], {"seed": "--seeds"}, branch_of=None)
    assert start["origins"] == {"seed": "--seeds"}
    assert start["code"]["version"]
    assert len(start["packages"]["sha256"]) == 64
    assert start["packages"] == started_with([], {}, branch_of=None)["packages"]


_WITHOUT_PACKAGES = """
import importlib.metadata as metadata
own = metadata.Distribution.from_name

def from_name(name):
    if name.startswith(("dialoop", "openai")):
        raise metadata.PackageNotFoundError(name)
    return own(name)

metadata.Distribution.from_name = from_name
import dialoop_services.inference.outside_engine
from dialoop_ops.stack.run_dir import started_with
from dialoop_ops.stack.report.summary import versions
code = started_with(["train"], {}, branch_of=None)["code"]
print(code["version"], versions("")["dialoop"])
"""


def test_a_source_tree_without_installed_packages_says_its_version() -> None:
    done = subprocess.run(
        (sys.executable, "-c", _WITHOUT_PACKAGES), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [dialoop.__version__] * 2
    root = Path(__file__).parents[3]
    for file in root.glob("*/dialoop*/pyproject.toml"):
        assert tomllib.loads(file.read_text("utf-8"))["project"]["version"] == dialoop.__version__


def make_run(root: Path, name: str, **values: Any) -> Path:
    """A run that has ended; `values` go into its config, its seed and its summary."""
    run_dir = root / name
    run_dir.mkdir(parents=True)
    config = {"run": name, "seed": values["seed"], "train": {"loss": values.pop("loss", "grpo")}}
    mark = {"run_id": f"{name}-1", "config": config | {"ports": {"redis": values["seed"]}}}
    mark["started_with"] = {"origins": {"seed": name}, "code": {"commit": name}}
    (run_dir / "run.json").write_text(json.dumps(mark))
    (run_dir / "summary.json").write_text(json.dumps({"run": name, "gates": {}, **values}))
    return run_dir


def test_a_branch_takes_the_policy_that_the_run_went_on_with(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "demo", seed=0)
    mark = json.loads((run_dir / "run.json").read_text())
    mark["config"]["model"] = {"directory": ""}
    (run_dir / "run.json").write_text(json.dumps(mark))
    rows = [
        {"kind": "publish", "train_step": 4, "lineage": "main", "policy_version": 5},
        {"kind": "publish", "train_step": 5, "lineage": "main", "policy_version": 6},
        {"kind": "train", "train_step": 5, "lineage": "main", "policy_version": 6},
        {"kind": "publish", "train_step": 5, "lineage": "main.1", "policy_version": 6},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run_dir / "metrics.jsonl").write_text(text + '{"kind": "publish", "train_st')
    for version in ("main-6", "main.1-6"):
        (run_dir / "policies" / version).mkdir(parents=True)
        (run_dir / "policies" / version / "model.safetensors").touch()
    branch = find_branch("demo@5", tmp_path)
    assert (branch.policy, branch.train_step) == ("main.1-6", 5)
    assert branch.as_json()["run_id"] == "demo-1"
    values = {override.path: override.value for override in branch.overrides()}
    assert values["model.directory"] == str(run_dir / "branches" / "main.1-6")
    for text, message in (
        ("demo", "not RUN@STEP"),
        ("demo@last", "not RUN@STEP"),
        ("demo@7", "published no policy after step 7. Its steps with a policy on disk: 5"),
        ("demo@4", "policy main-5 was deleted to save disk space. Use one of: main-6"),
        ("other@5", "is not a run of Dialoop"),
    ):
        with pytest.raises(InvalidConfig) as caught:
            find_branch(text, tmp_path)
        assert message in str(caught.value)


def test_seeds_of_one_config_are_one_variant(tmp_path: Path, capsys: Any) -> None:
    after = {"grpo": (0.90, 0.94, 0.92), "dapo": (0.91, 0.96, 0.95)}
    runs = [
        make_run(tmp_path, f"{loss}-{seed}", seed=seed, loss=loss, heldout_greedy_after=value)
        for loss, values in after.items()
        for seed, value in enumerate(values)
    ]
    first, second = variants_of(runs)
    assert first.runs == ("grpo-0", "grpo-1", "grpo-2")
    assert second.settings == {"train.loss": '"dapo"'}
    mean, difference = (
        first.mean("heldout_greedy_after"),
        second.minus(first, "heldout_greedy_after"),
    )
    assert mean is not None
    # Wilson's of .92 * .08 / (.0004 / 3) = 552 trials with t(.975, 2) = 4.302653.
    assert str(mean) == "0.92 (0.86 to 0.96)"
    # Differences .01, .02, .03 by seed: mean .02, standard error .01 / sqrt(3), the same t.
    assert difference is not None
    assert difference.low == pytest.approx(0.02 - 4.302653 * 0.01 / 3**0.5, abs=1e-4)
    assert as_json(runs)["differences"][0]["minus"] == "#1"
    assert main(["compare", *map(str, runs)]) == 0
    assert "#2 - #1" in capsys.readouterr().out


def test_a_run_that_has_not_ended_is_named(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path, "torn", seed=0)
    (run / "summary.json").write_text('{"gates":')
    with pytest.raises(NotFound, match="no run that has ended"):
        variants_of([run])
    assert main(["compare", str(tmp_path / "nowhere")]) == 2
    assert "no run that has ended" in capsys.readouterr().err
