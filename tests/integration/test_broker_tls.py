"""Celery's broker behind TLS: every role of worker verifies its certificate, and one that is not trusted is refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery
from redis import Redis

from broker.celery.app import make_connection_settings
from broker.runtime.errors import UsageError
from deckhands.operations.jobs.celery_app import BEAT_KEYS
from tests.certificates import certificate_in
from tests.faults.harness import FaultCluster, make_due
from tests.ingress_parts import Producer, all_present, saying
from tests.polling import until
from tests.stores import redis_program, running

PASSWORD = "correct-horse-battery"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a certificate that has signed itself, and its key."""
    certificate_in(tmp_path)
    return tmp_path


@pytest.fixture
def url(files: Path) -> Iterator[str]:
    """A server with that certificate and a password."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    named = {name: str(files / f"{part}.pem") for name, part in (("cert", "cert"), ("key", "key"), ("ca-cert", "cert"))}
    options = [text for name, path in named.items() for text in (f"--tls-{name}-file", path)]
    options += ["--tls-port", str(port), "--tls-auth-clients", "no", "--requirepass", PASSWORD]
    for _ in running(redis_program(), *options):
        yield f"rediss://:{PASSWORD}@127.0.0.1:{port}/1"


async def test_all_roles_work_with_a_broker_behind_tls(tmp_path: Path, url: str, files: Path) -> None:
    trusted = {"DECKHANDS_CELERY_URL": f"{url}?ssl_ca_certs={files}/cert.pem"}
    async with FaultCluster(tmp_path).running() as cluster:
        for start in (cluster.start_controller, cluster.start_tool, cluster.start_ingress, cluster.start_jobs):
            start(**trusted)
        await all_present(cluster)
        cluster.start_beat(**trusted)
        producer = Producer(cluster)
        verified = f"{url}?ssl_cert_reqs=required&ssl_ca_certs={files}/cert.pem"
        producer.app = Celery("shop", broker=verified, backend=verified, set_as_current=False)
        try:
            assert (await producer.value(producer.run(turns=saying("done"))))["message"] == "done"
            with Redis.from_url(verified) as broker:
                await until(lambda: broker.exists(f"{BEAT_KEYS}:schedule"), what="a beat that knows its jobs")
                make_due(broker, "retire")
            await until(lambda: "Sending due task" in cluster.log_of("b1"), limit=120.0, what="a job that is sent")
            pongs = producer.app.control
            await until(lambda: len(pongs.ping(timeout=2.0, limit=4)) == 4, limit=60.0, what="all workers")
            conf = pongs.inspect(timeout=5.0, limit=4).conf()
            assert len(conf) == 4
            assert PASSWORD not in str(conf)
        finally:
            producer.close()


async def test_a_certificate_that_is_not_trusted_is_refused(tmp_path: Path, url: str) -> None:
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_tool("t1", DECKHANDS_CELERY_URL=url)
        await until(lambda: "certificate verify failed" in cluster.log_of("t1"), limit=60.0, what="the refusal")
        cluster.start_tool("t2", DECKHANDS_CELERY_URL=f"{url}?ssl_cert_reqs=none", DECKHANDS_NODE="node2")
        asking = Celery("asking", broker=f"{url}?ssl_cert_reqs=none", set_as_current=False).control
        await until(lambda: len(asking.ping(timeout=2.0, limit=1)) == 1, limit=60.0, what="the worker without a check")
        assert PASSWORD not in cluster.log_of("t1") + cluster.log_of("t2")


@pytest.mark.parametrize("options", ["ssl_ca_certs=/nowhere.pem", "ssl_certfile=/nowhere.pem", "ssl_cert_reqs=maybe"])
def test_a_tls_option_that_cannot_be_used_is_named(options: str) -> None:
    name, _, value = options.partition("=")
    with pytest.raises(UsageError, match=f"{name}.*{value}") as refused:
        make_connection_settings(f"rediss://:{PASSWORD}@h/0?{options}")
    assert PASSWORD not in str(refused.value)


def test_results_have_their_own_tls_options() -> None:
    found = make_connection_settings("redis://h/1", "rediss://u:p@r/2?ssl_cert_reqs=CERT_NONE&client_name=x")
    assert found == {
        "broker_url": "redis://h/1",
        "result_backend": "rediss://u:p@r/2?client_name=x",
        "redis_backend_use_ssl": {"ssl_cert_reqs": "none"},
    }
