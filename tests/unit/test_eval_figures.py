"""Figures that the benchmarks of evaluations compute beforehand: the server's latencies, and the ideal of a schedule."""

from __future__ import annotations

import statistics

from benchmarks.eval_figures import Line, ideal_seconds, percentile
from tests.model_server.latency import Latency


def test_a_latency_follows_from_the_name_in_the_task() -> None:
    latency = Latency(15.0, 0.5)
    body = b'{"messages":[{"role":"user","content":"What? (latency-key=i17)"}]}'
    assert latency.of_request(body, 2) == latency.of("i17", 2) != latency.of("i17", 3)
    assert latency.of_request(b"{}", 2) == 15.0
    assert Latency(15.0).of_request(body, 2) == 15.0
    assert Latency().of_request(body, 2) is None
    drawn = [latency.of(f"i{number}", 0) or 0.0 for number in range(2_000)]
    assert 14.0 < statistics.median(drawn) < 16.0
    assert max(drawn) > 45.0


def test_the_ideal_of_a_schedule() -> None:
    assert ideal_seconds([], 3) == 0.0
    assert ideal_seconds([4.0, 1.0, 2.0], 3) == 4.0
    assert ideal_seconds([4.0, 1.0, 2.0, 2.0], 2) == 5.0
    assert percentile([], 0.99) == 0.0
    assert percentile(range(101), 0.99) == 99


def test_a_line_says_whether_it_keeps_its_target() -> None:
    assert str(Line("wall", 1.25, "s", 1.1)).endswith("1.25 s  (at most 1.1: MISSED)")
    assert str(Line("wall", 1.05, "s", 1.1)).endswith("(at most 1.1: met)")
    assert not Line("wall", "no answer", "", 1.0).is_met
