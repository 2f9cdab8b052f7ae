"""Mistakes of users: each is answered by one line with a remedy, and nothing is started.

Those that only a job shows are in `tests/contract/stack/test_jobs_that_cannot_learn.py`.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from dialoop_ops.cli.main import main
from dialoop_ops.stack import commands

from benchmarks.servers.families import make_family
from tests.support.samples.checked_jobs import HEAD, MODULE

# Of each: the lines of a job that both `dialoop config check` and `dialoop train` refuse, and words
# of the one line that they print. `F...` are those of users who tried the product.
CONFIGS = {
    "F2: rewards that are NaN": ('[environment]\nuse = "checked_code:not_a_number"\n', "gives nan"),
    "F3: a rate below 0": ("[train]\nlearning_rate = -1.0\n", "train.learning_rate is -1.0"),
    "F6: no chat template": ('[model]\ndirectory = "untemplated"\n', "has no chat template"),
    "F6: targets of LoRA": (
        '[model]\ndirectory = "qwen3"\nlora_rank = 8\nlora_targets = ["q_prj"]\n',
        "Did you mean q_proj?",
    ),
    "F6: a class that is not there": ('@engine = "checked_code:Mime"\n', "has no Mime"),
    "F6: prompts that are too long": (
        '[model]\ndirectory = "qwen3"\n[environment]\nuse = "checked_code:wordy"\n'
        "[evaluation]\nnum_tasks = 0\n",
        "4 of the first 4 prompts of wordy leave no token of max_model_len = 512",
    ),
    "F6: an answer that nothing ends": (
        '[model]\ndirectory = "endless"\n[collector]\nstop = []\n',
        "Nothing ends an answer but its length",
    ),
    "F6: rewards without a bound": ('[environment]\nuse = "checked_code:infinite"\n', "gives inf"),
    "F6: rewards that are no numbers": (
        '[environment]\nuse = "checked_code:words"\n',
        "gives 'very good' for task",
    ),
    "F6: rewards that hang": (
        '[environment]\nuse = "checked_code:hanging"\n',
        "took more than 0.5 s (checked_code.py, line",
    ),
    "F10: a card that is too small": (
        '[model]\ndirectory = "qwen3"\n'
        "[resources]\nnum_nodes = 2\ngpus_per_node = 8\ngpu_memory_gib = 0.25\n",
        "GiB of GPU 0 of node 0",
    ),
    "a gate without an evaluation": (
        "[gates]\nheldout_greedy_after_at_least = 0.5\n[evaluation]\nnum_tasks = 0\n",
        "heldout_greedy_after_at_least in [gates] cannot hold, since num_tasks is 0",
    ),
    "a gate on older data": (
        "[gates]\nolder_data_share_at_least = 0.5\n[train]\npipeline_depth = 0\n",
        "cannot hold, since pipeline_depth is 0",
    ),
    "a gate on older data that is all too old": (
        "[gates]\nolder_data_share_at_least = 0.5\n[train]\nmax_staleness = 0\n",
        "max_staleness 0",
    ),
    "a gate on more policies than steps": (
        "[gates]\npolicy_versions_at_least = 9\n[train]\nnum_steps = 3\n",
        "3 train steps publish 4",
    ),
    "fewer turns than a batch": ("[collector]\ntotal_turns = 120\n", "set it above 120"),
    "a share of successes that no group has": (
        "[collector]\ngroup_size = 4\n[train.candidates]\nsuccess_rate_above = 0.5\n"
        "success_rate_below = 0.6\n",
        "no share of 4 trajectories",
    ),
    "a correction that keeps nothing": (
        '[train.objective]\ncorrection = "icepop"\ncorrection_low = 2.0\n',
        "no token would be kept",
    ),
    "a correction of no advantages": (
        '[train]\nloss = "distill"\nobjective = { correction = "tis" }\n'
        "[scorer]\nreference_logprobs = true\n",
        "and loss distill reads none",
    ),
    "a kernel in another precision": (
        '[train]\nlogprob_kernel = "cut"\n',
        "in half precision alone",
    ),
    "steps of several processes": (
        "[train]\nkeep_steps = 3\nnum_processes = 2\n",
        "keep_steps is 3, and 2 processes train",
    ),
    "a time limit that is over at once": (
        "[launch.slurm]\ntime_limit_min = 2\n",
        "save_before_s is 120 and time_limit_min 2",
    ),
    "vLLM's data plane": ('[inference]\ndata_plane = "nccl"\n', "needs vLLM"),
    "options of demonstrations' loss": (
        '[train]\nmode = "sft"\nloss_options = { beta = 0.1 }\n',
        "The loss sft has no option 'beta'",
    ),
    "no held-out tasks beside demonstrations": (
        '[environment]\ntask_file = "tasks.jsonl"\nheldout_fraction = 0.0\n[train]\nmode = "sft"\n',
        "no split 'heldout'",
    ),
    "more of a group than it has": (
        "[collector]\ngroup_size = 4\nmin_group_size = 9\n",
        "min_group_size is 9, above group_size 4",
    ),
    "unknown table": ("[trian]\nnum_steps = 3\n", "did you mean 'train'?"),
    "unknown key": ("[train]\nlearning_rat = 3\n", "did you mean 'learning_rate'?"),
    "wrong type": ('[train]\nnum_steps = "many"\n', "train.num_steps is 'many'"),
    "out of range": ("[collector]\ntemperature = 0\n", "collector.temperature is 0"),
    "a key that is missing": (
        '[[scorer.rewards]]\nname = "brief"\n',
        'has no use in scorer.rewards.0. Add use = "...". Function that computes the reward, as',
    ),
    "a key of an optional table": (
        '[scorer]\nreference_server = { url = "http://127.0.0.1:1/v1", modle = "m" }\n',
        "in [scorer.reference_server]; did you mean 'model'?",
    ),
    "a key of one or another kind": (
        '[train]\npipeline_depth = "fast"\n',
        "train.pipeline_depth is 'fast': input should be a valid integer",
    ),
    "a text for a list": (
        '[model]\nlora_targets = "q_proj"\n',
        "it should be a list, as [...]. Correct model.lora_targets. Linear layers",
    ),
    "true for a number": ("[train]\nnum_steps = true\n", "num_steps is true, which it cannot be"),
    "a value among free keys": (
        '[train]\nloss_options = { clip = "b" }\n',
        "train.loss_options.clip is 'b'",
    ),
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
    "a split without a task": (
        '[environment]\nuse = "checked_code:untasked"\n',
        "has no task in its split 'train'",
    ),
    "a gate on tools that are not there": (
        '[environment]\nuse = "checked_code:untooled"\n'
        "[gates]\ntool_call_rate_after_at_least = 0.5\n",
        "the environment own has no tools",
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
    "F22: the name of a hub": (
        '[model]\ndirectory = "Qwen/Qwen3-0.6B"\n',
        "hf download Qwen/Qwen3-0.6B",
    ),
    "adapter": ('[model]\ndirectory = "adapter"\n', "trained on some/base"),
    "model without weights": ('[model]\ndirectory = "empty"\n', "holds no .safetensors file"),
    "model without tokenizer": ('[model]\ndirectory = "model"\n', "has no tokenizer.json"),
    "demonstrations": ('[warm_start]\nnum_steps = 3\nfile = "none.jsonl"\n', "none.jsonl"),
    "group of one": ("[collector]\ngroup_size = 1\n", "set it to 2 or more"),
    "no turns": ("[collector]\ntotal_turns = 0\n", "so nothing would be played"),
    "no GPU": ('[train]\ndevice = "cuda"\n', "train.device needs 1 GPU"),
    "tracker": ("[trackers]\nno_such_tracker = true\n", "no_such_tracker"),
}

# Of each: the words of a command, its exit code, and words of the line that says what is wrong.
COMMANDS: dict[str, tuple[str, int, str]] = {
    "F1: verl's batches for 2 x 8 GPUs": (
        "import verl.yaml",
        0,
        "# Fill in train.num_steps: it is 15 epochs of (rows of the data // 1024) steps",
    ),
    "F1: an adapter that cannot be carried over": ("import trl.json", 0, "use_dora"),
    "F7: a tool that always raises": (
        "env check checked_code:without_network",
        1,
        "Tool offline failed: RuntimeError at checked_code.py, line",
    ),
    "F8: a state that all episodes share": ("env check checked_code:shared_state", 1, "sessions"),
    "F15: a table of --set": ("train job.toml --set trian.num_steps=3", 2, "--set has an unknown"),
    "F15: a loss of --set": ("train job.toml --set train.loss=gpro", 2, "did you mean 'grpo'?"),
    "F17: rewards beside an agent": ("config check agent.toml", 0, "reward_funcs"),
    "F21: a run that has not ended": ("compare none nor", 2, "is no run that has ended"),
    "a setting without a value": ("train job.toml --set train.num_steps", 2, "is not KEY=VALUE"),
    "seeds": ("train job.toml --seeds a", 2, "not a list of different whole numbers"),
    "a job that is not there": ("train none.toml", 2, "The config none.toml cannot be read"),
    "a folder as a job": ("train empty", 2, "The config empty cannot be read"),
    "an import of nothing": ("import none.yaml", 2, "none.yaml cannot be read"),
    "a run to export": ("export none latest out", 2, "runs/none"),
    "a run to replay": ("replay-step none 3", 2, "runs/none is not a run"),
    "a run to show": ("show nowhere", 2, "cannot be read"),
    "a run to report": ("report none", 2, "is not the directory of a run"),
    "a run to look at": ("console none", 2, "is not the directory of a run"),
    "a run to audit": ("audit none", 2, "none does not exist"),
    "a policy to evaluate": ("eval arithmetic --policy none --run e", 2, "no model directory"),
    "an environment to evaluate": ("eval arithmeti --policy qwen3 --run e", 2, "'arithmetic'?"),
    "an environment to play": ("play arithmeti", 2, "Did you mean 'arithmetic'?"),
    "a task to play": ("play arithmetic --task no", 2, "holds no task 'no'"),
    "a policy to play": ("play arithmetic --by policy", 2, "needs an inference service"),
    "an option to play": ("play arithmetic --option low", 2, "is not NAME=VALUE"),
    "an environment to check": ("env check nonesuch", 2, "There is no environment 'nonesuch'"),
    "an environment's name": ("env new 1st", 2, "cannot be the name of a Python file"),
    "a model to check": ("model check none", 2, "has no tokenizer.json"),
    "a stack to scale": ("scale inference=2", 1, "No stack is running"),
    "a stack to stop": ("down", 1, "`dialoop up`"),
    "a stack to ask": ("status mine", 1, "`dialoop up`"),
    "a command": ("frob", 2, "invalid choice: 'frob'"),
    "an action": ("config frob", 2, "invalid choice: 'frob'"),
    "an argument": ("show", 2, "required: path"),
}
FILES = {
    "checked_code.py": MODULE,
    "tasks.jsonl": '{"question": "1+1", "answer": "2"}\n',
    "broken.jsonl": '{"question": "1+1", "answer": "2"}\nnot json\n',
    "adapter/adapter_config.json": '{"base_model_name_or_path": "some/base"}',
    "empty/config.json": '{"max_position_embeddings": 600}',
    "model/config.json": '{"max_position_embeddings": 600}',
    "model/model.safetensors": "\2\0\0\0\0\0\0\0{}",
    "job.toml": HEAD,
    "agent.toml": HEAD + '[environment]\nuse = "trl"\nagent = "checked_code:agent"\n'
    'options = { dataset = "trl.jsonl", reward_funcs = "checked_code:graded" }\n'
    "[evaluation]\nnum_tasks = 0\n",
    "trl.jsonl": '{"prompt": "1+1"}\n' * 4,
    "trl.json": '{"max_steps": 3, "peft_config": {"r": 8, "use_dora": true}}',
    "verl.yaml": "actor_rollout_ref:\n  model: {path: Qwen/Qwen2.5-7B-Instruct}\n"
    "data: {train_files: a.parquet, train_batch_size: 1024}\n"
    "trainer: {n_gpus_per_node: 8, nnodes: 2, total_epochs: 15}\n",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model, one without a chat template, and one whose answers nothing ends."""
    folder = tmp_path_factory.mktemp("models")
    whole = make_family("qwen3", folder / "qwen3")
    for name, template in (("untemplated", ""), ("endless", "{{ messages | string }}")):
        shutil.copytree(whole, folder / name)
        path = folder / name / "tokenizer_config.json"
        fields = json.loads(path.read_text("utf-8"))
        kept = {
            key: value for key, value in fields.items() if key not in ("chat_template", "eos_token")
        }
        path.write_text(json.dumps(kept | ({"chat_template": template} if template else {})))
        (folder / name / "generation_config.json").unlink()
    return folder


@pytest.fixture
def started(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a command starts in the user's folder, which is the current one; nothing is run."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for model in models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delitem(sys.modules, "checked_code", raising=False)
    runs: list[Any] = []
    monkeypatch.setattr(commands, "_run", lambda *parts: runs.append(parts) or 0)
    return runs


def answer_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Return a command's exit code, and what it prints."""
    try:
        code = main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.modules.pop("checked_code", None)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize("mistake", CONFIGS)
def test_a_mistake_in_a_job_is_one_sentence_with_a_remedy(
    mistake: str, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    lines, words = CONFIGS[mistake]
    own_engine = lines.startswith("@")
    head = HEAD.replace('engine = "transformers"\n', "") if own_engine else HEAD
    Path("job.toml").write_text(head + lines.removeprefix("@"))
    began = time.process_time()
    code, _, error = answer_of(["config", "check", "job.toml"], capsys)
    assert time.process_time() - began < 5.0
    (line,) = error.strip().splitlines()
    assert code == 2
    assert line.startswith("dialoop: ")
    assert words in line, line
    assert line.endswith(".")
    assert re.search(r"[.?] [A-Z]", line), f"no remedy: {line}"
    if mistake.startswith("F"):
        assert answer_of(["train", "job.toml"], capsys)[::2] == (2, error)
    assert (started, Path("runs").exists()) == ([], False)


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_mistake_of_the_command_line_is_said_in_its_line(
    mistake: str, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command, expected, words = COMMANDS[mistake]
    code, output, error = answer_of(command.split(), capsys)
    assert code == expected
    answer = output if code == 0 or "FAIL" in output else error
    (line, *_) = [line for line in answer.splitlines() if words in line] or [answer]
    assert words in line, answer
    if answer is error:
        assert len(error.strip().splitlines()) == 1
        assert line.startswith("dialoop")
        assert line.endswith((".", "?"))
    assert (started, Path("runs").exists()) == ([], False)
