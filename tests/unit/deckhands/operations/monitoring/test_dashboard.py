"""The dashboard and the alerts ask only for metrics that there are, by labels that these have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from deckhands.operations.monitoring.families import FAMILIES
from tests.source_code import ROOT

DASHBOARD = json.loads((ROOT / "deploy/grafana/deckhands.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
LABELS = {family.sample_name: set(family.labels) for family in FAMILIES}
SELECTOR = re.compile(r"(deckhands_\w+)(?:\{([^}]*)\})?")


def queries() -> Iterator[Any]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield pytest.param(target["expr"], target["legendFormat"], id=panel["title"])
    for rule in RULES:
        yield pytest.param(rule["expr"], "".join(rule["annotations"].values()), id=rule["alert"])


QUERIES = list(queries())


@pytest.mark.parametrize(("query", "shown"), QUERIES)
def test_a_query_asks_for_what_there_is(query: str, shown: str) -> None:
    found = SELECTOR.findall(query)
    assert found
    assert {name for name, _ in found} <= LABELS.keys()
    for name, condition in found:
        assert set(re.findall(r"(\w+)\s*[=!]", condition)) <= LABELS[name]
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
    for label in grouped:
        assert any(label in LABELS[name] for name, _ in found), label
    assert set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", shown)) <= grouped
    assert query.count("(") == query.count(")")


@pytest.mark.parametrize("query", [found.values[0] for found in QUERIES])
def test_counters_are_queried_by_rate(query: str) -> None:
    for name, _ in SELECTOR.findall(query):
        pattern = rf"(rate|increase)\({name}(\{{[^}}]*\}})?\[[^\]]+\]\)"
        assert bool(re.search(pattern, query)) is name.endswith("_total"), name


def test_every_metric_is_on_the_dashboard_or_in_alerts() -> None:
    asked = {name for found in QUERIES for name, _ in SELECTOR.findall(found.values[0])}
    left_out = {
        *("deckhands_conversations_age_seconds", "deckhands_conversations_uncounted", "deckhands_parked_conversations"),
        *("deckhands_unclaimed_conversations", "deckhands_unpriced_calls_total", "deckhands_ingress_looks_total"),
        *("deckhands_inbox_entries_total", "deckhands_loop_late_seconds_total"),
    }
    assert LABELS.keys() - asked == left_out


def test_panels_and_alerts_can_be_told_apart() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    assert all(rule["labels"]["severity"] in ("warning", "critical") for rule in RULES)


def test_the_page_lists_every_alert() -> None:
    page = (ROOT / "docs/observability.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(Deckhands\w+)` \|", page, re.MULTILINE) == [rule["alert"] for rule in RULES]
