"""Settings from the environment: defaults, conversions, and names that do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from broker.runtime.settings import WORKER_SETTINGS, BrokerSettings, make_celery_url


def test_values_are_converted() -> None:
    env = {
        "DECKHANDS_URL": " redis://store:6380/4 ",
        "DECKHANDS_SHARDS": "16",
        "DECKHANDS_HEARTBEAT_TTL_SECONDS": "2.5",
        "DECKHANDS_DEBUG": "Yes",
        "DECKHANDS_HOME": "/srv/deck",
        "DECKHANDS_SANDBOX": "",
        "DECKHANDS_POOLS": "gpu",
    }
    settings = BrokerSettings.from_env(env)
    assert settings.url == "redis://store:6380/4"
    assert settings.celery_url == "redis://store:6380/1"
    assert (settings.shards, settings.heartbeat_ttl_seconds, settings.debug) == (16, 2.5, True)
    assert settings.home == Path("/srv/deck")
    assert settings.sandbox == "auto"  # an empty value is an unset one


def test_a_misspelt_name_is_told_the_nearest_one() -> None:
    with pytest.raises(UsageError) as refused:
        BrokerSettings.from_env({"DECKHANDS_SHARD": "2"})
    assert str(refused.value) == ("The environment variable DECKHANDS_SHARD is unknown. Did you mean DECKHANDS_SHARDS?")
    with pytest.raises(UsageError, match=r"DECKHANDS_XQZW is unknown\. Unset it"):
        BrokerSettings.from_env({"DECKHANDS_XQZW": "2"})


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("SHARDS", "many", "'many'. It must be a number."),
        ("SHARDS", "0", "0. Use 1 to 1024."),
        ("SHARDS", "1025", "1025. Use 1 to 1024."),
        ("HEARTBEAT_TTL_SECONDS", "soon", "'soon'. It must be a number."),
        ("HEARTBEAT_TTL_SECONDS", "nan", "'nan'. It must be a number."),
        ("HEARTBEAT_TTL_SECONDS", "inf", "'inf'. It must be a number."),
        ("HEARTBEAT_TTL_SECONDS", "0.9", "0.9. It must be 1 or more."),
        ("DEBUG", "perhaps", "'perhaps'. Use 1 or 0."),
    ],
)
def test_a_value_that_cannot_be_used_is_named(name: str, text: str, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        BrokerSettings.from_env({f"DECKHANDS_{name}": text})
    assert str(refused.value) == f"DECKHANDS_{name} is {told}"


def test_worker_settings_are_known_to_all_and_read_by_workers() -> None:
    settings = BrokerSettings.from_env({f"DECKHANDS_{name.upper()}": "?" for name in WORKER_SETTINGS})
    assert settings == BrokerSettings.from_env({})


def test_arguments_are_not_mixed_with_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECKHANDS_SHARDS", "7")
    assert BrokerSettings(home=Path("/srv")).shards is None
    assert BrokerSettings.from_env({}).shards is None


def test_the_key_of_the_secrets_is_not_shown() -> None:
    assert "sesame" not in repr(BrokerSettings.from_env({"DECKHANDS_SECRET_KEY": "sesame"}))


@pytest.mark.parametrize(
    ("url", "beside"),
    [
        ("redis://h:1/0", "redis://h:1/1"),
        ("redis://h:1", "redis://h:1/1"),
        ("rediss://u:p@h:1/3", "rediss://u:p@h:1/1"),
        ("rediss://h:1/0?ssl_cert_reqs=none", "rediss://h:1/1?ssl_cert_reqs=none"),
        ("redis://h:1?db=3", "redis://h:1/1"),
        ("unix:///run/s", "redis+socket:///run/s?virtual_host=1"),
        ("unix:///run/s?db=2", "redis+socket:///run/s?virtual_host=1"),
        ("unix://:pw@/run/a%20b/s", "redis+socket://:pw@/run/a%20b/s?virtual_host=1"),
    ],
)
def test_celery_gets_its_own_database(url: str, beside: str) -> None:
    assert make_celery_url(url) == beside


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("redis://h/1", "redis://h:6379/1"),
        ("redis://h", "redis://h:6379/0"),
        ("redis://h/", "redis://h/0"),
        ("redis://h:6380/1/", "redis://h:6380/1"),
        ("redis://Queue.Example/1", "redis://user:word@queue.example/1"),
        ("REDIS://h/1", "redis://h/1"),
        ("redis:///1", "redis://127.0.0.1:6379/1"),
        ("rediss://h/1?ssl_cert_reqs=none", "rediss://h:6379/1"),
        ("redis+socket:///run/q.sock", "redis+socket://:word@/run//q.sock?virtual_host=0"),
        ("redis+socket:///run/q.sock?virtual_host=1", "redis+socket:///run/q.sock?virtual_host=/1"),
    ],
)
def test_a_broker_is_the_same_however_its_url_is_spelled(one: str, other: str) -> None:
    names = {BrokerSettings.from_env({"DECKHANDS_CELERY_URL": url}).broker_name for url in (one, other)}
    assert len(names) == 1


def test_brokers_of_other_addresses_have_other_names() -> None:
    urls = ["redis://h/1", "redis://h/2", "redis://h:6380/1", "redis://g/1", "redis://[::1]/1", "redis://[::2]/1"]
    urls += ["redis+socket:///h?virtual_host=1", "redis+socket:///h?virtual_host=2", "redis+socket:///g"]
    assert len({BrokerSettings.from_env({"DECKHANDS_CELERY_URL": url}).broker_name for url in urls}) == len(urls)


@pytest.mark.parametrize("celery_url", ["redis://store:6380/1", "redis://:word@STORE:6380/1/"])
def test_a_broker_beside_the_store_has_no_name(celery_url: str) -> None:
    env = {"DECKHANDS_URL": "redis://store:6380/4", "DECKHANDS_CELERY_URL": celery_url}
    assert BrokerSettings.from_env(env).broker_name == ""
