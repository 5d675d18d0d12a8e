"""The table of tenants: as a person writes it, in one place, and what of it cannot be used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker.limits.quotas import QuotaTable
from broker.limits.tenants import TenantRule, TenantTable, parse_memory_bound
from broker.runtime.errors import UsageError
from controller_worker.settings import load_controller_settings

MANUAL = (Path(__file__).parents[4] / "docs" / "quotas.md").read_text(encoding="utf-8")


def test_the_table_of_the_manual() -> None:
    found = re.search(r"## Tenants.*?```toml\n(.*?)```", MANUAL, re.DOTALL)
    table = TenantTable.load_setting(found[1])
    assert table.rules["acme"] == TenantRule(weight=3)
    assert table.rules["globex"] == TenantRule(weight=2, max_open=500, submissions_per_minute=60)
    assert table.find_share("globex") == ("globex", 2.0)
    assert table.find_share("made-up") == table.find_share("") == ("*", 1.0)
    one_line = re.search(r"DECKHANDS_TENANTS='(.*?)'", MANUAL)
    assert TenantTable.load_setting(one_line[1]).find_share("acme") == ("acme", 3.0)


def test_without_a_rule_for_all_others_each_is_a_share() -> None:
    assert TenantTable.load_setting(" ").find_share("acme") == ("acme", 1.0)


def test_one_file_may_hold_quotas_and_tenants(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text('[[quota]]\nmodel = "m"\nconcurrency = 3\n[tenants.acme]\nweight = 2\nmax_open = 5')
    settings = load_controller_settings({"DECKHANDS_TENANTS": str(path), "DECKHANDS_QUOTAS": str(path)})
    assert settings.tenants.rules == settings.quotas.tenants.rules == {"acme": TenantRule(weight=2, max_open=5)}


def test_weights_need_no_quota_table() -> None:
    settings = load_controller_settings({"DECKHANDS_TENANTS": "tenants = {acme = 3}"})
    assert settings.quotas == QuotaTable(tenants=TenantTable.load_setting("tenants = {acme = 3}"))


def test_what_two_tables_say_of_a_tenant_agrees() -> None:
    both = {"DECKHANDS_TENANTS": "tenants = {acme = 3, other = 1}"}
    assert load_controller_settings(
        both | {"DECKHANDS_QUOTAS": "[tenants]\nacme = 3\nthird = 2"}
    ).tenants.rules.keys() == {"acme", "other", "third"}
    with pytest.raises(UsageError, match="have different rules for the tenant 'acme'"):
        load_controller_settings(both | {"DECKHANDS_QUOTAS": "[tenants]\nacme = 2"})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[tenants", "is not TOML"),
        ("[tenants]\nacme = 0", "acme.weight: Input should be greater than or equal to 0.001"),
        ("[tenants.acme]\nmax_open = 0", "acme.max_open: Input should be greater than or equal to 1"),
        ("[tenants.acme]\nwieght = 2", "acme.wieght: Extra inputs are not permitted"),
        ('[tenants]\n"a b" = 2', "invalid tenant name 'a b'"),
        ("[tenant]\nacme = 2", "there is a 'tenant' beside"),
        ("/no/such/file.toml", "cannot be read"),
    ],
)
def test_what_cannot_be_used(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        TenantTable.load_setting(text)


@pytest.mark.parametrize(
    ("text", "bound"),
    [("80%", 0.8), ("100%", 1.0), ("none", 0.0), ("6GiB", 6 * 2**30), ("500m", 500 * 2**20), ("4096", 4096)],
)
def test_a_bound_of_the_memory(text: str, bound: float) -> None:
    assert parse_memory_bound(text) == bound


@pytest.mark.parametrize("text", ["0%", "101%", "much", "-1", "0", "1", "0.8"])
def test_a_bound_of_the_memory_that_cannot_be_used(text: str) -> None:
    with pytest.raises(UsageError, match="DECKHANDS_ADMIT_MEMORY is"):
        load_controller_settings({"DECKHANDS_ADMIT_MEMORY": text})
