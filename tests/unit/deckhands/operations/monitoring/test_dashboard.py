"""The dashboard and the alerts ask only for metrics that there are, by labels that these have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
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


def test_every_alert_guards_a_promise() -> None:
    page = (ROOT / "docs/observability.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| if this promise is at risk .*\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert set(re.findall(r"`(Deckhands\w+)`", table)) == {rule["alert"] for rule in RULES}


FIRING: dict[str, tuple[dict[str, str], int, dict[str, str]]] = {
    "DeckhandsStoreAway": ({"deckhands_store_up": "0x9"}, 2, {}),
    "DeckhandsNoWorker": (
        {'deckhands_workers{role="controller"}': "0x9", 'deckhands_workers{role="tool"}': "2x9"},
        3,
        {},
    ),
    "DeckhandsQueueWaits": ({'deckhands_queue_oldest_seconds{queue="pool:gpu"}': "130x9"}, 7, {"queue": "pool:gpu"}),
    "DeckhandsCeleryQueueWaits": (
        {'deckhands_queue_oldest_seconds{queue="celery_ingress"}': "70x9"},
        4,
        {"queue": "celery_ingress"},
    ),
    "DeckhandsConversationsUnclaimed": ({"deckhands_unclaimed_oldest_seconds": "130x9"}, 7, {}),
    "DeckhandsTakeovers": ({"deckhands_takeovers_total": "0+10x30"}, 20, {}),
    "DeckhandsDeadConversations": ({"deckhands_dead_conversations": "1x9"}, 7, {}),
    "DeckhandsUnreadable": ({"deckhands_unreadable_total": "0+1x30"}, 20, {}),
    "DeckhandsModelCallsFail": (
        {
            'deckhands_model_calls_total{outcome="answered"}': "0+3x40",
            'deckhands_model_calls_total{outcome="authentication"}': "0+1x40",
        },
        30,
        {},
    ),
    "DeckhandsLoopLag": (
        {'deckhands_loop_lag_seconds{role="controller",worker="c1"}': "1.5x9"},
        7,
        {"role": "controller", "worker": "c1"},
    ),
    "DeckhandsNoBeat": ({"deckhands_beat_up": "0x9"}, 7, {}),
    "DeckhandsJobsFail": ({'deckhands_failed_jobs_total{job="archive"}': "0+1x70"}, 65, {"job": "archive"}),
    "DeckhandsStoreFull": (
        {"deckhands_store_memory_bytes": "95x9", "deckhands_store_memory_limit_bytes": "100x9"},
        7,
        {},
    ),
    "DeckhandsConversationsRefused": ({'deckhands_refused_beginnings_total{reason="memory"}': "0+1x30"}, 20, {}),
    "DeckhandsMetricsIncomplete": ({"deckhands_scrape_failures": "1x20"}, 15, {}),
}
"""Series of a broken cluster, one value a minute; the minute at which the alert is there; its labels."""
QUIET = {
    "deckhands_store_up": "1x70",
    'deckhands_workers{role="controller"}': "1x70",
    'deckhands_workers{role="tool"}': "1x70",
    'deckhands_queue_oldest_seconds{queue="pool:gpu"}': "100x70",
    'deckhands_queue_oldest_seconds{queue="celery_ingress"}': "50x70",
    "deckhands_unclaimed_oldest_seconds": "100x70",
    "deckhands_takeovers_total": "0+1x70",
    "deckhands_dead_conversations": "0x70",
    "deckhands_unreadable_total": "4x70",
    'deckhands_model_calls_total{outcome="answered"}': "0+9x70",
    'deckhands_model_calls_total{outcome="authentication"}': "0+1x70",
    'deckhands_loop_lag_seconds{role="controller",worker="c1"}': "0.5x70",
    "deckhands_beat_up": "1x70",
    'deckhands_failed_jobs_total{job="archive"}': "2x70",
    "deckhands_store_memory_bytes": "85x70",
    "deckhands_store_memory_limit_bytes": "100x70",
    'deckhands_refused_beginnings_total{reason="memory"}': "3x70",
    "deckhands_scrape_failures": "0x70",
}
"""The same of one at work."""


def evaluate(series: dict[str, str], alert: str, minute: int, expected: list[Any], folder: Path) -> None:
    """Let Prometheus' own engine evaluate the rules over series."""
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": expected}],
    }
    rules = str(ROOT / "deploy/prometheus/alerts.yaml")
    (folder / "test.yaml").write_text(json.dumps({"rule_files": [rules], "evaluation_interval": "1m", "tests": [test]}))
    command = ["promtool", "test", "rules", str(folder / "test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    assert list(FIRING) == [rule["alert"] for rule in RULES]


@pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool; Debian's package prometheus has it")
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alert_fires_on_its_fault_and_is_quiet_without(rule: Any, tmp_path: Path) -> None:
    broken, minute, labels = FIRING[rule["alert"]]

    def fill(text: str) -> str:
        return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)

    expected = {
        "exp_labels": labels | rule["labels"],
        "exp_annotations": {name: fill(text) for name, text in rule["annotations"].items()},
    }
    evaluate(broken, rule["alert"], minute, [expected], tmp_path)
    evaluate(QUIET, rule["alert"], 65, [], tmp_path)
