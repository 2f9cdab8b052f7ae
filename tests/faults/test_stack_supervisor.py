from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from dialoop.errors import InvalidConfig, Unavailable
from dialoop_ops.launch.plan import RestartRule
from dialoop_ops.stack.processes.child import ServiceSpec
from dialoop_ops.stack.processes.log_stream import LogStream
from dialoop_ops.stack.processes.processes import members
from dialoop_ops.stack.processes.readiness import answers, is_serving
from dialoop_ops.stack.processes.redis_server import find_redis, redis_service
from dialoop_ops.stack.processes.supervisor import Supervisor, supervise
from rich.console import Console

from tests.support.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[2]

# Becomes ready, has a child that ignores SIGTERM, and ends on SIGTERM itself.
STUBBORN_CHILD = """
import pathlib, signal, subprocess, sys, time
ignoring = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", ignoring])
signal.signal(15, lambda *_: sys.exit(0))
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""
DEAF = """
import pathlib, signal, sys, time
signal.signal(15, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).write_text("0")
time.sleep(60)
"""
# Raises, as a service of ours does; what a library prints afterwards is no reason.
RAISING = """
import atexit, sys
from dialoop.errors import {kind}
from dialoop_services.runtime import run
async def serve():
    raise {kind}("The colour is wrong.", remedy="Choose another.")
atexit.register(lambda: print("See https://example.org/leaks", file=sys.stderr))
run(serve, name="probe")
"""
MISTAKEN, UNLUCKY = RAISING.format(kind="InvalidConfig"), RAISING.format(kind="Unavailable")
UNFORESEEN = RAISING.replace(
    '{kind}("The colour is wrong.", remedy="Choose another.")', 'OSError(27, "File too large")'
).format(kind="Unavailable")
FAILS_ONCE_READY = UNFORESEEN.replace(
    "    raise", "    pathlib.Path(sys.argv[1]).write_text('0'); time.sleep(0.5)\n    raise"
).replace("import atexit, sys", "import atexit, pathlib, sys, time")
WRONG_NAME = """
from dialoop.errors import NotFound
from dialoop.reasons import Reason
from dialoop_services.runtime import run
async def serve():
    with open({tries!r}, "a") as file:
        file.write("x")
    raise NotFound("There is no environment 'riddle'.", reason=Reason.ENVIRONMENT_NOT_FOUND,
                   remedy="Serve it, or correct the name.")
run(serve, name="probe")
"""
NOT_SERVING = """
import asyncio, pathlib, sys
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime import ServerSettings
async def main():
    async with GrpcServer(ServerSettings()) as server:
        await server.set_serving(False)
        path = pathlib.Path(sys.argv[1])
        path.with_suffix(".new").write_text(str(server.port))
        path.with_suffix(".new").rename(path)
        await asyncio.sleep(60)
asyncio.run(main())
"""
# Is ready the first time, and from then on ends before it is ready.
NEVER_AGAIN = """
import os, pathlib, sys, time
mark = pathlib.Path(sys.argv[1])
with mark.with_suffix(".restarts").open("a") as lines:
    print(os.environ["DIALOOP_NUM_RESTARTS"], file=lines)
if mark.with_suffix(".again").exists():
    sys.exit(3)
mark.with_suffix(".again").touch()
mark.write_text("0")
time.sleep(60)
"""
STACK = """
import asyncio, pathlib, sys
from rich.console import Console
sys.path.insert(0, sys.argv[3])
from tests.faults.test_stack_supervisor import STUBBORN_CHILD, spec, log_in
from dialoop_ops.stack.processes.supervisor import supervise

async def main():
    directory = pathlib.Path(sys.argv[1])
    async with supervise(log_in(directory)) as supervisor:
        await supervisor.start(spec(directory, STUBBORN_CHILD))
        pathlib.Path(sys.argv[2]).touch()
        await asyncio.sleep(60)

asyncio.run(main())
"""


def log_in(directory: Path) -> LogStream:
    return LogStream(Console(quiet=True), directory / "logs")


def spec(directory: Path, code: str, *, name: str = "probe", grace_s: float = 5.0) -> ServiceSpec:
    mark = directory / f"{name}.ready"

    async def is_ready() -> bool:
        return mark.exists() and mark.stat().st_size > 0

    return ServiceSpec(
        name=name,
        command=(sys.executable, "-c", code, str(mark)),
        is_ready=is_ready,
        ready_timeout_s=PATIENCE_S,
        stop_grace_s=grace_s,
    )


def pid_of(supervisor: Supervisor) -> int:
    child = supervisor.services[0].child
    assert child is not None
    return child.pid


async def test_nothing_is_left_when_the_context_is_left(tmp_path: Path) -> None:
    async with supervise(log_in(tmp_path)) as supervisor:
        await supervisor.start(spec(tmp_path, STUBBORN_CHILD))
        pid = pid_of(supervisor)
        assert len(members({pid})) == 2
    assert members({pid}) == []


async def test_a_service_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    async with supervise(log_in(tmp_path)) as supervisor:
        await supervisor.start(spec(tmp_path, DEAF, grace_s=0.3))
        pid = pid_of(supervisor)
    assert members({pid}) == []


async def test_a_killed_service_is_started_again_without_its_old_children(tmp_path: Path) -> None:
    output = io.StringIO()
    log = LogStream(Console(file=output, width=200), tmp_path / "logs")
    async with supervise(log) as supervisor:
        await supervisor.start(spec(tmp_path, STUBBORN_CHILD))
        first, service = pid_of(supervisor), supervisor.services[0]
        (tmp_path / "probe.ready").unlink()
        os.kill(first, signal.SIGKILL)
        await until(lambda: service.num_restarts == 1 and service.ready.is_set())
        second = pid_of(supervisor)
        assert second != first
        assert members({first}) == []
        (tmp_path / "probe.ready").unlink()
        os.kill(second, signal.SIGTERM)
        await until(lambda: service.num_restarts == 2 and service.ready.is_set())
        assert "ended with exit code 0" in output.getvalue()
        assert "the last line of its log" not in output.getvalue()


async def test_exit_code_2_ends_the_stack_with_the_services_sentence(tmp_path: Path) -> None:
    pids: list[int] = []

    async def run() -> None:
        async with supervise(log_in(tmp_path)) as supervisor:
            await supervisor.start(spec(tmp_path, STUBBORN_CHILD))
            pids.append(pid_of(supervisor))
            await supervisor.start(spec(tmp_path, MISTAKEN, name="mistaken"))

    with pytest.raises(ExceptionGroup) as caught:
        await run()
    assert caught.group_contains(InvalidConfig, match="^The colour is wrong. Choose another.$")
    assert members(pids) == []


async def test_a_name_that_another_service_does_not_know_is_not_tried_twice(tmp_path: Path) -> None:
    """A restart mends no wrong name, so the stack ends at once with the service's sentence."""
    code = WRONG_NAME.format(tries=str(tmp_path / "tries"))
    with pytest.raises(ExceptionGroup) as caught:
        async with supervise(log_in(tmp_path)) as supervisor:
            await supervisor.start(spec(tmp_path, code))
    sentence = "^There is no environment 'riddle'. Serve it, or correct the name.$"
    assert caught.group_contains(InvalidConfig, match=sentence)
    assert (tmp_path / "tries").read_text() == "x"


async def test_a_service_that_never_starts_ends_the_stack(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with supervise(log_in(tmp_path)) as supervisor:
            await supervisor.start(spec(tmp_path, "raise SystemExit('no luck')"))
    assert caught.group_contains(
        Unavailable, match="probe ended 2 times before it was ready.*no luck"
    )


async def test_the_reason_is_what_the_service_raised_and_not_what_a_library_printed_last(
    tmp_path: Path,
) -> None:
    for code, sentence in (
        (UNLUCKY, "exit code 1: The colour is wrong. Choose another."),
        (UNFORESEEN, r"exit code 1: OSError: \[Errno 27\] File too large \(<string>, line"),
    ):
        with pytest.raises(ExceptionGroup) as caught:
            async with supervise(log_in(tmp_path)) as supervisor:
                await supervisor.start(spec(tmp_path, code))
        assert caught.group_contains(Unavailable, match=sentence)


async def test_a_service_that_was_ready_once_is_restarted_however_often_it_dies_while_starting(
    tmp_path: Path,
) -> None:
    """It dies twice in a row before it is ready again; then it comes up, and all is well."""
    async with supervise(log_in(tmp_path)) as supervisor:
        await supervisor.start(spec(tmp_path, NEVER_AGAIN))
        service = supervisor.services[0]
        (tmp_path / "probe.ready").unlink()
        os.kill(pid_of(supervisor), signal.SIGKILL)
        await until(lambda: service.num_restarts == 3)
        assert not service.ready.is_set()
        assert supervisor.alarms == ("probe has ended 3 times in a row",)
        (tmp_path / "probe.again").unlink()
        await until(service.ready.is_set)
    assert (tmp_path / "probe.restarts").read_text().split()[:3] == ["0", "1", "2"]


@pytest.mark.parametrize("kind", ["OSError", "Unavailable"])
async def test_an_error_that_no_restart_mends_ends_the_stack_and_one_that_may_pass_does_not(
    tmp_path: Path, kind: str
) -> None:
    code = FAILS_ONCE_READY.replace('OSError(27, "File too large")', f'{kind}("Too large.")')
    rule = RestartRule(first_wait_s=0.01, max_wait_s=0.01, max_same_ends=3)
    failing = replace(spec(tmp_path, code.replace("InvalidConfig", kind)), restart=rule)
    is_passing, ended = kind == "Unavailable", None
    try:
        async with supervise(log_in(tmp_path)) as supervisor:
            await supervisor.start(failing)
            await until(lambda: supervisor.services[0].num_restarts == 4)
    except ExceptionGroup as error:
        ended = error
    assert (ended is None) == is_passing
    if ended is not None:
        sentence = r"probe ended with exit code 1: OSError: Too large.* It did so 3 times in a row"
        assert any(re.search(sentence, str(e)) for e in ended.exceptions)


@pytest.mark.redis
async def test_a_process_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    from dialoop_ops.stack.processes.ports import choose_ports

    port = choose_ports({"redis": 0})["redis"]
    redis = redis_service(find_redis({"PATH": ""}).program, port=port, directory=tmp_path / "redis")
    async with supervise(log_in(tmp_path)) as supervisor:
        await supervisor.start(replace(redis, hang_timeout_s=0.8))
        service, hung = supervisor.services[0], pid_of(supervisor)
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: supervisor.alarms)
        assert "redis has not answered for" in supervisor.alarms[0]
        await until(lambda: service.num_restarts == 1 and service.ready.is_set())
        assert pid_of(supervisor) != hung
        assert members({hung}) == []
        assert supervisor.alarms == ()


async def test_what_ends_a_process_that_nobody_watches_for_silence_is_told(tmp_path: Path) -> None:
    output = io.StringIO()
    log = LogStream(Console(file=output, width=200), tmp_path / "logs")
    async with supervise(log) as supervisor:
        await supervisor.start(replace(spec(tmp_path, DEAF), hang_timeout_s=0))
        service = supervisor.services[0]
        os.kill(pid_of(supervisor), signal.SIGKILL)
        await until(lambda: service.num_restarts == 1 and service.ready.is_set())
    assert "was ended by signal 9; starting again" in output.getvalue()


async def test_a_service_of_ours_that_hangs_gives_no_sign_of_life(tmp_path: Path) -> None:
    """A server that says NOT_SERVING is alive; a stopped process, and a closed port, are not."""
    serving = subprocess.Popen(
        [sys.executable, "-c", NOT_SERVING, str(tmp_path / "port")], cwd=ROOT
    )
    try:
        await until((tmp_path / "port").exists)
        address = f"127.0.0.1:{(tmp_path / 'port').read_text()}"
        assert await answers(address, PATIENCE_S)
        assert not await is_serving(address)
        serving.send_signal(signal.SIGSTOP)
        assert not await answers(address, 0.3)
    finally:
        serving.kill()
        serving.wait()
    assert not await answers(address, 5.0)


async def test_cancelling_stops_everything(tmp_path: Path) -> None:
    pids: list[int] = []

    async def run() -> None:
        async with supervise(log_in(tmp_path)) as supervisor:
            await supervisor.start(spec(tmp_path, STUBBORN_CHILD))
            pids.append(pid_of(supervisor))
            await asyncio.sleep(60)

    running = asyncio.ensure_future(run())
    await until(lambda: pids)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert members(pids) == []


def test_a_killed_stack_leaves_nothing_behind(tmp_path: Path) -> None:
    started = tmp_path / "started"
    arguments = [sys.executable, "-c", STACK, str(tmp_path), str(started), str(ROOT)]
    stack = subprocess.Popen(arguments, cwd=ROOT)
    wait_for(started.exists)
    child = int((tmp_path / "probe.ready").read_text())
    stack.kill()
    stack.wait()
    wait_for(lambda: not is_running(child))


def wait_for(condition: object, timeout_s: float = PATIENCE_S) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.redis
async def test_redis_comes_back_with_what_it_held(tmp_path: Path) -> None:
    from dialoop_ops.stack.processes.ports import choose_ports

    port = choose_ports({"redis": 0})["redis"]
    program = find_redis({"PATH": ""}).program
    redis = redis_service(program, port=port, directory=tmp_path / "redis", password="secret")

    async def ask(command: bytes, password: bytes = b"secret") -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"AUTH " + password + b"\r\n")
        await reader.readline()
        writer.write(command + b"\r\n")
        answer = await reader.readline()
        writer.close()
        return answer + (await reader.readline() if answer.startswith(b"$") else b"")

    async with supervise(log_in(tmp_path)) as supervisor:
        await supervisor.start(redis)
        assert (await ask(b"SET colour red", b"wrong")).startswith(b"-NOAUTH")
        assert (tmp_path / "redis" / "redis.conf").stat().st_mode & 0o077 == 0
        assert b"secret" not in Path(f"/proc/{pid_of(supervisor)}/cmdline").read_bytes()
        assert await ask(b"SET colour green") == b"+OK\r\n"
        written = (tmp_path / "redis").rglob
        await until(lambda: any(b"green" in file.read_bytes() for file in written("*.aof")))
        service = supervisor.services[0]
        os.kill(pid_of(supervisor), signal.SIGKILL)
        await until(lambda: service.num_restarts == 1 and service.ready.is_set())
        assert b"green" in await ask(b"GET colour")
