"""The tables of quotas and tenants: valid and invalid entries, precedence, and the examples of the manual."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker.limits.quotas import OWN_KEY, QuotaTable
from broker.limits.tenants import TenantRule, TenantTable, parse_memory_bound
from broker.runtime.errors import UsageError
from controller_worker.settings import load_controller_settings
from tests.source_code import ROOT

MANUAL = (ROOT / "docs" / "quotas.md").read_text(encoding="utf-8")


def test_the_example_of_the_manual() -> None:
    found = re.search(r"## Quotas.*?```toml\n(.*?)```", MANUAL, re.DOTALL)
    assert found
    table = QuotaTable.parse(found[1])
    claude, openai = table.pools
    assert [quota.key for quota in claude.quotas] == [OWN_KEY]
    assert [quota.key for quota in openai.quotas] == ["OPENAI_KEY_1", "OPENAI_KEY_2"]
    assert table.find_pool("anthropic/claude-sonnet-4-5", "") == claude
    assert table.find_pool("openai/gpt-9", "") == openai
    assert table.find_pool("gemini/x", "") is None
    assert claude.quotas[0].render_limits() == ("requests=4000 input=2000000 output=400000 day_start=0 burst=1.000000")


def test_the_manual_names_every_field() -> None:
    named = set(re.findall(r"`(\w+)`", MANUAL))
    pool = QuotaTable.parse('[[quota]]\nmodel = "m"').pools[0]
    assert set(type(pool.quotas[0]).model_fields) - named == set()


BOUND = """
[[quota]]
model = "openai/*"
tenants = ["acme", "shop"]
key_env = "KEY_OF_ACME"
concurrency = 3

[[quota]]
model = "openai/*"
concurrency = 5
"""


def test_quota_of_a_tenant_applies_to_its_calls_alone() -> None:
    table = QuotaTable.parse(BOUND)
    bound, others = table.pools
    assert [table.find_pool("openai/x", tenant) for tenant in ("acme", "shop", "mill", "")] == [
        bound,
        bound,
        others,
        others,
    ]
    assert (bound.title, others.title) == ("openai/*@acme,shop", "openai/*")
    assert len({bound.name, others.name}) == 2
    assert table.has_key("openai/x", "KEY_OF_ACME")
    assert not table.has_key("gemini/x", "KEY_OF_ACME")


def test_quota_that_never_applies_is_refused() -> None:
    first, second = BOUND.strip().split("\n\n")
    with pytest.raises(UsageError, match=r"'openai/\*' for acme, shop never applies"):
        QuotaTable.parse(f"{second}\n\n{first}")


def test_no_setting_is_no_quota() -> None:
    assert QuotaTable.load_setting("  ") == QuotaTable()


def test_a_file_and_the_table_itself(tmp_path: Path) -> None:
    text = '[[quota]]\nmodel = "m"\nconcurrency = 3\n[tenants.acme]\nweight = 2'
    path = tmp_path / "quotas.toml"
    path.write_text(text)
    table = QuotaTable.parse(text)
    assert QuotaTable.load_setting(text) == table
    assert QuotaTable.load_setting(str(path)) == table.model_copy(update={"path": path})
    assert QuotaTable.parse(text).tenants.find_share("acme")[1] == 2.0


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ('model = "m/*"\nbase_url = "http://a:1/v1"', "exact name"),
        ('model = "m"\nbase_url = "http://user:pass@a:1/v1"', "not an address"),
        ('model = "m"\nbase_url = "file:///etc/passwd"', "not an address"),
        ('model = "m"\ncache_tokens = 5', "base_url"),
        ('model = "m"\nbase_url = "http://a:1"\n[[quota]]\nmodel = "m"\nkey_env = "K"', "every entry"),
        ('model = "m"\nbase_url = "http://a.b"\n[[quota]]\nmodel = "m"\nbase_url = "http://a-b/"', "two entries"),
    ],
)
def test_a_replica_that_cannot_be_used_is_refused(entry: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        QuotaTable.parse(f"[[quota]]\n{entry}")
    assert "pass@" not in str(caught.value)


def test_models_with_patterns_have_names_of_their_own() -> None:
    table = QuotaTable.parse("\n".join(f'[[quota]]\nmodel = "{model}"' for model in ("a/b", "a/*", "a/?", "*")))
    names = [pool.name for pool in table.pools]
    assert len(set(names)) == 4
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in names)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[quota", "is not TOML"),
        ("[[quota]]\nconcurrency = 1", "quota.0.model: Field required"),
        ('[[quota]]\nmodel = "m"\nconcurrency = 0', "quota.0.concurrency: Input should be greater than or equal to 1"),
        ('[[quota]]\nmodel = "m"\nrpm = 1', "quota.0.rpm: Extra inputs are not permitted"),
        ('[[quota]]\nmodel = "m"\nkey_env = "a b"', "quota.0.key_env: String should match pattern"),
        ('[[quota]]\nmodel = "m"\n[[quota]]\nmodel = "m"', "quota: 'm' has two entries for its usual key"),
        ("[tenants]\nacme = 0", "tenants.acme.weight: Input should be greater than or equal to 0.001"),
        ("[quotas]", "quotas: Extra inputs are not permitted"),
    ],
)
def test_invalid_tables_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        QuotaTable.parse(text)
    assert complaint in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        QuotaTable.load_setting("no/such/file.toml")


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


def test_two_tables_agree_on_a_tenant() -> None:
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
        ("[tenant]\nacme = 2", "'tenant' is not allowed next to [tenants]"),
        ("/no/such/file.toml", "cannot be read"),
    ],
)
def test_unusable_tenant_table_is_refused(text: str, complaint: str) -> None:
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
