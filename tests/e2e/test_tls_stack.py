"""A whole job whose services, and Redis, speak mutual TLS alone."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.samples.certificates import Pair, make_authority, make_certificate
from tests.support.stack_jobs import Job, assert_accounted, wait_for, write_config

pytestmark = [
    pytest.mark.heavy(reason="a whole job over TLS, a minute"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
    pytest.mark.timeout(900),
]
REDIS = os.environ.get("DIALOOP_TEST_TLS_REDIS") or shutil.which("redis-server") or ""


def variables(authority: Pair, own: Pair) -> dict[str, str]:
    return {
        "DIALOOP_TOKEN": "secret",
        "DIALOOP_TLS_CA": str(authority.certificate),
        "DIALOOP_TLS_CERTIFICATE": str(own.certificate),
        "DIALOOP_TLS_KEY": str(own.key),
        "DIALOOP_TLS_MUTUAL": "true",
    }


def check(job: Job) -> None:
    ended = job.end(600)
    assert ended.exit_code == 0, ended.output[-4000:]
    assert_accounted(ended.summary)
    assert "https://" in ended.output
    assert job.left_running() == {}


@contextmanager
def tls_redis(folder: Path, authority: Pair, own: Pair) -> Iterator[str]:
    """A redis-server that asks for certificates; its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "bind": "127.0.0.1",
        "port": "0",
        "tls-port": str(port),
        "tls-cert-file": str(own.certificate),
        "tls-key-file": str(own.key),
        "tls-ca-cert-file": str(authority.certificate),
        "dir": str(folder),
        "appendonly": "yes",
        "save": "",
    }
    command = [REDIS, *(part for name, value in options.items() for part in (f"--{name}", value))]
    with (folder / "redis.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(lambda: "Ready to accept" in (folder / "redis.log").read_text(), 30)
        yield (
            f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority.certificate}"
            f"&ssl_certfile={own.certificate}&ssl_keyfile={own.key}"
        )
    finally:
        process.terminate()
        process.wait(30)


def test_a_job_runs_while_its_services_ask_each_other_for_certificates(tmp_path):
    authority = make_authority(tmp_path)
    own = make_certificate(tmp_path, authority, "services")
    config = write_config(tmp_path, num_train_steps=2, store="memory")
    with Job(tmp_path, "train", str(config), **variables(authority, own)) as job:
        check(job)


@pytest.mark.skipif(not REDIS, reason="needs a redis-server with TLS: DIALOOP_TEST_TLS_REDIS")
def test_the_queue_reaches_redis_over_mutual_tls(tmp_path):
    authority = make_authority(tmp_path)
    own = make_certificate(tmp_path, authority, "services")
    folder = tmp_path / "redis"
    folder.mkdir()
    config = write_config(tmp_path, num_train_steps=2)
    with tls_redis(folder, authority, own) as url:
        values = variables(authority, own) | {"REDIS_URL": url}
        with Job(tmp_path, "train", str(config), **values) as job:
            check(job)
    assert (folder / "appendonlydir").exists() or (folder / "appendonly.aof").exists()
