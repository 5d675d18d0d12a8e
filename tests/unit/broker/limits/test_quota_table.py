"""The quota table: what is read, what is refused, which entry counts; and the example of the manual."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker.limits.quotas import OWN_KEY, QuotaTable
from broker.runtime.errors import UsageError
from tests.source_code import ROOT

MANUAL = (ROOT / "docs" / "quotas.md").read_text(encoding="utf-8")


def test_the_example_of_the_manual() -> None:
    found = re.search(r"## Quotas.*?```toml\n(.*?)```", MANUAL, re.DOTALL)
    assert found
    table = QuotaTable.parse(found[1])
    claude, openai = table.pools
    assert [quota.key for quota in claude.quotas] == [OWN_KEY]
    assert [quota.key for quota in openai.quotas] == ["OPENAI_KEY_1", "OPENAI_KEY_2"]
    assert table.find_pool("anthropic/claude-sonnet-4-5") == claude
    assert table.find_pool("openai/gpt-9") == openai
    assert table.find_pool("gemini/x") is None
    assert claude.quotas[0].render_limits() == ("requests=4000 input=2000000 output=400000 day_start=0 burst=1.000000")


def test_the_manual_names_every_field() -> None:
    named = set(re.findall(r"`(\w+)`", MANUAL))
    pool = QuotaTable.parse('[[quota]]\nmodel = "m"').pools[0]
    assert set(type(pool.quotas[0]).model_fields) - named == set()


def test_no_setting_is_no_quota() -> None:
    assert QuotaTable.load_setting("  ") == QuotaTable()


def test_a_file_and_the_table_itself(tmp_path: Path) -> None:
    text = '[[quota]]\nmodel = "m"\nconcurrency = 3\n[tenants.acme]\nweight = 2'
    path = tmp_path / "quotas.toml"
    path.write_text(text)
    assert QuotaTable.load_setting(str(path)) == QuotaTable.load_setting(text) == QuotaTable.parse(text)
    assert QuotaTable.parse(text).tenants.find_share("acme")[1] == 2.0


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
def test_what_cannot_be_used(text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        QuotaTable.parse(text)
    assert complaint in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        QuotaTable.load_setting("no/such/file.toml")
