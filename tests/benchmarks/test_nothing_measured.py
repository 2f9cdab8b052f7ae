"""Every module of benchmarks/ can be imported, and a benchmark that measures nothing says so."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest

from benchmarks.demo_cpu import DemoRun

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "benchmarks").rglob("*.py")
)
# Started by a Python of their own, which has what they compare with.
PEERS = {
    "benchmarks.servers.openenv_echo": "openenv",
    "benchmarks.servers.trl_grpo": "trl",
    "benchmarks.servers.trl_instructions": "trl",
    "benchmarks.servers.trl_rollouts": "trl",
}


class Case(NamedTuple):
    """A benchmark that runs with these words while what it measures with returns `returns`."""

    words: tuple[str, ...] = ()
    returns: dict[str, Any] = {}  # noqa: RUF012


ZERO_RUN = DemoRun(cpu_s=0.0, wall_s=0.0, load=(1.0, 1.0))
CASES = {
    "adding_a_turn": Case(returns={"_tokenizer": MagicMock(), "_measure": {}}),
    "answers": Case(("--tokens", "9"), {"_took_us": 0.0}),
    "audit.planted": Case(returns={"measure": {"faults": {}, "alarms": []}}),
    "audit.rollouts": Case(returns={"train": Path("none"), "note": None}),
    "console.many_tokens": Case(
        ("--keep", "RUN"), {"make_run": None, "RunIndex": MagicMock(), "measure": {}}
    ),
    "console.side_by_side": Case(("--run", "RUN", "--viewers", "RUN"), {"ask": {}}),
    "cpu_executors": Case(returns={"round_of": {}}),
    "demo_cpu": Case(returns={"run_demo": ZERO_RUN}),
    "environment_doors": Case(returns={"compare": {}}),
    "environment_steps": Case(returns={"_launch": (MagicMock(), ""), "_measure": {}}),
    "fleet.registry_members": Case(
        returns={
            "RedisServer": MagicMock(url=""),
            "_launch": (MagicMock(pid=1), ""),
            "measure": {},
        }
    ),
    "fleet.routing": Case(
        returns={
            "start": MagicMock(),
            "measure": {"one": {"hit_rate": 0.0}, "routed": {"hit_rate": 0.0}},
        }
    ),
    "fleet.trainer_ranks": Case(returns={"measure": {}}),
    "dividend.__main__": Case(("report", "slow"), {"results_of": {}}),
    "forest.__main__": Case(returns={"Way": MagicMock(), "figures_of": {}}),
    "generate_turns": Case(
        returns={"make_tiny_model": Path(), "measure": {}, "_render_ms": {}},
    ),
    "gpu.rates": Case(
        ("model",),
        {
            "figures_of": {
                **dict.fromkeys(("start_s", "requests", "new_tokens"), 1),
                "tokens_per_s": {},
                "nats": {"sampled_alone_or_among": 0.0, "scored_alone_or_among": 0.0},
            }
        },
    ),
    "half_precision": Case(returns={"measure": {}}),
    "inference_tokens": Case(
        returns={"make_model": Path(), "Service": MagicMock(), "_measure": {}}
    ),
    "learn_in_process": Case(returns={"run": {}}),
    "path_of_a_prompt": Case(returns={"trace": ({}, [])}),
    "publish_pause": Case(returns={"_measure": {}}),
    "real.__main__": Case(("--json",), {"fetch_model": None, "train": 0.0, "report": {}}),
    "real.deltas": Case(("--tiny",), {"make_tiny_model": Path(), "run": {}}),
    "real.mistakes": Case(
        returns={
            "make_models": None,
            "give_to_us": "silent",
            "words_of_trl": ("0", defaultdict(lambda: "silent")),
        }
    ),
    "real.race": Case(("report", "--target", "0.5"), {"results_in": []}),
    "reasoning_race": Case(returns={"race": {}, "ratios": {}}),
    "rendering": Case(
        returns={
            "_tokenizer": None,
            "_ways": {"dialoop": lambda: {"input_ids": [1], "assistant_masks": [1]}},
            "_took_ms": 0.0,
        }
    ),
    "replay_throughput": Case(returns={"_figures": {}}),
    "sandbox": Case(returns={"_measure": {}}),
    "soak.attacks": Case(returns={"soak": {}}),
    "soak.__main__": Case(returns={"soak": {"problems": []}}),
    "start_up": Case(returns={"figures": {}}),
    "step_turns": Case(returns={"compare": {}}),
    "task_file": Case(
        ("--num-tasks", "1"), {"subprocess": MagicMock(**{"run.return_value.stdout": "{}"})}
    ),
    "train_step": Case(
        returns={
            "train_step_batch": MagicMock(),
            "Way": MagicMock(),
            "prove": {},
            "measure_ways": None,
            "figures": {},
        }
    ),
}
# Those that end with a code of their own where there is no GPU, no such check, or no such bug.
REFUSING = {
    "audit.rollouts": ("no-such-run",),
    "gpu.evidence": ("--rehearse", "--only", "no-such-line"),
    "gpu.smoke": ("--rehearse", "--only", "no such check"),
    "learn.__main__": ("demo.toml", str(ROOT / "infra/configs/learn"), "--only", "no-such-config"),
    "silent_bugs.__main__": ("no-such-bug",),
}
# Run by others, or they print what they made.
PARTS = {
    "console.other_viewers",
    *("gpu.engine", "gpu.pack", "gpu.real_model", "gpu.real_shape", "gpu.train_step", "gpu.unpack"),
    *(
        "dividend.environments",
        "gpu",
        "gpu.fatbin",
        "gpu.lines",
        "gpu.place",
        "learn.report",
        "silent_bugs.bugs",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_benchmarks_can_be_imported(name: str) -> None:
    if name in PEERS and importlib.util.find_spec(PEERS[name]) is None:
        with pytest.raises(ModuleNotFoundError, match=f"'{PEERS[name]}"):
            importlib.import_module(name)
    else:
        importlib.import_module(name)


def test_every_benchmark_is_shown_to_refuse_nothing() -> None:
    names = {name.removeprefix("benchmarks.") for name in MODULES}
    scripts = {n for n in names if not n.startswith(("servers.", "gpu.smollm2"))}
    assert CASES.keys() | REFUSING.keys() == scripts - PARTS


def _returning(original: object, value: Any) -> Any:
    """Return a twin of a function that returns the value, or the twin of anything else itself."""
    if inspect.isclass(original) or inspect.ismodule(original):
        return value

    async def later(*_: Any, **__: Any) -> Any:
        return value

    return later if inspect.iscoroutinefunction(original) else lambda *_, **__: value


def run(name: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> object:
    """Return what a benchmark's process would exit with."""
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, *words])
    try:
        return module.main()
    except SystemExit as exit_:
        return exit_.code


@pytest.mark.parametrize("name", CASES)
def test_a_benchmark_that_measures_nothing_ends_with_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    module = importlib.import_module(f"benchmarks.{name}")
    for attribute, value in case.returns.items():
        monkeypatch.setattr(module, attribute, _returning(getattr(module, attribute), value))
    for file in ("trajectories.jsonl", "index.sqlite"):
        (tmp_path / file).touch()
    words = tuple(str(tmp_path) if word == "RUN" else word for word in case.words)
    code = run(name, words, monkeypatch)
    assert isinstance(code, str), code
    assert code
    assert "{" not in capsys.readouterr().out


@pytest.mark.parametrize("name", REFUSING)
def test_a_benchmark_refuses_a_name_that_it_does_not_know(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, REFUSING[name], monkeypatch)
    output = capsys.readouterr()
    assert "there is no" in (output.out + output.err).lower()
