"""Do what `--on` and `--print` of `dialoop train` say: print a job, hand it over or place it."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dialoop_services.config.file import toml_of
from dialoop_services.config.job import JobConfig

from dialoop_ops.launch import slurm
from dialoop_ops.launch.ray import MovedError, bundles_of, ray_site
from dialoop_ops.launch.site import Site, this_site, threads_on
from dialoop_ops.stack.devices import needs_elsewhere
from dialoop_ops.stack.layout import Layout, ports_of
from dialoop_ops.stack.processes.redis_server import FoundRedis, find_redis
from dialoop_ops.stack.run_dir import RunDir

_BY_HAND = """\
# All machines see this folder, and have DIALOOP_TOKEN in their environment: one secret of yours.
# What trains runs on its machine; the first is this one, on which everything else runs.
"""


@contextmanager
def site_of(config: JobConfig, *, is_job: bool) -> Iterator[Site | None]:
    """Yield where this process starts the job; None: all of it on this machine, as `serve` is."""
    if not is_job:
        yield None
    elif config.launch.on == "slurm":
        yield slurm.slurm_site(config, os.environ)
    elif config.launch.on == "ray":
        with ray_site(config) as site:
            yield site
    else:
        yield None


def has_moved(error: BaseException) -> bool:
    """Return whether a process came back on another machine, which a new start puts right."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(has_moved, error.exceptions))
    return isinstance(error, MovedError)


def runs_here(config: JobConfig) -> bool:
    """Return whether this process starts the job's processes, and does not hand the job over."""
    return config.launch.on != "slurm" or slurm.is_inside(os.environ)


def hand_over(config: JobConfig, words: Sequence[str], root: Path) -> int:
    """Give the job to Slurm, say what became of it, and return the exit code."""
    number = slurm.submit(config, words, root)
    sys.stdout.write(
        f"Submitted job {number}. It writes to {slurm.log_of(config, root)} and to "
        f"{root / config.run}. `squeue --job={number}` shows it, `scancel {number}` ends it.\n"
    )
    return 0


def text_of(config: JobConfig, words: Sequence[str], root: Path, folder: Path) -> str:
    """Return what would be started or handed over, as `--print` shows it."""
    if config.launch.on == "slurm":
        return slurm.script_of(config, words, root)
    if config.launch.on == "ray":
        bundles = "".join(f"# Bundle: {json.dumps(each)}\n" for each in bundles_of(config))
        needs = needs_elsewhere(config)
        site = Site(needs=needs, hosts=dict.fromkeys(needs, "NODE"))
        return bundles + _plan_text(config, site, root, folder)
    if config.train.num_nodes > 1:  # started by hand, on this machine and on others
        needs = needs_elsewhere(config)
        devices = {name: threads_on(config, name, each) for name, each in needs.items()}
        hosts = dict.fromkeys(needs, socket.gethostname())
        site = Site(needs=needs, hosts=hosts, devices=devices)
        return _BY_HAND + _plan_text(config, site, root, folder)
    return _plan_text(config, this_site(config), root, folder)


def _plan_text(config: JobConfig, site: Site, root: Path, folder: Path) -> str:
    """Return the job file and the launch plan as shell commands, with the ports of this moment."""
    redis = find_redis(os.environ) if config.store == "redis" else FoundRedis()
    layout = Layout(
        config=config,
        run_dir=RunDir(path=root / config.run, run_id=config.run),
        folder=folder,
        ports=ports_of(config, with_redis=bool(redis.program)),
        redis_url=redis.url,
        redis_program=redis.program,
        devices=site.devices,
        needs=site.needs,
        hosts=site.hosts,
    )
    file = shlex.quote(str(layout.run_dir.job_file))
    job = f"cat > {file} <<'END_OF_JOB_FILE'\n{toml_of(config, whole=False)}END_OF_JOB_FILE\n"
    return "\n".join((job, *(process.as_shell() for process in layout.launch_plan().processes)))
