"""URLs of stores behind Sentinels, for the store and for Celery."""

from __future__ import annotations

import pytest

from broker.celery.app import make_connection_settings
from broker.runtime import BrokerSettings, UsageError, make_celery_url
from broker.store.sentinel import SentinelUrl, is_sentinel_url

URL = "redis+sentinel://me:p%40ss@h1:26380,h2,[::1]:26381/deck/3?sentinel_username=s&sentinel_password=t"


def test_the_parts_of_a_url() -> None:
    found = SentinelUrl.parse(URL)
    assert found.sentinels == (("h1", 26380), ("h2", 26379), ("::1", 26381))
    assert (found.service, found.login) == ("deck", ("s", "t"))
    assert found.servers == "redis://me:p%40ss@h1:26380/3"
    assert SentinelUrl.parse("rediss+sentinel://h/deck?ssl_ca_certs=/ca").servers == (
        "rediss://h:26379/0?ssl_ca_certs=%2Fca"
    )
    assert is_sentinel_url(URL)
    assert not is_sentinel_url("redis://h/0")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+sentinel:///deck", "names no Sentinel"),
        ("redis+sentinel://h1,h2", "does not name the service"),
        ("redis+sentinel://h1:x/deck", "'h1:x' is not a host with a port"),
        ("redis+sentinel://:26379/deck", "is not a host with a port"),
    ],
)
def test_an_unusable_url_says_why(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SentinelUrl.parse(url)
    with pytest.raises(UsageError, match=reason):
        make_connection_settings(url)


def test_celery_gets_the_same_sentinels() -> None:
    settings = make_connection_settings(make_celery_url(URL), make_celery_url(URL))
    assert settings["broker_url"] == settings["result_backend"]
    assert settings["broker_url"].split(";") == [
        f"sentinel://me:p%40ss@{host}/1" for host in ("h1:26380", "h2:26379", "[::1]:26381")
    ]
    for name in ("broker_transport_options", "result_backend_transport_options"):
        assert settings[name]["master_name"] == "deck"
        assert settings[name]["sentinel_kwargs"]["username"] == "s"
        assert settings[name]["sentinel_kwargs"]["password"] == "t"


def test_broker_beside_the_store_needs_no_name() -> None:
    beside = {"DECKHANDS_URL": URL, "DECKHANDS_CELERY_URL": make_celery_url(URL)}
    assert BrokerSettings.from_env(beside).broker_name == ""
    elsewhere = {**beside, "DECKHANDS_CELERY_URL": "redis+sentinel://h9/deck/1"}
    assert BrokerSettings.from_env(elsewhere).broker_name == "h9/deck/1"
