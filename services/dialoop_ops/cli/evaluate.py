"""Run `dialoop eval`: any policy on any environment, with intervals and a paired comparison."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dialoop.clients.channel import Channel
from dialoop.clients.inference import InferenceClient
from dialoop.environments import load_environment
from dialoop.environments.loading import bind_to_model
from dialoop.episode import Policy
from dialoop.errors import InvalidInput, NotFound, Unavailable
from dialoop.local.client import LocalEnvironmentClient
from dialoop.reasons import Reason
from dialoop.trajectory import SamplingParams
from rich.progress import Progress

from dialoop_ops.cli.console import rich_console, say
from dialoop_ops.cli.play import import_from_here, options_of
from dialoop_ops.evaluation import (
    EndpointPolicy,
    EvaluationRecords,
    EvaluationResults,
    EvaluationSpec,
    PairedResults,
)
from dialoop_ops.evaluation import evaluate as play_all
from dialoop_ops.evaluation.results import ks_of
from dialoop_ops.runs.run_config import find_run
from dialoop_ops.stack.branch import export_policy
from dialoop_ops.stack.processes.ports import choose_ports

_SERVICE = "dialoop_services.inference"
_MIN_SHARE = 0.9
_POLL_S = 0.2
_STOPS_IN_S = 30.0


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate, print the results and, with --against, the comparison; return 0."""
    import_from_here()
    run_dir = arguments.root / arguments.run
    against = find_run(arguments.against, arguments.root) if arguments.against else None
    theirs = EvaluationResults.of(against) if against is not None else None
    asyncio.run(_evaluate(arguments, run_dir))
    ours = EvaluationResults.of(run_dir)
    paired = None if theirs is None else PairedResults.of(ours, theirs)
    if arguments.json:
        comparison = None if paired is None else asdict(paired)
        say(json.dumps(ours.as_json() | {"against": comparison}, indent=2))
        return 0
    _print(ours, run_dir)
    if paired is not None:
        say(
            f"minus {arguments.against}: reward {paired.difference}; better on "
            f"{paired.num_better} tasks, worse on {paired.num_worse}, equal on {paired.num_equal} "
            f"(sign test p = {paired.p_value:.3g})"
        )
    return 0


def _print(results: EvaluationResults, run_dir: Path) -> None:
    num_samples = results.spec.num_samples
    say(f"{results.spec.policy} on {results.spec.environment}, {results.spec.split}:")
    say(f"  tasks    {len(results.rewards)}, {num_samples} episodes each")
    say(f"  reward   {results.mean_reward or '-'}")
    for k in ks_of(num_samples):
        say(f"  pass@{k:<3} {results.pass_at(k) or '-'}")
    if results.num_failed:
        num_scored = sum(map(len, results.rewards.values()))
        total = num_scored + results.num_failed
        say(f"  failed   {results.num_failed} of {total} episodes; the same command repeats them")
        if num_scored < _MIN_SHARE * total:
            say("  Too few episodes count: these means decide nothing.")
    say(f"  means and 95 % intervals over tasks; every episode is in {run_dir}/")


async def _evaluate(arguments: argparse.Namespace, run_dir: Path) -> None:
    environment = load_environment(arguments.environment, options_of(arguments.option))
    temperature = arguments.temperature
    if temperature is None:
        temperature = 0.0 if arguments.samples == 1 else 1.0
    spec = EvaluationSpec(
        environment=environment.name,
        policy=arguments.policy,
        split=arguments.split,
        num_tasks=arguments.tasks,
        num_samples=arguments.samples,
        max_turns=arguments.max_turns,
        sampling=SamplingParams(temperature=temperature, max_new_tokens=arguments.max_new_tokens),
    )
    if arguments.concurrency < 1:
        raise InvalidInput(f"--concurrency is {arguments.concurrency}.", remedy="Give at least 1.")
    async with AsyncExitStack() as exits:
        scratch = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="dialoop-eval-")))
        model_dir = _model_dir(arguments, scratch)
        records = exits.enter_context(
            EvaluationRecords.open(
                run_dir, spec, model_dir=_tokenizer_dir(arguments), fresh=arguments.fresh
            )
        )
        policy = await exits.enter_async_context(_policy(arguments, model_dir, run_dir))
        if model_dir is not None:
            environment = bind_to_model(environment, model_dir)
        sessions = await exits.enter_async_context(LocalEnvironmentClient(environment))
        console = rich_console()
        progress = exits.enter_context(Progress(console=console, disable=not console.is_terminal))
        bar = progress.add_task("episodes")
        await play_all(
            spec,
            sessions=sessions,
            policy=policy,
            records=records,
            concurrency=arguments.concurrency,
            on_progress=lambda ended, total: progress.update(bar, completed=ended, total=total),
        )
    results = EvaluationResults.of(run_dir)
    mean = results.mean_reward
    records.conclude(results.as_json(), mean_reward=None if mean is None else mean.mean)


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _run_of(arguments: argparse.Namespace) -> tuple[Path, str] | None:
    """Return the run and the version that RUN@VERSION names; None for other policies."""
    name, at, version = arguments.policy.rpartition("@")
    return (find_run(name, arguments.root), version) if name and at else None


def _tokenizer_dir(arguments: argparse.Namespace) -> str:
    """Return where the policy's tokenizer lies for good; "" where it is not on this machine."""
    source = None if _is_url(arguments.policy) else _run_of(arguments)
    if source is None:
        return str(Path(arguments.policy).resolve()) if Path(arguments.policy).is_dir() else ""
    return str(Path(_config_of(source[0])["model"]["directory"] or source[0] / "model").resolve())


def _config_of(run_dir: Path) -> dict[str, Any]:
    """Return the config that a run was started with."""
    return dict(json.loads((run_dir / "run.json").read_text("utf-8"))["config"])


def _model_dir(arguments: argparse.Namespace, scratch: Path) -> Path | None:
    """Return the model directory to serve, exported where it is a run's; None to serve none."""
    named = Path(arguments.policy)
    if _is_url(arguments.policy):
        return None
    if any((named / name).is_file() for name in ("config.json", "tokenizer.json")):
        return named.resolve()
    source = _run_of(arguments)
    if source is None:
        host, colon, port = arguments.policy.rpartition(":")
        if host and colon and port.isdecimal():
            return None
        raise NotFound(
            f"{arguments.policy} is no model directory, and no other policy.",
            reason=Reason.MODEL_MISSING,
            remedy="Give RUN@VERSION, a model directory, host:port, or the URL of an endpoint.",
        )
    run_dir, version = source
    is_adapter = any((run_dir / "policies").glob("*/adapter_model.safetensors"))
    export_policy(run_dir, version, scratch / "model", merged=is_adapter)
    return scratch / "model"


@asynccontextmanager
async def _policy(
    arguments: argparse.Namespace, model_dir: Path | None, run_dir: Path
) -> AsyncIterator[Policy]:
    token = os.environ.get("DIALOOP_TOKEN", "")
    if _is_url(arguments.policy):
        if not arguments.model:
            raise InvalidInput("An endpoint needs the name of a model.", remedy="Add --model NAME.")
        key = os.environ.get("OPENAI_API_KEY", "")  # the job's token is nobody else's
        async with EndpointPolicy(arguments.policy, model=arguments.model, api_key=key) as policy:
            yield policy
    elif model_dir is None:
        async with Channel(arguments.policy, token=token) as channel:
            yield InferenceClient(channel)
    else:
        log = run_dir / "engine.log"
        async with (
            _serving(arguments, model_dir, log) as address,
            Channel(address, token=token) as channel,
        ):
            yield InferenceClient(channel)


@asynccontextmanager
async def _serving(arguments: argparse.Namespace, model_dir: Path, log: Path) -> AsyncIterator[str]:
    """Serve the model in a process of its own and yield its address; it has ended after that."""
    (port,) = choose_ports({"inference": 0}).values()
    settings = {
        "MODEL_DIR": str(model_dir),
        "ENGINE": arguments.engine,
        "PORT": str(port),
        "MAX_NUM_SEQS": str(max(1, arguments.concurrency)),
    }
    source = _run_of(arguments)
    if source is not None:  # a run's policy has the run's lengths, another those of its model
        config = _config_of(source[0])
        settings["MAX_MODEL_LEN"] = str(config["inference"]["max_model_len"])
        settings["MAX_NEW_TOKENS"] = str(config["collector"]["max_new_tokens"])
    if arguments.engine_option:
        settings["ENGINE_OPTIONS"] = json.dumps(options_of(arguments.engine_option))
    if arguments.max_model_len:
        settings["MAX_MODEL_LEN"] = str(arguments.max_model_len)
    variables = {f"DIALOOP_INFERENCE_{name}": value for name, value in settings.items()}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _SERVICE),
            stdout=output,
            stderr=output,
            env=os.environ | variables | {"DIALOOP_PARENT_PID": str(os.getpid())},
        )
    try:
        await _until_ready(process, f"127.0.0.1:{port}", log)
        yield f"127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOPS_IN_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _until_ready(process: Process, address: str, log: Path) -> None:
    """Wait until the engine answers; Unavailable with its last line where it ends before."""
    while process.returncode is None:
        try:
            async with Channel(address) as channel:
                await channel.wait_until_connected(timeout_s=1.0)
            return
        except Unavailable:
            await asyncio.sleep(_POLL_S)
    raise Unavailable(
        f"The engine did not start: {_last_line(log)}",
        reason=Reason.ENGINE_FAILED,
        remedy=f"Its whole log is {log}.",
    )


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"
