"""A batch of groups that is larger than one message is leased with several calls of the client."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dialoop.trajectory import Stage
from dialoop.wire.records import GROUP
from dialoop_services.replay.store import QueueLimits

from tests.support.collector_world import RUN, ScriptedPolicy, world
from tests.support.queue_model.store import ModelStore

NUM_GROUPS = 5
MAX_BYTES = 2500


class Counting(ModelStore):
    """A queue that counts its calls."""

    def __init__(self, limits: QueueLimits) -> None:
        super().__init__(limits)
        self.calls: Counter[str] = Counter()

    async def apply(self, request: Any, answer: Any) -> Any:
        self.calls[type(request).__name__] += 1
        return await super().apply(request, answer)


async def test_a_batch_larger_than_a_message_is_leased_and_reopened_in_parts() -> None:
    """In one message it would be TOO_LARGE for ever, and the trainer would never get it."""
    store = Counting(QueueLimits(max_lease_bytes=MAX_BYTES))
    async with world(store=store) as w:
        await w.allow(NUM_GROUPS)
        async with w.collecting(ScriptedPolicy(answer=lambda _: "x" * 300 + "<submit>")):
            await w.until(lambda c: c.num_groups_unscored == NUM_GROUPS)
        store.calls.clear()
        options = {"worker": "t", "max_groups": NUM_GROUPS, "min_groups": NUM_GROUPS}
        leased = await w.replay.lease_groups(RUN, Stage.UNSCORED, **options)
        lease_ids = [lease.lease_id for lease in leased.leases]
        again = await w.replay.reopen_leases(RUN, lease_ids, lease_s=60)
    groups = [lease.group for lease in leased.leases]
    assert len({group.group_id for group in groups}) == NUM_GROUPS
    assert [lease.group for lease in again.leases] == groups
    assert sum(GROUP.to_proto(group).ByteSize() for group in groups) > 2 * MAX_BYTES
    assert store.calls["LeaseGroupsRequest"] > 2
    assert store.calls["ReopenLeasesRequest"] > 2
