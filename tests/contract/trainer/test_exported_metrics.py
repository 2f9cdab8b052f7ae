"""What the trainer shows Prometheus: its steps, its alarms, and the newest numbers of the run."""

from __future__ import annotations

from pathlib import Path

from dialoop.sequences import PolicyVersion
from dialoop.v1.trainer_service_pb2_grpc import (
    TrainerServiceServicer,
    add_TrainerServiceServicer_to_server,
)
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime import ServerSettings, load
from dialoop_services.trainer.__main__ import show_metrics
from dialoop_services.trainer.job.status import StatusBoard
from dialoop_services.trainer.records.records import RunRecords
from prometheus_client.parser import text_string_to_metric_families

from tests.support.rest_world import http_of

VERSION = PolicyVersion(lineage="main", number=3)


async def test_steps_alarms_and_newest_numbers_follow_the_job(tmp_path: Path) -> None:
    board, records = StatusBoard(), RunRecords(tmp_path)
    server = GrpcServer(load(ServerSettings, rest_port=0))
    server.add(
        add_TrainerServiceServicer_to_server,
        TrainerServiceServicer(),
        "dialoop.v1.TrainerService",
    )
    show_metrics(server, board, records)
    async with server, http_of(server) as http:

        async def read(name: str) -> dict[str, float]:
            """The metric's values by the value of its one label."""
            text = (await http.get("/metrics")).text
            samples = (s for f in text_string_to_metric_families(text) for s in f.samples)
            return {next(iter(s.labels.values())): s.value for s in samples if s.name == name}

        assert await read("dialoop_steps_total") == {"train": 0, "warm_start": 0}
        assert await read("dialoop_alarms") == {}
        board.state.num_train_steps = 2
        board.raise_alarm("NO_SIGNAL", on=True)
        values = {"reward": 0.5, "loss": float("inf"), "by_depth": {"0": {"ess": 1.0}}}
        records.metric("train", train_step=2, policy_version=VERSION, **values)
        assert await read("dialoop_steps_total") == {"train": 2, "warm_start": 0}
        assert await read("dialoop_alarms") == {"NO_SIGNAL": 1}
        assert await read("dialoop_newest") == {"train/reward": 0.5, "train/loss": float("inf")}
        board.raise_alarm("NO_SIGNAL", on=False)
        records.metric("train", train_step=3, policy_version=VERSION, reward=0.25)
        assert await read("dialoop_alarms") == {}
        assert (await read("dialoop_newest"))["train/reward"] == 0.25
    records.close()
