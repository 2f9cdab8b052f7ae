"""The state of a stack at one moment, as a value for terminals, pages and programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dialoop.waits import STALL_S, Wait

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop.clients.inference import PolicyStatus
    from dialoop.clients.replay import LedgerCounts, ReplayStats
    from dialoop.clients.trainer import TrainerStatus

    from dialoop_ops.now.blocked import Blocked

SERVING = "serving"
_PARTS_OF_A_STEP = ("lease", "rows", "train", "wait", "capture", "publish", "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceNow:
    """One service. `health` is "serving", "is not ready", "does not answer", or a process's state.

    silent_s: seconds since it last served, as far as the watcher saw. incarnation: "epoch 3" for a
    instance of the run's registry, "process 2" for the second process that the supervisor started;
    empty where neither is known. process: what the supervisor
    of an embedded stack says of its process: state, pid, num_restarts, alarm.
    """

    name: str
    address: str
    rest_address: str
    health: str
    silent_s: float
    incarnation: str = ""
    process: Mapping[str, object] = field(default_factory=dict)
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """A stack at one moment; None for what did not answer. `time` is Unix seconds.

    sampled_tokens_per_s: over the watcher's last minute, or longer where answers take longer; None
    while it is unknown (`dialoop_ops.now.rates`). busy_shares: of the watcher's last minute of
    looks, by replica, those at which it had requests.
    """

    time: float
    services: tuple[ServiceNow, ...]
    trainer: TrainerStatus | None
    queue: ReplayStats | None
    replicas: Mapping[str, PolicyStatus]
    sampled_tokens_per_s: float | None
    blocked: tuple[Blocked, ...]
    busy_shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_healthy(self) -> bool:
        """Return whether there are services and all of them serve."""
        return bool(self.services) and all(each.health == SERVING for each in self.services)

    @property
    def alarms(self) -> tuple[str, ...]:
        """Return what the trainer and the supervisor find wrong, and the longest stall by cause."""
        processes = [str(each.process.get("alarm", "")) for each in self.services]
        silences = [
            f"{each.name} has not served for {each.silent_s:.0f} s"
            for each in self.services
            if each.silent_s >= STALL_S
        ]
        alarms = self.trainer.alarms if self.trainer else ()
        by_cause: dict[str, str] = {}
        for each in self.blocked:  # the longest comes first
            if each.is_stall:
                by_cause.setdefault(each.cause, str(each))
        texts = (*processes, *silences, *alarms, *by_cause.values())
        return tuple(text for text in texts if text)

    @property
    def trainer_busy(self) -> float | None:
        """Return the share of the newest train step's time in which the trainer computed."""
        metrics = self.trainer.metrics if self.trainer else {}
        seconds = {part: metrics.get(f"train/{part}_s", 0.0) for part in _PARTS_OF_A_STEP}
        if seconds["capture"]:  # it publishes beside the next step
            seconds["publish"] = seconds["keep"] = 0.0
        computing = seconds["rows"] + seconds["train"] + seconds["capture"]
        total = sum(seconds.values())
        return computing / total if total else None

    def as_json(self) -> dict[str, Any]:
        """Return everything as values of JSON, as `dialoop watch --json` prints it."""
        return {
            "time": self.time,
            "is_healthy": self.is_healthy,
            "services": [asdict(each) for each in self.services],
            "trainer": _trainer_of(self.trainer, self.trainer_busy),
            "queue": _queue_of(self.queue),
            "replicas": {
                name: {
                    "policy_version": str(policy.policy_version or ""),
                    "engine": policy.engine,
                    "ready": policy.ready,
                    "reason": policy.reason,
                    "num_requests_running": policy.num_requests_running,
                    "num_sampled_tokens": policy.num_sampled_tokens,
                    "busy_share": self.busy_shares.get(name),
                }
                for name, policy in self.replicas.items()
            },
            "sampled_tokens_per_s": self.sampled_tokens_per_s,
            "blocked": [
                {**asdict(each), "is_stall": each.is_stall, "text": str(each)}
                for each in self.blocked
            ],
            "alarms": list(self.alarms),
        }


def _trainer_of(status: TrainerStatus | None, busy: float | None) -> dict[str, Any] | None:
    if status is None:
        return None
    return {
        "phase": status.phase.name.lower().replace("_", " "),
        "policy_version": str(status.policy_version or ""),
        "num_train_steps": status.num_train_steps,
        "max_train_steps": status.max_train_steps,
        "num_warm_start_steps": status.num_warm_start_steps,
        "max_warm_start_steps": status.max_warm_start_steps,
        "failure": status.failure,
        "metrics": dict(status.metrics),
        "busy_share": busy,
    }


def _queue_of(stats: ReplayStats | None) -> dict[str, Any] | None:
    if stats is None:
        return None
    return {
        "training": groups_by_place(stats.training),
        "evaluation": groups_by_place(stats.evaluation),
        "oldest_s": {
            "training": ages_by_place(stats.training),
            "evaluation": ages_by_place(stats.evaluation),
        },
        "dropped": dict(stats.training.num_groups_dropped),
        "credits": stats.credits,
        "max_outstanding_groups": stats.max_outstanding_groups,
        "num_dead_letters": stats.num_dead_letters,
        "num_redelivered": stats.num_redelivered,
        "is_full": stats.is_full,
        "store": stats.store,
    }


_PLACES = {
    "offered": "tasks offered",
    "leased": "playing",
    "unscored": "unscored",
    "scored": "scored",
}


def ages_by_place(counts: LedgerCounts) -> dict[str, float]:
    """Return the age in seconds of the oldest group at each place, under its name there."""
    return {
        place: counts.oldest_s[state]
        for state, place in _PLACES.items()
        if state in counts.oldest_s
    }


def groups_line(counts: LedgerCounts) -> str:
    """Return the number of groups at each place as text: "2 playing, 0 unscored, ..."."""
    _, *places = groups_by_place(counts).items()
    return ", ".join(f"{count} {place}" for place, count in places)


def groups_by_place(counts: LedgerCounts) -> dict[str, int]:
    """Return the number of groups at each place of the queue, in the order they pass through."""
    return {
        "tasks offered": counts.num_tasks_offered,
        "playing": counts.num_groups_leased,
        "unscored": counts.num_groups_unscored,
        "scored": counts.num_groups_scored,
        "training": counts.num_groups_training,
        "trained": counts.num_groups_trained + counts.num_groups_consumed,
        "dropped": sum(counts.num_groups_dropped.values()),
    }
