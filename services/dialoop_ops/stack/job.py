"""Run a job: start everything, train to the end, check and sum up what happened, stop."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dialoop.clients.trainer import Phase
from dialoop_services.config.advice import warnings_in
from dialoop_services.runtime.cores import threads_of

from dialoop_ops.stack.devices import warnings_for_devices
from dialoop_ops.stack.estimates import warnings_for_disk
from dialoop_ops.stack.layout import Layout, service_of
from dialoop_ops.stack.processes.redis_server import version_of
from dialoop_ops.stack.report import summary
from dialoop_ops.stack.report.live import LiveView, PhaseProgress
from dialoop_ops.stack.report.observer import Observer, PhaseClock, observing
from dialoop_ops.stack.report.plot import draw_learning
from dialoop_ops.stack.report.report import report
from dialoop_ops.stack.running import running_stack
from dialoop_ops.stack.template_checks import warnings_for_template

if TYPE_CHECKING:
    from dialoop_services.config.job import JobConfig
    from rich.console import Console

    from dialoop_ops.stack.processes.log_stream import LogStream
    from dialoop_ops.stack.processes.supervisor import Supervisor

_POLL_S = 1.0


async def train(layout: Layout, log: LogStream, console: Console) -> int:
    """Run the job and return 0 when every gate holds, else 1. The stack has ended by then."""
    config, run_dir = layout.config, layout.run_dir
    clock = PhaseClock(run_dir.path)
    log.say("stack", f"run {config.run}, engine {config.engine}")
    for warning in warnings_for(config):
        log.say("stack", warning, style="yellow")
    async with running_stack(layout, log) as supervisor:
        log.say("stack", "all services are ready")
        async with observing(layout) as observer:
            await _until_done(observer, supervisor, clock, LiveView(console, log))
            # A service that has ended often and is there again needs no mending.
            alarms = tuple(s.alarm for s in supervisor.services if s.alarm and not s.is_serving)
            # Now nothing writes to the queue any more.
            names = [service.spec.name for service in supervisor.services]
            collectors = [name for name in names if service_of(name) == "collector"]
            await supervisor.stop(*collectors, "scorer")
            stats = await observer.final_stats()
        await supervisor.stop_all()
        clock.record("stopping")
        rescoring = await _rescore(layout, supervisor, log, LiveView(console, log))
        clock.record("re-scoring")
        restarts = {s.spec.name: s.num_restarts for s in supervisor.services}
    program = layout.redis_program
    result = summary.conclude(
        run_dir,
        config,
        stats=stats,
        rescoring=rescoring,
        seconds_by_phase=clock.seconds,
        num_sampled_tokens=clock.num_sampled_tokens,
        redis_version=version_of(program) if program else "",
        num_restarts=restarts,
        alarms=alarms,
    )
    draw_learning(run_dir.path / "metrics.jsonl", run_dir.path / "learning.png")
    report(result, run_dir.path, run_dir.model(config), console)
    return 0 if all(result["gates"].values()) else 1


def warnings_for(config: JobConfig) -> tuple[str, ...]:
    """Return a warning for each setting that works but may be a mistake."""
    return (
        *warnings_in(config),
        *warnings_for_devices(config),
        *warnings_for_template(config),
        *warnings_for_disk(config, shutil.disk_usage(Path.cwd()).free),
    )


async def _until_done(
    observer: Observer, supervisor: Supervisor, clock: PhaseClock, live: LiveView
) -> None:
    """Watch until training is done; a trainer that fails is started again by the supervisor."""
    clock.record("starting")
    with live:
        while True:
            snapshot = replace(await observer.snapshot(), alarms=supervisor.alarms)
            clock.record(snapshot.phase.name.lower(), snapshot.num_sampled_tokens)
            live.show(snapshot)
            if snapshot.phase is Phase.DONE:
                return
            await asyncio.sleep(_POLL_S)


async def _rescore(
    layout: Layout, supervisor: Supervisor, log: LogStream, live: LiveView
) -> dict[str, Any]:
    """Score a sample of the trajectories again under the policy versions that sampled them."""
    run_dir, model = layout.run_dir.path, layout.run_dir.model(layout.config)
    options = summary.rescoring_options(layout.config)
    if not options:
        return dict(summary.NOT_RESCORED)
    command = (sys.executable, "-m", "dialoop_ops.policies.rescore", str(run_dir))
    # As many threads as the trainer has: more would spin while they wait for each other.
    options["num_threads"] = threads_of(layout.config.train.num_threads)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    words = [*command, f"--model-dir={model}", *words]
    with live:
        showing = asyncio.create_task(_show_rescoring(log, live))
        try:
            code = await supervisor.run_once("rescore", tuple(words))
        finally:
            showing.cancel()
    line = log.last_line("rescore")
    if code:
        log.say("stack", f"Trajectories were not re-scored: {line}", style="yellow")
        return {**summary.NOT_RESCORED, "failure": line}
    result: dict[str, Any] = json.loads(line)
    return result


async def _show_rescoring(log: LogStream, live: LiveView) -> None:
    """Show how far the re-scoring is, until cancelled."""
    while True:
        await asyncio.sleep(_POLL_S)
        if progress := rescoring_progress(log.last_line("rescore")):
            live.show_progress(progress, {})


def rescoring_progress(line: str) -> PhaseProgress | None:
    """Return the progress that a line of the re-scoring tells of; None for other lines."""
    try:
        counts = json.loads(line)
        done, total = int(counts["num_done"]), int(counts["num_total"])
    except (ValueError, KeyError, TypeError):
        return None
    return PhaseProgress(name="re-scoring", num_done=done, num_total=total)
