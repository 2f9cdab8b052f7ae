"""Do what `dialoop up`, `train`, `config` and `import` say: serve, run jobs, look at configs.

A stack that serves trains nothing by itself; a job runs to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path

from dialoop.errors import DialoopError, InvalidConfig
from dialoop.running_stacks import STACK_FILE
from dialoop_extras.importers.imported import import_config
from dialoop_services.config.file import (
    LoadedConfig,
    Override,
    chosen_values,
    load_with_origins,
    overrides_of_words,
    parse_config,
    toml_of,
)
from dialoop_services.config.job import JobConfig
from dialoop_services.runtime.cores import threads_of
from dialoop_services.runtime.exit_reason import ExitReason, known_error
from dialoop_services.runtime.process import die_with_parent
from rich.console import Console

from dialoop_ops.cli.console import complain
from dialoop_ops.launch import commands as launchers
from dialoop_ops.launch import slurm
from dialoop_ops.stack import job, preflight
from dialoop_ops.stack.branch import Branch, find_branch
from dialoop_ops.stack.devices import nodes_of, plan_devices, with_data_plane
from dialoop_ops.stack.estimates import card_lines, estimate_of, mesh_lines, span
from dialoop_ops.stack.gpus import driver_lists
from dialoop_ops.stack.layout import FIXED_PORTS, Layout, variables_of_tables
from dialoop_ops.stack.processes.log_stream import LogStream
from dialoop_ops.stack.processes.processes import adopt_orphans, descendants, kill
from dialoop_ops.stack.report.compare import compare
from dialoop_ops.stack.run_dir import RunDir, open_run, started_with
from dialoop_ops.stack.running import plan_stack, running_stack
from dialoop_ops.stack.user_code import working_in

_SLOW_STEP_S = 3600
_SIGNALLED = 128
"""Exit codes above it say which signal ended the job, as those of shells do."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(options: argparse.Namespace) -> int:
    """Return 0 for success, 2 for a wrong setting or argument, 1 for any other failure."""
    die_with_parent()
    try:
        match options.command:
            case "import":
                sys.stdout.write(import_config(options.config))
                return 0
            case "train":
                return _train(options)
            case "up":
                return _start(options, _config(options))
        loaded = _config(options)
        if options.action == "check":
            return _check(loaded, options.config, as_json=options.json)
        _print(loaded, with_origins=options.origins, as_json=options.json)
    except (DialoopError, BaseExceptionGroup) as error:
        return _fail(error)
    return 0


def _train(options: argparse.Namespace) -> int:
    """Run the job, once or for each seed; return the exit code, the largest of several."""
    branch = find_branch(options.branch, options.root) if options.branch else None
    if branch is not None:
        branch.export()
    if not options.seeds:
        return _start(options, _config(options, branch), branch)
    jobs = [_config(options, branch, seed=seed) for seed in seeds_of(options.seeds)]
    if any(not launchers.runs_here(loaded.config) for loaded in jobs):
        raise InvalidConfig(
            f"--seeds compares jobs that run here, not on {jobs[0].config.launch.on}.",
            remedy="Start one job for each seed, with --run NAME --set seed=1, and compare them "
            "with `dialoop compare`.",
        )
    codes = []
    for loaded in jobs:
        code = ended_with(options.root, loaded.config) if not options.fresh else None
        if code is None:
            code = _start(options, loaded, branch)
        else:
            beside = sys.stderr if options.json else sys.stdout
            beside.write(f"{loaded.config.run} has ended already; --fresh repeats it.\n")
            _say_result(options, loaded.config, code)
        if code > _SIGNALLED:
            return code
        codes.append(code)
    compare([options.root / loaded.config.run for loaded in jobs], _console(options))
    return max(codes)


def _start(options: argparse.Namespace, loaded: LoadedConfig, branch: Branch | None = None) -> int:
    """Run a job or serve, in the run's folder, and return the exit code."""
    config, words = preflight.check(loaded.config, folder=loaded.folder), options.words
    is_job = options.command == "train"
    if is_job and options.print:
        again = [word for word in words if word != "--print"]
        sys.stdout.write(launchers.text_of(config, again, options.root, loaded.folder))
        return 0
    if is_job and not launchers.runs_here(config):
        return launchers.hand_over(config, words, options.root)
    fresh = slurm.is_fresh(os.environ, options.root / config.run, fresh=options.fresh)
    start = started_with(
        words, loaded.origins, branch_of=None if branch is None else branch.as_json()
    )
    while True:
        with open_run(
            options.root, config, fresh=fresh, reuse=not is_job, started_with=start
        ) as run_dir:
            try:
                code = _run(config, run_dir, loaded.folder, options)
            except Exception as error:
                if not launchers.has_moved(error):
                    raise
                complain(ExitReason.of(error).message)
                fresh = run_dir.saved_progress() is None
                continue
            if is_job and code > _SIGNALLED:
                beside = sys.stderr if options.json else sys.stdout
                beside.write(f"{_farewell(run_dir, config, words)}\n")
            elif is_job:
                _say_result(options, config, code)
            return code


def _console(options: argparse.Namespace) -> Console:
    """Return where people read on; with --json the standard output has nothing but JSON."""
    return Console(stderr=options.json)


def _say_result(options: argparse.Namespace, config: JobConfig, code: int) -> None:
    """With --json print one line of a run that has ended."""
    if options.json:
        run_dir = options.root / config.run
        summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
        result = {"run_dir": str(run_dir), "exit_code": code, "summary": summary}
        sys.stdout.write(f"{json.dumps(result)}\n")


def _config(
    options: argparse.Namespace, branch: Branch | None = None, *, seed: int | None = None
) -> LoadedConfig:
    """Return the config under what variables and the command line say; `seed` names its run."""
    overrides = variables_of_tables(os.environ)
    if options.command == "up":
        overrides = [*_serving_alone(with_ports=options.config is None), *overrides]
    if branch is not None:
        overrides = [*branch.overrides(), *overrides]
    if options.command == "train" and options.on:
        overrides = [*overrides, Override(path="launch.on", value=options.on, origin="--on")]
    loaded = load_with_origins(
        options.config,
        environment=os.environ,
        run=options.run,
        overrides=[*overrides, *overrides_of_words(options.set)],
    )
    if seed is None:
        return loaded
    loaded = for_seed(loaded, seed)
    return replace(loaded, config=preflight.check(loaded.config, folder=loaded.folder))


def _serving_alone(*, with_ports: bool) -> list[Override]:
    """Return what a stack that serves changes: it trains, evaluates and plays nothing by itself.

    The trainer still publishes and evaluates when it is asked to. Without a config the ports are
    fixed: the docs, the scripts and docker-compose.yml name them.
    """
    values: dict[str, object] = {
        "train.num_steps": 0,
        "warm_start.num_steps": 0,
        "sft.num_epochs": 0,
        "evaluation.num_tasks": 0,
    }
    if with_ports:
        values["ports"] = dict(FIXED_PORTS)
    return [Override(path=path, value=value, origin="serve") for path, value in values.items()]


def _print(loaded: LoadedConfig, *, with_origins: bool, as_json: bool) -> None:
    """Print a config with all defaults, and the plan of its devices."""
    config, origins = loaded.config, loaded.origins if with_origins else None
    devices = _device_comments(config)
    if as_json:
        value: dict[str, object] = {"config": config.model_dump(mode="json"), "devices": devices}
        value |= {"origins": dict(origins)} if origins is not None else {}
        sys.stdout.write(f"{json.dumps(value)}\n")
        return
    sys.stdout.write(toml_of(config, origins))
    sys.stdout.write("".join(f"# {line}\n" for line in devices))


def _check(loaded: LoadedConfig, path: Path, *, as_json: bool) -> int:
    """Print every mistake; if there is none, print warnings and say so."""
    mistakes, found = preflight.findings_in(loaded.config, folder=loaded.folder)
    for mistake in mistakes:
        _fail(mistake)
    if mistakes:
        if as_json:
            texts = [ExitReason.of(mistake).message for mistake in mistakes]
            sys.stdout.write(f"{json.dumps({'config': str(path), 'mistakes': texts})}\n")
        return 2
    warnings, devices = job.warnings_for(loaded.config), _device_lines(loaded.config)
    (estimates, slow), values = _estimates(loaded), chosen_values(loaded)
    warnings = (*warnings, *found, *slow)
    if as_json:
        value = {"config": str(path), "mistakes": [], "warnings": warnings}
        value |= {"devices": devices, "estimates": estimates, "values": values}
        sys.stdout.write(f"{json.dumps(value)}\n")
        return 0
    for warning in warnings:
        sys.stdout.write(f"Warning: {warning}.\n")
    shown = (f"value    {line}" for line in values)
    sys.stdout.write("".join(f"{line}\n" for line in (*shown, *devices, *estimates)))
    sys.stdout.write(f"{path}: no mistake found.\n")
    return 0


def _estimates(loaded: LoadedConfig) -> tuple[list[str], list[str]]:
    """Return what the job will need, a line each, and warnings; none where that is not known."""
    config = loaded.config
    with working_in(loaded.folder):
        estimate = estimate_of(config)
        if estimate is None:
            return [], []
        nodes = nodes_of(config, os.environ)
        plan, size = plan_devices(config, nodes), config.resources.gpu_memory_gib
        gpus = () if config.resources.is_for_other_machines or not plan.gpus else driver_lists()
        total = max((gpu.total or 0 for gpu in gpus or ()), default=0)
        room = size * 2**30 if size else total
        cards = [*card_lines(config, plan, total=room), *mesh_lines(config, room=room)]
    is_cpu = config.train.device == "cpu"
    num_threads = threads_of(config.train.num_threads)
    rate = 1e3 * (config.resources.gpu_tflops or 0)
    if is_cpu:
        rate = preflight.gflops_of_this_machine() * num_threads
    lines = [*estimate.lines(gflops=rate), *cards]
    seconds = estimate.step_products / rate / 1e9 if rate and is_cpu else 0.0
    if seconds < _SLOW_STEP_S:
        return lines, []
    return lines, [
        f"a train step takes up to {span(seconds)} on this CPU: train on a GPU (device in "
        "[train]), or take a smaller model, fewer groups_per_train_step or a shorter max_model_len"
    ]


def _device_lines(config: JobConfig) -> list[str]:
    """Return the plan of the devices, a line for each process; none where there is no GPU."""
    plan = plan_devices(config, nodes_of(config, os.environ))
    plane = with_data_plane(config, {each.name: each.variables for each in plan.processes})
    shared = plane.inference.data_plane
    is_chosen = shared != config.inference.data_plane
    return [*plan.lines(), *[f"  Policies go to the replica over {shared}."][: int(is_chosen)]]


def _device_comments(config: JobConfig) -> list[str]:
    """Return the plan of the devices, or why there is none: a config is printed either way."""
    try:
        return _device_lines(config)
    except InvalidConfig as error:
        return [f"Devices: {error.message}"]


def _run(config: JobConfig, run_dir: RunDir, folder: Path, options: argparse.Namespace) -> int:
    console, is_job = _console(options), options.command == "train"
    adopt_orphans()
    log = LogStream(console, run_dir.logs, least="WARNING" if is_job else "INFO")
    if run_dir.is_resumed:
        log.say("stack", f"resuming {run_dir.path}")
        for change in run_dir.changes:
            log.say("stack", f"the config has changed: {change}", style="yellow")
    try:
        with launchers.site_of(config, is_job=is_job) as site:
            layout = plan_stack(config, run_dir, folder, site)
            work = job.train(layout, log, console) if is_job else _serve(layout, log, options)
            return asyncio.run(_until_stopped(work, log))
    finally:
        kill(descendants(os.getpid()))


async def _serve(layout: Layout, log: LogStream, options: argparse.Namespace) -> int:
    async with running_stack(layout, log):
        if options.json:
            announced = json.loads((layout.run_dir.path / STACK_FILE).read_text("utf-8"))
            names = ("pid", "run_id", "addresses", "rest_addresses", "console")
            facts = {"run_dir": str(layout.run_dir.path)} | {n: announced[n] for n in names}
            sys.stdout.write(f"{json.dumps(facts)}\n")
            sys.stdout.flush()
        log.say("stack", "all services are ready; Ctrl-C stops them")
        await asyncio.Event().wait()
    return 0


def _farewell(run_dir: RunDir, config: JobConfig, words: Sequence[str]) -> str:
    """Return what an interrupted job has saved, and how to go on."""
    progress = run_dir.saved_progress()
    command = shlex.join(["dialoop", *(word for word in words if word != "--fresh")])
    if progress is None:
        return (
            f"Stopped before anything was saved in {run_dir.path}. Start again with `{command} "
            "--fresh`."
        )
    warm_up, steps = progress["num_warm_start_steps"], progress["num_train_steps"]
    at = f"train step {steps} of {config.train.num_steps}"
    if not steps and warm_up < config.warm_start.num_steps:
        at = f"warm-start step {warm_up} of {config.warm_start.num_steps}"
    version = progress["policy_version"]
    return (
        f"Stopped. Saved in {run_dir.path}: {at}, policy {version['lineage']}-{version['number']}. "
        f"Go on with `{command}`."
    )


async def _until_stopped(work: Coroutine[None, None, int], log: LogStream) -> int:
    """Return the work's exit code, or 128 + the number of the signal that ended it early."""
    loop = asyncio.get_running_loop()
    signals: list[int] = []
    running = asyncio.ensure_future(work)

    def stop(number: int) -> None:
        if signals:  # the second signal ends everything at once
            kill(descendants(os.getpid()))
        else:
            log.say("stack", "stopping; a second Ctrl-C ends everything at once")
            running.cancel()
        signals.append(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        return await running
    except asyncio.CancelledError:
        if not signals:
            raise
        return _SIGNALLED + signals[0]


def _fail(error: BaseException) -> int:
    """Write an error of Dialoop in one line and return the exit code; raise any other error."""
    if known_error(error) is None:
        raise error
    reason = ExitReason.of(error)
    complain(reason.message)
    return reason.exit_code


_ORIGIN = "--seeds"


def seeds_of(text: str) -> tuple[int, ...]:
    """Return the seeds that "0,1,2" lists; InvalidConfig for anything else, or one seed twice."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words) or len(set(map(int, words))) < len(words):
        raise InvalidConfig(
            f"--seeds {text} is not a list of different whole numbers.",
            remedy="Write it as --seeds 0,1,2.",
        )
    return tuple(map(int, words))


def for_seed(loaded: LoadedConfig, seed: int) -> LoadedConfig:
    """Return the job with this seed, under a run name that ends in it.

    Raises InvalidConfig where SEED sets the seed too.
    """
    if loaded.origins.get("seed") == "SEED":
        raise InvalidConfig(
            "SEED and --seeds both set the seed.", remedy="Unset the variable SEED."
        )
    run = f"{loaded.config.run}-seed-{seed}"
    # A preset's defaults are in the values already.
    values = loaded.config.model_dump(exclude_unset=True) | {"seed": seed, "run": run}
    return replace(
        loaded,
        config=parse_config(values, source=_ORIGIN),
        origins={**loaded.origins, "seed": _ORIGIN, "run": _ORIGIN},
    )


def ended_with(root: Path, config: JobConfig) -> int | None:
    """Return the exit code of a run that has ended under this very config; None for others."""
    run_dir = root / config.run
    try:
        before = json.loads((run_dir / "run.json").read_text("utf-8"))["config"]
        gates = json.loads((run_dir / "summary.json").read_text("utf-8"))["gates"]
    except (OSError, ValueError, KeyError):
        return None
    if before != config.model_dump(mode="json"):
        return None
    return 0 if all(gates.values()) else 1
