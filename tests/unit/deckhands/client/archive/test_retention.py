"""The retention policy as a person writes it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from broker.runtime.errors import UsageError
from deckhands.client.archive.retention import Retention


def policy(tmp_path, text: str) -> Retention:
    path = tmp_path / "retention.toml"
    path.write_text(text)
    return Retention.of_setting(str(path))


def test_without_a_file_everything_is_kept() -> None:
    assert Retention.of_setting("").youngest is None
    assert Retention().rule_for(tenant="", labels={}, state="finished") is None
    assert Retention().warning("") == ""


def test_the_first_rule_that_fits_counts(tmp_path) -> None:
    found = policy(
        tmp_path,
        """
        [[rule]]
        labels = {keep = "yes"}
        age = "never"
        [[rule]]
        tenant = ["acme", "shop"]
        states = "finished"
        age = "2h"
        then = "delete"
        [[rule]]
        age = "30d"
        """,
    )
    ages = [
        found.rule_for(tenant=tenant, labels=labels, state=state).age
        for tenant, labels, state in [
            ("acme", {"keep": "yes", "x": "y"}, "finished"),
            ("shop", {"x": "y"}, "finished"),
            ("shop", {}, "error"),
            ("", {}, "finished"),
        ]
    ]
    assert ages == [None, timedelta(hours=2), timedelta(days=30), timedelta(days=30)]
    assert found.youngest == timedelta(hours=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[rule]]\nage = "30 days"', "rule.0.age"),
        ('[[rule]]\nage = "-1d"', "rule.0.age"),
        ("[[rule]]\nage = 30", "rule.0.age"),
        ('[[rule]]\ntenant = "acme"', "rule.0.age"),
        ('[[rule]]\nage = "1d"\nlabel = {a = "b"}', "rule.0.label"),
        ('[[rule]]\nage = "1d"\nstates = ["gone"]', "rule.0.states.0"),
        ('[[rule]]\nage = "1d"\nthen = "burn"', "rule.0.then"),
        ("rule = ", "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_place(tmp_path, text, said) -> None:
    with pytest.raises(UsageError, match=said):
        policy(tmp_path, text)
    with pytest.raises(UsageError, match="cannot be read"):
        Retention.of_setting(str(tmp_path / "not-there"))


def test_what_is_deleted_for_good_is_said(tmp_path) -> None:
    archives, deletes = '[[rule]]\nage = "1d"\n', '[[rule]]\nage = "1d"\nthen = "delete"\n'
    assert "nothing leaves the store" in policy(tmp_path, archives).warning("")
    assert policy(tmp_path, archives).warning("/archive") == ""
    assert policy(tmp_path, archives + deletes).warning("/archive").startswith("a retention rule deletes conversations")
    assert policy(tmp_path, deletes * 2).warning("").startswith("2 retention rules delete conversations permanently")
