from __future__ import annotations

import importlib
import inspect
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dialoop_services.runtime.settings import help_of

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
SERVICE = """
import asyncio, sys
from pydantic_settings import SettingsConfigDict
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime import ServerSettings, load, run

class Settings(ServerSettings):
    model_config = SettingsConfigDict(env_prefix="DIALOOP_PROBE_")
    ttl_s: float = 1.0

async def serve():
    async with GrpcServer(load(Settings)) as server:
        sys.stdout.write(f"{server.port}\\n")
        sys.stdout.flush()
        await server.wait_until_stopped()

run(serve, name="probe")
"""
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]],
    env=os.environ | {"DIALOOP_PARENT_PID": str(os.getpid())}, stdout=subprocess.PIPE)
child.stdout.readline()
sys.stdout.write(f"{child.pid}\\n")
sys.stdout.flush()
time.sleep(60)
"""
FAULTS = """
import resource, sys
from dialoop_services.runtime.process import tune_memory

def num_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def handle_messages():
    for _ in range(200):
        b"".join([bytearray(400_000) for _ in range(8)])

tune_memory()
for _ in range(3):  # the first rounds ask the kernel for the pages
    before = num_faults()
    handle_messages()
sys.stdout.write(f"{num_faults() - before}\\n")
"""

HEAPS = """
import sys, threading, time
from dialoop_learning.memory import resident_bytes
from dialoop_services.runtime import process

def message():
    kept.append([bytearray(100_000) for _ in range(1000)][::200])

def work():
    process.tune_memory()
    before = resident_bytes()
    threads = [threading.Thread(target=message) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    grown, ends = resident_bytes() - before, time.monotonic() + 10
    while (left := resident_bytes() - before) > 8 << 20 and time.monotonic() < ends:
        time.sleep(0.05)
    sys.stdout.write(f"{grown} {left}\\n")

kept = []
process._RETURN_EVERY_S = 0.2
process.run_blocking(work, name="probe")
"""


def environment(**variables: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}:{ROOT / 'services'}"} | variables


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", *arguments],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def has_ended(pid: int) -> bool:
    """Gone, or a zombie that nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def wait_for(condition, seconds: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"DIALOOP_PROBE_PORT": "abc"}, ["DIALOOP_PROBE_PORT", "integer"]),
        ({"DIALOOP_PROBE_PROT": "1"}, ["DIALOOP_PROBE_PROT", "did you mean DIALOOP_PROBE_PORT"]),
        ({"DIALOOP_PROBE_HOST": "0.0.0.0"}, ["0.0.0.0", "DIALOOP_TOKEN"]),
        ({"DIALOOP_PROBE_HOST": "0.0.0.0", "DIALOOP_TOKEN": "naïve"}, ["DIALOOP_TOKEN", "ASCII"]),
        ({"DIALOOP_LOG": "yaml"}, ["log", "json"]),
        ({"DIALOOP_PARENT_PID": "x"}, ["DIALOOP_PARENT_PID", "process id"]),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_exit_code_2(variables, words):
    service = start(SERVICE, **variables)
    _, complaint = service.communicate(timeout=PATIENCE_S)
    assert service.returncode == 2
    assert len(complaint.splitlines()) == 1
    assert all(word in complaint for word in words)
    assert "naïve" not in complaint


SERVICES = ("collector", "environment", "inference", "replay", "scorer", "trainer")


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_explains_its_settings_and_starts_nothing_for_help(service):
    """Of a process the start is tested once, since each imports much: see the next test."""
    main = importlib.import_module(f"dialoop_services.{service}.__main__")
    (call,) = re.findall(
        rf'run\w*\(\w+, name="{service}", settings=(\w+)\)', inspect.getsource(main)
    )
    text = help_of(getattr(main, call))
    assert f"DIALOOP_{service.upper()}_PORT = 0" in text
    assert "DIALOOP_TOKEN\n    Bearer token" in text  # and no value, which may be a secret
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("-h", 0), ("--port", 2)])
def test_a_service_takes_no_word_but_help(word, code):
    command = [sys.executable, "-m", "dialoop_services.environment", word]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == code
    if code:
        assert "'--port' is no option of a service" in ended.stderr
    else:
        assert "serve until told to stop" in ended.stdout
        assert "DIALOOP_ENVIRONMENT_ENVIRONMENTS" in ended.stdout


def test_a_taken_port_is_one_sentence_and_exit_code_2():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        service = start(SERVICE, DIALOOP_PROBE_PORT=port)
        _, complaint = service.communicate(timeout=PATIENCE_S)
    assert service.returncode == 2
    assert len(complaint.splitlines()) == 1
    assert f"Port {port} on 127.0.0.1 is taken" in complaint


def test_full_garbage_collections_leave_alone_what_a_service_stands_on():
    figures = "gc.get_freeze_count()} {gc.get_threshold()[0]}"
    service = start(SERVICE.replace("server.port}", figures).replace("asyncio, sys", "gc, sys"))
    num_frozen, collects_after = map(int, service.stdout.readline().split())
    assert num_frozen > 10_000
    assert collects_after == 10_000
    service.send_signal(signal.SIGTERM)
    service.communicate(timeout=PATIENCE_S)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_memory_of_messages_is_used_again_and_not_given_back():
    """Else each page of a new message is cleared by the kernel again: 3,000 faults a round here."""
    num_faults, _ = start(FAULTS).communicate(timeout=PATIENCE_S)
    assert int(num_faults) < 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these heaps")
def test_what_threads_leave_free_is_given_back_also_between_what_is_kept():
    grown, left = map(int, start(HEAPS).communicate(timeout=PATIENCE_S)[0].split())
    assert grown > 64 << 20
    assert left < 8 << 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_service_with_exit_code_0(number):
    service = start(SERVICE)
    assert service.stdout.readline().strip().isdigit()
    service.send_signal(number)
    service.communicate(timeout=PATIENCE_S)
    assert service.returncode == 0


def test_json_logs_carry_service_and_run():
    service = start(SERVICE, DIALOOP_LOG="json", DIALOOP_RUN="r1")
    service.stdout.readline()
    service.terminate()
    _, lines = service.communicate(timeout=PATIENCE_S)
    record = json.loads(lines.splitlines()[0])
    assert (record["service"], record["run"], record["level"]) == ("probe", "r1", "INFO")
    assert record["address"].startswith("127.0.0.1:")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_dies_with_its_parent():
    parent = start(PARENT, SERVICE)
    child = int(parent.stdout.readline())
    assert not has_ended(child)
    parent.kill()
    assert wait_for(lambda: has_ended(child))
    parent.communicate()


def test_a_child_whose_parent_is_gone_does_not_start():
    gone = subprocess.Popen(["true"])
    gone.wait()
    service = start(SERVICE, DIALOOP_PARENT_PID=str(gone.pid))
    printed, _ = service.communicate(timeout=PATIENCE_S)
    assert (service.returncode, printed) == (1, "")
