"""Run `dialoop`: start, watch and stop a stack, train, play, and read what was played."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dialoop.errors import DialoopError, InvalidInput, NotFound

from dialoop_ops.cli.console import add_json, complain

if TYPE_CHECKING:
    from collections.abc import Sequence

    Commands = argparse._SubParsersAction["_Parser"]

ROOT = Path("runs")


class _Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is, and exit with code 2."""
        complain(f"{message.rstrip('.')}. See `{self.prog} --help`.")
        raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 for success, 2 for a wrong argument, 1 for any other failure."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(words)
    options.words = words
    try:
        # Imported here, so that `dialoop --help` loads no command.
        command = import_module(f"dialoop_ops.{options.module}")
        code: int = getattr(command, options.function)(options)
    except DialoopError as error:
        complain(str(error))
        return 2 if isinstance(error, (InvalidInput, NotFound)) else 1
    except BrokenPipeError:  # the reader took only the first lines
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    root = _Parser(prog="dialoop", description=__doc__)
    commands = root.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_Parser
    )
    _add_stack_commands(commands)
    _add_running(commands)
    _add_play(commands)
    _add_env(commands)
    _add_show(commands)
    _add_rights(commands)
    console = commands.add_parser("console", help="serve a page that shows runs, token by token")
    console.add_argument("runs", nargs="+", metavar="RUN", help="names or directories of runs")
    console.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    console.add_argument("--port", type=int, default=0, help="port to listen on (a free one)")
    console.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="write a folder that any browser opens, and end",
    )
    console.set_defaults(module="console.serving", function="console", root=ROOT)
    report = commands.add_parser("report", help="write runs into one page that any browser opens")
    report.add_argument("runs", nargs="+", metavar="RUN", help="names or directories of runs")
    report.add_argument(
        "--to", type=Path, metavar="FILE", help="the page (report.html in the first run's folder)"
    )
    add_json(report, "the page and its size")
    report.set_defaults(module="console.serving", function="report", root=ROOT)
    completion = commands.add_parser(
        "completion", help="print a script that completes dialoop's words in your shell"
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="bash, zsh or tcsh")
    completion.set_defaults(module="cli.completion", function="completion")
    compare = commands.add_parser(
        "compare", help="compare finished runs: means over seeds, and differences of configs"
    )
    compare.add_argument("runs", nargs="+", metavar="RUN", help="names or directories of runs")
    add_json(compare, "the comparison")
    compare.set_defaults(module="stack.report.compare", function="compare_runs", root=ROOT)
    _add_replay_step(commands)
    _add_model(commands)
    doctor = commands.add_parser(
        "doctor", help="show what this machine can run and what is missing"
    )
    add_json(doctor, "the findings")
    doctor.set_defaults(module="cli.doctor", function="doctor")
    _add_eval(commands)
    _add_audit(commands)
    _add_export(commands)
    _add_config(commands)
    imported = commands.add_parser(
        "import", help="print the job file for a config of verl or TRL, and what it leaves out"
    )
    imported.add_argument(
        "config", type=Path, help="verl's YAML, or a GRPOConfig (JSON, YAML, .py)"
    )
    imported.set_defaults(module="stack.commands", function="run")
    return root


def _add_rights(commands: Commands) -> None:
    token = commands.add_parser("token", help="make a token that may do some things only")
    token.add_argument("name", metavar="NAME", help="what the token file calls it")
    token.add_argument(
        "--scope",
        action="append",
        required=True,
        metavar="SCOPE",
        help="env, rollout, queue:append, queue:lease, weights or admin; may be repeated",
    )
    add_json(token, "the secret and its table")
    token.set_defaults(module="cli.token", function="token")
    ticket = commands.add_parser(
        "ticket", help="sign a ticket with which a replica or collector of yours joins a job"
    )
    ticket.add_argument("role", metavar="ROLE", help="what joins: inference, collector, ...")
    ticket.add_argument("--run", required=True, help="run id, as runs/NAME/stack.json has it")
    ticket.add_argument("--name", required=True, help="the instance's name in the registry")
    ticket.add_argument("--days", type=float, default=7.0, help="days until it ends (7)")
    ticket.set_defaults(module="cli.token", function="ticket")


def _add_stack_commands(commands: Commands) -> None:
    up = commands.add_parser("up", help="start every service on this machine")
    up.add_argument("config", nargs="?", type=Path, help="TOML job config")
    up.add_argument("--detach", action="store_true", help="return once everything is ready")
    train = commands.add_parser("train", help="run a training job to its end")
    train.add_argument("config", type=Path, help="TOML job config")
    train.add_argument("--seeds", default="", help="run once for each of these seeds, as 0,1,2")
    train.add_argument(
        "--from",
        dest="branch",
        default="",
        metavar="RUN@STEP",
        help="start from the policy that RUN published after STEP",
    )
    train.add_argument(
        "--on",
        default="",
        metavar="local|ray|slurm",
        help="what runs the job, instead of the config's launch.on",
    )
    train.add_argument(
        "--print", action="store_true", help="print what --on would start, and start nothing"
    )
    add_json(up, "the addresses, once all services are ready,")
    add_json(train, "the summary of each run, one line at its end,")
    up.set_defaults(module="cli.stack", function="up")
    train.set_defaults(module="stack.commands", function="run")
    for command in (up, train):
        _add_set(command)
        command.add_argument("--run", default="", help="name of the run, instead of the config's")
        command.add_argument("--fresh", action="store_true", help="replace an existing run")
        command.add_argument(
            "--folder", dest="root", type=Path, default=ROOT, help="where runs are kept (runs)"
        )


def _add_running(commands: Commands) -> None:
    """Add the commands that look at a running stack, change it or end it."""
    down = commands.add_parser("down", help="stop the stack of a run and wait for its end")
    down.add_argument("--timeout", type=float, default=120.0, help="seconds to wait (120)")
    add_json(down, "what has stopped")
    down.set_defaults(module="cli.stack", function="down")
    scale = commands.add_parser(
        "scale", help="grow or shrink collectors and replicas of a stack while it runs"
    )
    scale.add_argument(
        "counts", nargs="+", metavar="SERVICE=N", help="collector=4, inference=2; +1 and -1 too"
    )
    scale.add_argument("--run", default="", help="name of the run, if there are several stacks")
    scale.add_argument("--timeout", type=float, default=300.0, help="seconds to wait (300)")
    add_json(scale, "what the stack has then")
    scale.set_defaults(module="cli.scale", function="scale", root=ROOT)
    status = commands.add_parser(
        "status", help="show the health of a stack, its training and its queue"
    )
    status.set_defaults(module="cli.status", function="status")
    watch = commands.add_parser("watch", help="show the same every second, until the stack ends")
    watch.set_defaults(module="cli.status", function="watch")
    down.add_argument("run", nargs="?", default="", help="name of the run (default)")
    for command in (status, watch):
        command.add_argument(
            "run", nargs="?", default="", help="name of the run, if there are several stacks"
        )
        add_json(command, "the state, one line for a look,")
    for command in (down, status, watch):
        command.set_defaults(root=ROOT)


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="value that replaces the config's, as train.learning_rate=1e-5",
    )


def _add_play(commands: Commands) -> None:
    play = commands.add_parser("play", help="play one episode in the terminal")
    play.add_argument(
        "environment", help="arithmetic, jsonl or module:attribute; with an address, its name there"
    )
    play.add_argument(
        "--by", choices=("hand", "policy"), help="who answers: you or the policy (hand)"
    )
    play.add_argument("--task", default="", help="key of the task (the first of the split)")
    play.add_argument("--split", default="train", help="split of the task (train)")
    play.add_argument("--address", default="", help="host:port of an environment service")
    play.add_argument("--inference", default="", help="host:port of an inference service")
    play.add_argument("--run", default="", help="take both addresses from this run's stack")
    play.add_argument("--temperature", type=float, help="sampling temperature of the policy (1)")
    play.add_argument("--max-new-tokens", type=int, help="longest answer of the policy, in tokens")
    _add_options(play)
    play.set_defaults(module="cli.play", function="play", root=ROOT)


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument of the function that makes the environment; VALUE is JSON or text",
    )


def _add_env(commands: Commands) -> None:
    env = commands.add_parser("env", help="write, check, play and list environments")
    actions = env.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=_Parser
    )
    new = actions.add_parser("new", help="write a small environment to start from")
    new.add_argument(
        "name", help="name of the environment; NAME.py is written into the current folder"
    )
    add_json(new, "the files that are written")
    new.set_defaults(module="cli.env", function="new")
    check = actions.add_parser("check", help="check that an environment keeps the rules")
    check.add_argument("environment", help="arithmetic, jsonl or module:attribute")
    check.add_argument(
        "--say", action="append", default=[], metavar="TEXT", help="another answer to try"
    )
    check.add_argument("--tasks", type=int, default=3, help="tasks of each split to play (3)")
    add_json(check, "the findings")
    _add_options(check)
    check.set_defaults(module="cli.env", function="check")
    _add_play(actions)
    listed = actions.add_parser("list", help="list the environments")
    listed.add_argument("--address", default="", help="host:port of an environment service")
    listed.add_argument("--run", default="", help="list those of this run's stack")
    add_json(listed, "the list")
    listed.set_defaults(module="cli.env", function="list_environments", root=ROOT)


def _add_show(commands: Commands) -> None:
    show = commands.add_parser("show", help="print a trajectory in colour by who wrote what")
    show.add_argument("path", type=Path, help="a run's directory or a trajectories.jsonl")
    show.add_argument("--task", default="", help="only trajectories of this task key")
    show.add_argument("--id", default="", help="only those whose id begins with this")
    for name, text in (
        ("--label", "only those with this label, such as after_greedy"),
        ("--outcome", "only those with this outcome: trained, evaluation, ..."),
        ("--environment", "only those of this environment"),
        ("--stop-reason", "only those of which a turn ended so: STOP, LENGTH, CONTEXT_FULL, ..."),
        ("--owner", "only those with a failure of this owner: TOOL, INFERENCE, ...; ANY"),
        ("--text", "only those whose messages contain this"),
        ("--reward", "only those with a reward in this range: 1, 0.5:, :0, or 0:0.5"),
        ("--staleness", "range of policy versions by which the oldest token lagged"),
        ("--version", "range of policy versions that sampled it"),
        ("--length", "range of sampled tokens"),
        ("--tools", "range of tool calls that were run"),
        ("--step", "range of train steps"),
    ):
        show.add_argument(name, default="", help=text)
    which = show.add_mutually_exclusive_group()
    which.add_argument(
        "--index", type=int, default=-1, help="show the n-th of those (-1, the newest)"
    )
    which.add_argument(
        "--best",
        action="store_true",
        help="show the one with the highest reward, of those trained if there are any",
    )
    which.add_argument(
        "--worst",
        action="store_true",
        help="show the one with the lowest reward, of those trained if there are any",
    )
    show.add_argument("--tokens", action="store_true", help="add a line for each token")
    show.add_argument("--list", action="store_true", help="print a line for each that matches")
    show.add_argument("--group", action="store_true", help="print its whole group, a line each")
    add_json(show, "a trajectory a line")
    show.set_defaults(module="cli.show", function="show")


def _add_eval(commands: Commands) -> None:
    evaluate = commands.add_parser(
        "eval", help="evaluate a policy on an environment's tasks, and compare it with another"
    )
    evaluate.add_argument("environment", help="arithmetic, jsonl or module:attribute")
    evaluate.add_argument(
        "--policy",
        required=True,
        help="RUN@VERSION (as demo@latest), a model directory, host:port of an inference service, "
        "or the URL of an OpenAI-compatible endpoint",
    )
    evaluate.add_argument("--run", required=True, help="name of the evaluation, under runs/")
    evaluate.add_argument("--against", default="", help="an earlier evaluation to compare with")
    evaluate.add_argument("--model", default="", help="name of the endpoint's model")
    evaluate.add_argument("--split", default="heldout", help="split of the tasks (heldout)")
    evaluate.add_argument("--tasks", type=int, default=64, help="number of tasks (64); 0: all")
    evaluate.add_argument("--samples", type=int, default=1, help="episodes of each task (1)")
    evaluate.add_argument("--temperature", type=float, help="0 for one sample of a task, else 1")
    evaluate.add_argument(
        "--max-new-tokens",
        type=int,
        help="longest answer, in tokens (the run's; else 1024, or half the context)",
    )
    evaluate.add_argument("--max-turns", type=int, default=64, help="longest episode, in turns")
    evaluate.add_argument("--concurrency", type=int, default=32, help="episodes at a time (32)")
    evaluate.add_argument(
        "--engine", default="transformers", help="engine for a model directory (transformers)"
    )
    evaluate.add_argument(
        "--engine-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the engine, as url=http://127.0.0.1:8000/v1 with --engine openai",
    )
    evaluate.add_argument(
        "--max-model-len",
        type=int,
        help="the engine's longest sequence (the run's; else 8192, or the model's positions)",
    )
    evaluate.add_argument("--fresh", action="store_true", help="replace an earlier evaluation")
    add_json(evaluate, "the results")
    _add_options(evaluate)
    evaluate.set_defaults(module="cli.evaluate", function="evaluate", root=ROOT)


def _add_audit(commands: Commands) -> None:
    audit = commands.add_parser(
        "audit", help="find what is silently wrong in runs and in dumps of rollouts"
    )
    audit.add_argument("path", nargs="+", metavar="PATH", help="a run, or a dump of TRL's rollouts")
    audit.add_argument("--tokenizer", default="", help="model directory of the dump's tokenizer")
    audit.add_argument(
        "--claim",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what is said of its sampling, as temperature=0.7 or max_staleness=2",
    )
    add_json(audit, "the reports")
    audit.set_defaults(module="cli.audit", function="audit", root=ROOT)


def _add_export(commands: Commands) -> None:
    export = commands.add_parser(
        "export", help="write a published policy as a Hugging Face model directory"
    )
    export.add_argument("run", help="name of the run, or its directory")
    export.add_argument(
        "version", help="main-7, or its number if only one lineage has it, or latest"
    )
    export.add_argument("directory", type=Path, help="directory to write; it must not exist")
    export.add_argument(
        "--merged",
        action="store_true",
        help="add a LoRA adapter into the weights it was trained on",
    )
    export.add_argument(
        "--base", default="", help="version that the adapter was trained on (the run's own model)"
    )
    add_json(export, "the policy and its directory")
    export.set_defaults(module="policies.export", function="export", root=ROOT)


def _add_model(commands: Commands) -> None:
    model = commands.add_parser("model", help="look at a model directory")
    looks = model.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=_Parser
    )
    look = looks.add_parser("check", help="show what its chat template keeps, drops and refuses")
    look.add_argument("directory", help="a Hugging Face model directory, or a tokenizer's")
    add_json(look, "what each template does")
    look.set_defaults(module="cli.model", function="check")
    convert = looks.add_parser("from-gguf", help="write a GGUF file as a model directory")
    convert.add_argument("file", help="a .gguf file of a model shaped like Llama")
    convert.add_argument("directory", help="the new directory")
    convert.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the weights"
    )
    add_json(convert, "the directory and the number of parameters")
    convert.set_defaults(module="cli.model", function="from_gguf")


def _add_replay_step(commands: Commands) -> None:
    replay = commands.add_parser(
        "replay-step", help="repeat train steps that a run kept, and name the first difference"
    )
    replay.add_argument("run", help="name of the run, or its directory")
    replay.add_argument("steps", help="number of a train step, or several as 7..9")
    add_json(replay, "a step a line")
    replay.set_defaults(module="policies.replay_step", function="replay_step", root=ROOT)


def _add_config(commands: Commands) -> None:
    config = commands.add_parser("config", help="print or check a job config")
    actions = config.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=_Parser
    )
    shown = actions.add_parser("print", help="print the config with all defaults, as TOML")
    shown.add_argument("config", nargs="?", type=Path, help="TOML job config")
    shown.add_argument("--origins", action="store_true", help="say where each value is from")
    add_json(shown, "the config, with --origins also these,")
    check = actions.add_parser("check", help="say what is wrong in it, without starting anything")
    check.add_argument("config", type=Path, help="TOML job config")
    add_json(check, "mistakes, warnings and estimates")
    for command in (shown, check):
        _add_set(command)
        command.set_defaults(module="stack.commands", function="run", run="")


if __name__ == "__main__":
    sys.exit(main())
