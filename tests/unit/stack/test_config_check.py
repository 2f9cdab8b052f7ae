"""`dialoop config check`: every typical mistake is one sentence with a remedy, within seconds."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dialoop.environments import load_environment
from dialoop.errors import DialoopError, InvalidConfig
from dialoop_learning.loss.facts import LOSSES
from dialoop_ops.cli.main import main
from dialoop_ops.stack import preflight
from dialoop_ops.stack.run_dir import open_run
from dialoop_services.config.file import load_with_origins, toml_of
from dialoop_services.config.job import JobConfig
from dialoop_services.config.tables import InferenceSection

ROOT = Path(__file__).parents[3]
HEAD = 'run = "checked"\nengine = "transformers"\nstore = "memory"\n'

MODULE = """
from dialoop.environments import ArithmeticTasks, ExactResult, JsonlTasks, tool_environment

def shout(text: str) -> str:
    return text.upper()

def make(loud: bool = True):
    return tool_environment(
        name="loud", tasks=ArithmeticTasks(), tools=[shout], rewards=[ExactResult()]
    )

def beside():
    return tool_environment(
        name="beside", tasks=JsonlTasks("beside.jsonl"), tools=[shout], rewards=[ExactResult()]
    )

def broken():
    return 1 / 0

def sayings():
    from dialoop_extras.text_environment import TextSetup, each
    reward = each(lambda text, truth: 0.0)
    return TextSetup(name="sayings", tasks=ArithmeticTasks(), reward=reward)

def raw():
    from dataclasses import replace
    from dialoop.environments import completion
    from dialoop.testing import byte_tokenizer
    return replace(completion(tokenizer=byte_tokenizer()), tasks=ArithmeticTasks())

def alone(task):
    return 0.0

def few(group):
    return [1.0]

def endless(group):
    return [float("inf")] * group.num_trajectories

def mean(rewards):
    return sum(rewards) / len(rewards)

def brief(rewards):
    return rewards[:2]

def unready(rewards):
    return [reward / 0 for reward in rewards]

def mine(inputs, *, cap: float = 1.0):
    from dialoop_learning.loss.losses import LossOutput
    return LossOutput(inputs.mean(-cap * inputs.policy_logprobs), {})

def vector(inputs):
    from dialoop_learning.loss.losses import LossOutput
    return LossOutput(-inputs.policy_logprobs, {})
"""

MISTAKES = {
    "unknown table": ("[trian]\nnum_steps = 3\n", "did you mean 'train'?"),
    "unknown key": ("[train]\nlearning_rat = 3\n", "did you mean 'learning_rate'?"),
    "wrong type": ('[train]\nnum_steps = "many"\n', "train.num_steps is 'many'"),
    "out of range": ("[collector]\ntemperature = 0\n", "collector.temperature is 0"),
    "not TOML": ("[train\n", "line"),
    "engine": ('@engine = "vlm"\n', "did you mean 'vllm'?"),
    "loss": ('[train]\nloss = "grop"\n', "did you mean 'grpo'?"),
    "loss option": ("[train]\nloss = 'grpo'\nloss_options = { clip_hi = 0.3 }\n", "'clip_high'?"),
    "loss of one's own": ('[train]\nloss = "checked_code:mime"\n', "Did you mean 'mine'?"),
    "option of one's own": (
        '[train]\nloss = "checked_code:mine"\nloss_options = { caps = 1.0 }\n',
        "'cap'?",
    ),
    "loss module": ('[train]\nloss = "no_such_losses:mine"\n', "no module no_such_losses"),
    "environment": ('[environment]\nuse = "arithmetics"\n', "Did you mean 'arithmetic'?"),
    "environment attribute": ('[environment]\nuse = "checked_code:maker"\n', "maker"),
    "environment options": (
        '[environment]\nuse = "checked_code:make"\noptions = { loudness = 3 }\n',
        "loudness",
    ),
    "environment raises": (
        '[environment]\nuse = "checked_code:broken"\n',
        "ZeroDivisionError at checked_code.py, line 18",
    ),
    "environment name": ('[environment]\nuse = "checked_code:make"\nname = "quiet"\n', "'loud'"),
    "task file": ('[environment]\ntask_file = "none.jsonl"\n', "none.jsonl"),
    "task line": ('[environment]\ntask_file = "broken.jsonl"\n', "Line 2 of"),
    "held-out split": (
        '[environment]\ntask_file = "tasks.jsonl"\nheldout_fraction = 0.0\n',
        "no split 'heldout'",
    ),
    "agent": ('[environment]\nagent = "checked_code:nobody"\n', "The agent 'checked_code:nobody'"),
    "agent alone": ('[environment]\nagent = "checked_code:alone"\n', "a task and a connection"),
    "play": ('[environment]\nplay = "trials"\n', "environment.play is 'trials'"),
    "trial of no game": ('[environment]\nplay = "trial"\n', "arithmetic is not a game"),
    "text of a chat": ('[environment]\nplay = "text"\n', "arithmetic is not a text environment"),
    "text played as a chat": ('[environment]\nuse = "calculator"\n', "is a text environment"),
    "text environment": (
        '[environment]\nuse = "calculatr"\nplay = "text"\n',
        "Did you mean 'calculator'?",
    ),
    "free shots": (
        '[environment]\nuse = "twenty_questions"\nplay = "trial"\ntrial = { free_shots = 1 }\n',
        "free_shots is 1 of 1",
    ),
    "rewards of tokens": (
        '[environment]\nuse = "twenty_questions"\nplay = "trial"\n'
        'trial = { reward_split = "even" }\n[scorer]\nadvantage_aggregate = "mean"\n',
        "set advantage_aggregate to sum",
    ),
    "agent of a trial": (
        '[environment]\nuse = "twenty_questions"\nplay = "trial"\n'
        'trial = { agent = "checked_code:alone" }\n',
        "a policy, a tokenizer and sampling",
    ),
    "agent and trial": (
        '[environment]\nuse = "twenty_questions"\nplay = "trial"\nagent = "checked_code:make"\n',
        "no OpenAI agent plays",
    ),
    "trial without play": (
        '[environment]\nuse = "twenty_questions"\ntrial = { episodes_per_trial = 2 }\n',
        'set play = "trial"',
    ),
    "reward of a text": (
        '[environment]\nuse = "checked_code:sayings"\nplay = "text"\n',
        "takes 'truth'",
    ),
    "text mode": ('[environment]\nuse = "checked_code:raw"\n', "is in text mode"),
    "reward": ("[[scorer.rewards]]\nname = 'a'\nuse = 'checked_code:bref'\n", "reward function"),
    "reward for one of four": (
        "[[scorer.rewards]]\nname = 'a'\nuse = 'checked_code:few'\n",
        "gave 1 values for 4",
    ),
    "reward without a bound": (
        "[[scorer.rewards]]\nname = 'a'\nuse = 'checked_code:endless'\n",
        "gave a value that is not finite",
    ),
    "estimator of one number": (
        '[scorer]\nadvantage_estimator = "checked_code:mean"\n',
        "returned a float, which is no list of numbers",
    ),
    "estimator of two": (
        '[scorer]\nadvantage_estimator = "checked_code:brief"\n',
        "gave 2 advantages for 4 rewards",
    ),
    "estimator that raises": (
        '[scorer]\nadvantage_estimator = "checked_code:unready"\n',
        "raised ZeroDivisionError at checked_code.py, line",
    ),
    "loss that is a vector": (
        '[train]\nloss = "checked_code:vector"\n',
        "returned a tensor [6] as the loss",
    ),
    "engine without its class": ('@engine = "checked_code:Mime"\n', "checked_code has no Mime"),
    "estimator": ('[scorer]\nadvantage_estimator = "checked_code:rank"\n', "advantage estimator"),
    "optimizer": ('[train]\noptimizer = "adamv"\n', "did you mean 'adamw'?"),
    "optimizer of one's own": (
        '[train]\noptimizer = "checked_code:mime"\n',
        "Did you mean 'mine'?",
    ),
    "optimizer of torch": ('[train]\noptimizer = "torch.optim:NAdan"\n', "Did you mean 'NAdam'?"),
    "data plane": ('[inference]\ndata_plane = "chunk"\n', "did you mean 'chunks'?"),
    "data plane of one's own": ('[inference]\ndata_plane = "checked_code:P"\n', "has no P"),
    "tracker of one's own": ('[trackers]\nuse = ["no_such:T"]\n', "no module no_such"),
    "tracker without a path": ('[trackers]\nuse = ["wandb"]\n', "it is no import path"),
    "lengths": (
        "[collector]\nmax_new_tokens = 128\n[inference]\nmax_model_len = 64\n",
        "max_new_tokens is 128",
    ),
    "positions": ("[inference]\nmax_model_len = 4096\n", "the model has 512 positions"),
    "model": ('[model]\ndirectory = "no-model"\n', "There is no model directory"),
    "model of a hub": ('[model]\ndirectory = "Qwen/Qwen3-0.6B"\n', "hf download Qwen/Qwen3-0.6B"),
    "adapter": ('[model]\ndirectory = "adapter"\n', "trained on some/base"),
    "model without weights": ('[model]\ndirectory = "empty"\n', "holds no .safetensors file"),
    "model without tokenizer": ('[model]\ndirectory = "model"\n', "has no tokenizer.json"),
    "demonstrations": ('[warm_start]\nnum_steps = 3\nfile = "none.jsonl"\n', "none.jsonl"),
    "group of one": ("[collector]\ngroup_size = 1\n", "set it to 2 or more"),
    "no turns": ("[collector]\ntotal_turns = 0\n", "so nothing would be played"),
    "no GPU": ('[train]\ndevice = "cuda"\n', "train.device needs 1 GPU"),
    "tracker": ("[trackers]\nno_such_tracker = true\n", "no_such_tracker"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "checked_code.py").write_text(MODULE)
    (tmp_path / "tasks.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (tmp_path / "broken.jsonl").write_text('{"question": "1+1", "answer": "2"}\nnot json\n')
    for name in ("empty", "model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"max_position_embeddings": 600}')
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "some/base"}'
    )
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delitem(sys.modules, "checked_code", raising=False)
    return tmp_path


def check(folder: Path, text: str) -> int:
    if text.startswith("@"):
        text = HEAD.replace('engine = "transformers"\n', "") + text[1:]
    else:
        text = HEAD + text
    (folder / "job.toml").write_text(text)
    try:
        return main(["config", "check", str(folder / "job.toml")])
    finally:
        sys.modules.pop("checked_code", None)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_one_sentence_with_a_remedy(
    mistake: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, words = MISTAKES[mistake]
    started = time.process_time()
    assert check(folder, text) == 2
    assert time.process_time() - started < 5.0
    output = capsys.readouterr()
    (line,) = output.err.strip().splitlines()
    assert line.startswith("dialoop stack: ")
    assert words in line, line
    assert line.endswith(".")
    assert re.search(r"[.?] [A-Z]", line), f"no remedy: {line}"
    assert "Traceback" not in output.err


def test_several_mistakes_are_all_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        '[environment]\nuse = "checked_code:maker"\n[model]\ndirectory = "no-model"\n'
        '[train]\nloss = "checked_code:mime"\n'
    )
    assert check(folder, text) == 2
    output = capsys.readouterr().err
    assert len(output.splitlines()) == 3, output


def test_a_config_without_a_mistake_says_so_and_starts_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '[environment]\nuse = "checked_code:make"\n[train]\nloss = "checked_code:mine"\n'
    assert check(folder, f"{text}loss_options = {{ cap = 2.0 }}\n") == 0
    assert "job.toml: no mistake found." in capsys.readouterr().out
    assert not (folder / "runs").exists()


def test_what_deserves_a_warning_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(folder, '[train]\nloss = "dapo"\n') == 0
    assert "Warning: loss dapo is meant for drop_uniform = true" in capsys.readouterr().out


def test_a_port_that_is_taken_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert check(folder, f"[ports]\ntrainer = {port}\n") == 2
    assert f"Port {port} of trainer is taken" in capsys.readouterr().err


def test_a_redis_that_does_not_answer_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:secret@127.0.0.1:9/0")
    (folder / "job.toml").write_text('engine = "transformers"\n')
    assert main(["config", "check", str(folder / "job.toml")]) == 2
    error = capsys.readouterr().err
    assert "No server answers at REDIS_URL" in error
    assert "secret" not in error


def test_the_command_checks_without_importing_torch(folder: Path) -> None:
    (folder / "job.toml").write_text(f'{HEAD}[train]\nloss = "grop"\n')
    code = (
        "import sys\nfrom dialoop_ops.cli.main import main\n"
        "code = main(sys.argv[1:])\nassert 'torch' not in sys.modules\nsys.exit(code)\n"
    )
    path = f"{ROOT / 'client'}{os.pathsep}{ROOT / 'services'}"
    for text, expected in (('loss = "grop"', 2), ('loss = "grpo"', 0)):
        (folder / "job.toml").write_text(f"{HEAD}[train]\n{text}\n")
        ended = subprocess.run(
            [sys.executable, "-c", code, "config", "check", "job.toml"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == expected, ended.stderr


def test_relative_paths_and_modules_are_those_of_the_configs_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "beside.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 2)
    (folder / "job.toml").write_text(
        f'{HEAD}[environment]\nuse = "checked_code:beside"\n[evaluation]\nnum_tasks = 0\n'
        '[sft]\nfile = "chats.jsonl"\n[warm_start]\nfile = "chats.jsonl"\n'
    )
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    before = list(sys.path)
    loaded = load_with_origins(folder / "job.toml", environment={})
    config = preflight.check(loaded.config, folder=loaded.folder)
    assert config.environment.served_name == "beside"
    chats = str(folder / "chats.jsonl")
    assert (config.sft.file, config.warm_start.file) == (chats, chats)
    assert (Path.cwd() != folder, sys.path) == (True, before)


def test_config_print_lists_what_a_key_may_be() -> None:
    lines: dict[str, str] = {}
    for line in toml_of(JobConfig()).splitlines():
        lines.setdefault(line.partition(" = ")[0], line)  # [inference] has an engine too
    for name in LOSSES:
        assert json.dumps(name) in lines["loss"].partition("Allowed: ")[2]
    assert (
        'Allowed: one of "adamw", "muon", or your own as "module:function".' in lines["optimizer"]
    )
    engines = 'Allowed: one of "vllm", "transformers", "openai", or your own as "module:Class".'
    assert engines in lines["engine"]
    assert lines["train_split"].count("Allowed") == 0
    assert "Allowed: at least 0 and below 1." in lines["heldout_fraction"]


def test_a_resumed_run_says_what_its_config_says_otherwise(tmp_path: Path) -> None:
    first = JobConfig.model_validate({"run": "again", "train": {"loss": "grpo"}})
    with open_run(tmp_path, first, fresh=False) as run_dir:
        assert run_dir.changes == ()
    (run_dir.path / "metrics.jsonl").touch()
    second = JobConfig.model_validate(
        {"run": "again", "train": {"loss": "dapo"}, "ports": {"replay": 7003}}
    )
    with open_run(tmp_path, second, fresh=False, reuse=True) as resumed:
        assert resumed.changes == ('train.loss: "grpo", now "dapo"',)
    with open_run(tmp_path, second, fresh=False, reuse=True) as unchanged:
        assert (unchanged.changes, unchanged.run_id) == ((), run_dir.run_id)


def test_only_its_owner_reads_a_new_run_and_a_resumed_one_keeps_its_mode(tmp_path: Path) -> None:
    config = JobConfig.model_validate({"run": "mine"})
    with open_run(tmp_path, config, fresh=False) as run_dir:
        assert run_dir.path.stat().st_mode & 0o777 == 0o700
    (run_dir.path / "metrics.jsonl").touch()
    run_dir.path.chmod(0o750)
    with open_run(tmp_path, config, fresh=False, reuse=True) as resumed:
        assert resumed.path.stat().st_mode & 0o777 == 0o750
    with open_run(tmp_path, config, fresh=True) as replaced:
        assert replaced.path.stat().st_mode & 0o777 == 0o700


def test_a_broken_template_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = folder / "model"
    vocabulary = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None}
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (model / "tokenizer.json").write_text(
        json.dumps({**vocabulary, "post_processor": None, "decoder": None, "model": words})
    )
    with pytest.raises(DialoopError) as caught:
        preflight.check_model(model)
    assert caught.value.reason == "TEMPLATE_MISSING"
    for source in ("{% for m in messages %}", "{{ raise_exception('no users') }}"):
        (model / "chat_template.jinja").write_text(source)
        with pytest.raises(InvalidConfig, match="template"):
            preflight.check_model(model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    preflight.check_model(model)


def test_a_record_of_experts_is_refused_where_engine_or_model_have_none() -> None:
    experts = {"num_experts": 8}
    records = InferenceSection(record_routed_experts=True)
    for engine, model, words in (
        ("vllm", experts, 'engine = "vllm" does not say which experts'),
        ("openai", experts, 'engine = "openai" does not say'),
        ("transformers", {"hidden_size": 8}, "the model has no experts"),
        ("transformers", {}, "the model has no experts"),
    ):
        config = JobConfig(engine=engine, inference=records)
        with pytest.raises(InvalidConfig, match=words) as caught:
            preflight._check_record_of_experts(config, model)
        assert caught.value.reason == "NO_ROUTED_EXPERTS"
        preflight._check_record_of_experts(JobConfig(engine=engine), model)
    for engine in ("transformers", "my_engines:Mine"):
        config = JobConfig(engine=engine, inference=records)
        preflight._check_record_of_experts(config, experts)


def test_experts_that_the_engine_would_never_renew_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    experts = {"text_config": {"num_experts": 8}}
    with pytest.raises(InvalidConfig, match="no new weights of experts") as caught:
        preflight._check_experts(JobConfig(engine="vllm"), experts)
    assert caught.value.reason == "MODEL_NOT_PUBLISHABLE"
    preflight._check_experts(JobConfig(engine="transformers"), experts)
    preflight._check_experts(JobConfig(engine="vllm"), {"num_experts": 0, "hidden_size": 8})
    only_serves = JobConfig.model_validate({"engine": "vllm", "train": {"num_steps": 0}})
    preflight._check_experts(only_serves, experts)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    preflight._check_experts(JobConfig(engine="vllm"), experts)


def test_the_environments_stop_strings_are_the_jobs_unless_it_names_its_own(
    folder: Path,
) -> None:
    """So run.json has them, and every export of the run."""
    own = load_environment("arithmetic").traits.stop
    assert own
    base = {"engine": "transformers", "store": "memory"}
    for tables, stop in (
        ({}, own),
        ({"collector": {"stop": ["\n"]}}, ("\n",)),
        ({"collector": {"stop": []}}, ()),
        ({"train": {"mode": "sft", "num_steps": 1}}, None),
    ):
        checked = preflight.check(JobConfig.model_validate(base | tables), folder=folder)
        assert checked.collector.stop == stop
