"""Blocking twins: the same methods, the same answers, from threads without an event loop."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from dialoop import BlockingDialoop, Dialoop
from dialoop.clients.blocking import twins
from dialoop.clients.blocking.loop import BackgroundLoop
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.inference import InferenceClient
from dialoop.clients.recordings import RecordingClient
from dialoop.clients.replay import ReplayClient
from dialoop.clients.scorer import ScorerClient
from dialoop.clients.template import TemplateClient
from dialoop.clients.trainer import TrainerClient
from dialoop.environments import arithmetic
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.errors import InvalidConfig, NotFound, PreconditionFailed, Unavailable
from dialoop.local.client import LocalEnvironmentClient
from dialoop.testing import ScriptedPolicy
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings

from tests.support.waiting import PATIENCE_S

TWINS = [
    (EnvironmentClient, twins.BlockingEnvironmentClient),
    (InferenceClient, twins.BlockingInferenceClient),
    (RecordingClient, twins.BlockingRecordingClient),
    (ReplayClient, twins.BlockingReplayClient),
    (ScorerClient, twins.BlockingScorerClient),
    (TemplateClient, twins.BlockingTemplateClient),
    (TrainerClient, twins.BlockingTrainerClient),
    (Dialoop, BlockingDialoop),
    (EnvironmentClient, LocalEnvironmentClient),
]
SCRIPT = ["<request><Calculator>22+28<call>", "Result=50<submit>"]


def public(kind: type) -> dict[str, object]:
    members = (vars(base) for base in reversed(kind.__mro__[:-1]))
    return {
        n: value
        for attributes in members
        for n, value in attributes.items()
        if not n.startswith("_")
    }


@pytest.mark.parametrize(("client", "twin"), TWINS, ids=lambda kind: kind.__name__)
def test_a_twin_has_the_same_methods_with_the_same_parameters(client, twin):
    # A policy plays on the loop: there it is a Dialoop that one asks, or makes a twin of.
    assert public(client).keys() - {"policy"} == public(twin).keys() - {"of_dialoop"}
    for name, method in public(client).items():
        if inspect.isfunction(method):
            expected = inspect.signature(method).parameters.values()
            actual = inspect.signature(public(twin)[name]).parameters.values()
            assert [(p.name, p.kind, p.default) for p in expected] == [
                (p.name, p.kind, p.default) for p in actual
            ]


@pytest.mark.parametrize(("client", "twin"), TWINS[:7], ids=lambda kind: kind.__name__)
def test_the_stub_says_what_a_twin_has(client, twin):
    tree = ast.parse(Path(twins.__file__).with_suffix(".pyi").read_text())
    (stub,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == twin.__name__]
    arguments_of = {n.name: n.args for n in stub.body if isinstance(n, ast.FunctionDef)}
    assert arguments_of.keys() - {"__init__"} == public(twin).keys()
    for name, method in public(twin).items():
        (_, *others) = inspect.signature(method).parameters
        arguments = arguments_of[name]
        assert [a.arg for a in (*arguments.args[1:], *arguments.kwonlyargs)] == others


@contextmanager
def service():
    """Serve an environment on a thread of its own."""
    with BackgroundLoop() as loop:
        context = serving(EnvironmentSettings(), Catalogue([arithmetic()]))
        server = loop.run(context.__aenter__())
        try:
            yield server.address
        finally:
            loop.run(context.__aexit__(None, None, None))


def test_an_episode_over_a_connection_equals_one_in_this_process():
    policy = ScriptedPolicy(SCRIPT)
    records = []
    with service() as address:
        for where in (address, arithmetic()):
            with BlockingDialoop(environment=where, inference=policy) as dialoop:
                task = dialoop.task("arithmetic", "22+28", split="heldout", num_trajectories=2)
                group = dialoop.play_group(task)
                records.append([(t.reward, t.history, t.sequences) for t in group.trajectories])
                records.append(dialoop.play(task).history)
    assert records[:2] == records[2:]
    assert [reward for reward, *_ in records[0]] == [1.0, 1.0]


def test_an_error_of_the_service_is_raised_with_its_reason():
    with service() as address, BlockingDialoop(environment=address) as dialoop:
        assert dialoop.environment.get_environment("arithmetic").tools == ("Calculator",)
        with pytest.raises(NotFound) as caught:
            dialoop.environment.get_environment("no")
    assert caught.value.reason == "ENVIRONMENT_NOT_FOUND"


def test_several_threads_share_a_connection():
    with service() as address, BlockingDialoop(environment=address) as dialoop:
        results = []
        threads = [
            threading.Thread(target=lambda: results.extend(dialoop.environment.list_environments()))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [info.name for info in results] == ["arithmetic"] * 4


async def test_a_blocking_client_inside_an_event_loop_says_what_to_use_instead():
    dialoop = BlockingDialoop(environment=arithmetic())
    with pytest.raises(PreconditionFailed, match="async client") as caught:
        dialoop.task("arithmetic")
    assert caught.value.reason == "EVENT_LOOP_RUNNING"


def test_a_closed_client_says_so():
    with BlockingDialoop(environment=arithmetic()) as dialoop:
        environments = dialoop.environment
    dialoop.close()
    with pytest.raises(PreconditionFailed) as caught:
        environments.list_environments()
    assert caught.value.reason == "CLIENT_CLOSED"


def test_a_client_made_before_a_fork_says_so_in_the_child():
    with BlockingDialoop(environment=arithmetic()) as dialoop:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # no assertion may leave the child
            try:
                dialoop.task("arithmetic")
            except PreconditionFailed as error:
                os.write(write, str(error.reason).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            assert answer.read() == "CLIENT_CLOSED"
        os.waitpid(child, 0)
        assert dialoop.task("arithmetic").environment == "arithmetic"


def test_an_interrupted_call_is_cancelled_on_the_loop():
    ended = threading.Event()
    # A shell starts what runs in the background with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    async def wait_forever():
        await asyncio.sleep(0.2)  # until the caller waits
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with BackgroundLoop() as loop:
        with pytest.raises(KeyboardInterrupt):
            loop.run(wait_forever())
        signal.signal(signal.SIGINT, before)
        assert ended.wait(PATIENCE_S)


def test_a_stream_becomes_an_iterator_that_ends_with_its_loop():
    ended = []

    async def numbers():
        try:
            for number in range(100):
                yield number
        finally:
            ended.append(True)

    with BackgroundLoop() as loop:
        for number in loop.iterate(numbers()):
            if number == 2:
                break
        assert list(loop.iterate(numbers())) == list(range(100))
    assert ended == [True, True]


def test_closing_ends_what_still_runs():
    started, ended = threading.Event(), threading.Event()

    async def wait_forever():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    loop = BackgroundLoop()
    failed = []

    def call():
        try:
            loop.run(wait_forever())
        except BaseException as error:
            failed.append(type(error).__name__)

    thread = threading.Thread(target=call)
    thread.start()
    started.wait(PATIENCE_S)
    loop.close()
    thread.join(PATIENCE_S)
    assert (ended.is_set(), failed) == (True, ["CancelledError"])


def test_a_service_that_was_not_named_is_a_mistake_in_the_call():
    with BlockingDialoop() as dialoop, pytest.raises(InvalidConfig) as caught:
        dialoop.trainer.get_status()
    assert caught.value.reason == "NO_ADDRESS"


def test_a_run_that_nobody_serves(tmp_path):
    with pytest.raises(Unavailable) as caught:
        BlockingDialoop.of_run(tmp_path)
    assert caught.value.reason == "NO_STACK"


def test_the_first_task_of_a_split_is_the_default():
    with BlockingDialoop(environment=arithmetic()) as dialoop:
        task = dialoop.task("arithmetic", split="heldout")
    assert task.key == arithmetic().tasks.keys("heldout")[0]
    assert task.sampling.stop == arithmetic().traits.stop
