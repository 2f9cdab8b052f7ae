"""Any order of joins, renewals, ends and admissions: the registry is as a simple model says.

The model knows of each name the instance that joined last, and of it when its lease ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from dialoop.errors import DialoopError
from dialoop.v1 import registry_service_pb2 as pb
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import QueueLimits, QueueStore
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.queue_model.store import ModelStore
from tests.support.redis_server import new_run, redis_url  # noqa: F401
from tests.support.samples.replay_samples import Clock

LEASE_S = 10.0
NAMES = ("gpu-0", "gpu-1", "gpu-2")
T = TypeVar("T")


@dataclass
class Expected:
    """The instance that joined last under a name."""

    epoch: int
    ends_at: float
    load: float
    is_admitted: bool = False


class RegistryMachine(RuleBasedStateMachine):
    def __init__(self, make_store: Callable[[Clock], QueueStore]) -> None:
        super().__init__()
        self.clock = Clock()
        self.runner = asyncio.Runner()
        self.store = make_store(self.clock)
        self.run = new_run()
        self.instances: dict[str, Expected] = {}
        self.given: list[tuple[str, int]] = []
        self.highest = 0

    def ask(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def is_there(self, name: str, epoch: int) -> bool:
        instance = self.instances.get(name)
        return (
            instance is not None and instance.epoch == epoch and instance.ends_at > self.clock.now
        )

    def announce(self, name: str, epoch: int, load: float) -> pb.AnnounceResponse:
        instance = pb.Instance(
            role="inference", name=name, epoch=epoch, load=load, is_admitted=True
        )
        request = pb.AnnounceRequest(run=self.run, instance=instance, lease_s=LEASE_S)
        return self.ask(self.store.apply(request, pb.AnnounceResponse))

    @rule(name=st.sampled_from(NAMES), load=st.integers(0, 9))
    def join(self, name: str, load: int) -> None:
        answer = self.announce(name, 0, load)
        assert answer.epoch > self.highest, "an epoch was given twice, or out of order"
        assert not answer.is_admitted, "a new epoch has to prove itself"
        self.highest = answer.epoch
        self.instances[name] = Expected(answer.epoch, self.clock.now + LEASE_S, load)
        self.given.append((name, answer.epoch))

    @precondition(lambda self: self.given)
    @rule(data=st.data(), load=st.integers(0, 9))
    def renew(self, data: st.DataObject, load: int) -> None:
        """Somebody renews its lease: the present instance, or an orphan."""
        name, epoch = data.draw(st.sampled_from(self.given))
        instance = self.instances[name]
        if instance.epoch != epoch:
            with pytest.raises(DialoopError) as caught:
                self.announce(name, epoch, load)
            assert caught.value.reason == "MEMBER_REPLACED"
            return
        answer = self.announce(name, epoch, load)
        assert (answer.epoch, answer.is_admitted) == (epoch, instance.is_admitted)
        instance.ends_at, instance.load = self.clock.now + LEASE_S, load

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name, epoch = data.draw(st.sampled_from(self.given))
        request = pb.WithdrawRequest(run=self.run, role="inference", name=name, epoch=epoch)
        was_there = self.is_there(name, epoch)
        assert self.ask(self.store.apply(request, pb.WithdrawResponse)).was_listed == was_there
        if was_there:
            self.instances[name].ends_at = self.clock.now

    @precondition(lambda self: self.given)
    @rule(data=st.data(), is_admitted=st.booleans())
    def admit(self, data: st.DataObject, is_admitted: bool) -> None:
        name, epoch = data.draw(st.sampled_from(self.given))
        request = pb.AdmitRequest(
            run=self.run, role="inference", name=name, epoch=epoch, is_admitted=is_admitted
        )
        if not self.is_there(name, epoch):
            with pytest.raises(DialoopError) as caught:
                self.ask(self.store.apply(request, pb.AdmitResponse))
            assert caught.value.reason == "MEMBER_NOT_FOUND"
            return
        self.ask(self.store.apply(request, pb.AdmitResponse))
        self.instances[name].is_admitted = is_admitted

    @rule(seconds=st.sampled_from((1.0, 4.0, 11.0)))
    def wait(self, seconds: float) -> None:
        self.clock.pass_s(seconds)

    @rule()
    def forget_an_ended_lease(self) -> None:
        """After a day nobody knows of it: then an orphan would be let in, as after a loss."""
        self.clock.pass_s(25 * 3600.0)
        self.instances.clear()
        self.given.clear()

    @invariant()
    def lists_those_whose_lease_runs(self) -> None:
        request = pb.ListInstancesRequest(run=self.run, role="inference")
        listed = self.ask(self.store.apply(request, pb.ListInstancesResponse)).instances
        expected = [
            (name, instance.epoch, instance.load, instance.is_admitted)
            for name, instance in sorted(self.instances.items())
            if instance.ends_at > self.clock.now
        ]
        assert [(m.name, m.epoch, m.load, m.is_admitted) for m in listed] == expected
        nobody = pb.ListInstancesRequest(run=self.run, role="scorer")
        assert not self.ask(self.store.apply(nobody, pb.ListInstancesResponse)).instances

    def teardown(self) -> None:
        self.ask(self.store.close())
        self.runner.close()


@pytest.mark.parametrize("kind", ["memory", pytest.param("redis", marks=pytest.mark.redis)])
def test_a_registry_is_as_the_model_says(kind: str, request: pytest.FixtureRequest) -> None:
    def make_store(clock: Clock) -> QueueStore:
        if kind == "memory":
            return ModelStore(QueueLimits(), clock=clock)
        return RedisStore(request.getfixturevalue("redis_url"), QueueLimits(), clock=clock)

    few = settings(max_examples=40, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(lambda: RegistryMachine(make_store), settings=few)
