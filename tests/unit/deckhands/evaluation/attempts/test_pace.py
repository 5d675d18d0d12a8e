"""The limit of running attempts grows until it reaches a bottleneck, and settles near it."""

from __future__ import annotations

import pytest

from deckhands.evaluation.attempts.pace import (
    QUIET_SECONDS,
    START,
    STARTS_PER_WORKER,
    Calls,
    HostPace,
    Hosts,
    ModelPace,
    Pace,
)

IDLE = Hosts(cpu=0.2, memory_free=0.8, cpu_stalled=0.0, memory_stalled=0.0, io_stalled=0.0, tool_workers=1)


def test_pace_doubles_up_to_the_ceiling_while_used() -> None:
    pace = HostPace(100)
    seen = []
    for now in range(6):
        seen.append(pace.pace.limit)
        pace.tick(float(now), pace.pace.limit, IDLE)
    assert seen == [8, 16, 32, 64, 100, 100]
    idle = HostPace(100)
    idle.tick(0.0, 3, IDLE)
    assert idle.pace.limit == START


@pytest.mark.parametrize(
    ("hosts", "bound"),
    [
        (Hosts(cpu=0.99, cpu_stalled=0.7), "CPU of a host: 99% busy"),
        (Hosts(cpu=0.99), "CPU of a host: 99% busy"),
        (Hosts(memory_free=0.12), "memory of a host: 12% is free"),
        (Hosts(memory_stalled=0.2), "memory of a host: work stalls 20% of the time"),
        (Hosts(io_stalled=0.7), "disks of a host: work stalls 70% of the time"),
        (Hosts(starting=2 * STARTS_PER_WORKER, tool_workers=2), "8 sandboxes that start"),
    ],
)
def test_scarce_host_resource_stops_growth_and_is_named(hosts: Hosts, bound: str) -> None:
    pace = HostPace(100)
    pace.tick(0.0, START, hosts)
    assert (pace.pace.limit, pace.bound) == (START, bound)


def test_suffering_host_gets_fewer_but_never_below_minimum() -> None:
    pace = HostPace(1_000)
    for now in range(5):
        pace.tick(float(now), pace.pace.limit, IDLE)
    before = pace.pace.limit
    pace.tick(5.0, before, Hosts(memory_free=0.03))
    assert pace.pace.limit == int(before * 0.7)
    for number in range(20):
        pace.tick(20.0 + number * QUIET_SECONDS, pace.pace.limit, Hosts(memory_free=0.03))
    assert pace.pace.limit == START


def test_it_waits_for_the_effect_before_it_shrinks_again() -> None:
    pace = Pace(100, limit=100)
    assert pace.shrink(0.0, 100)
    assert not pace.shrink(QUIET_SECONDS - 1.0, 100)  # those that started before the first still run
    assert pace.limit == 70
    assert pace.shrink(QUIET_SECONDS, 70)
    assert (pace.limit, pace.found) == (49, [100, 70])


def test_busy_cpus_without_stalls_are_used_and_not_short() -> None:
    assert Hosts(cpu=0.99, cpu_stalled=0.1).binds == ""


def test_provider_limit_is_found_only_by_its_refusals() -> None:
    allowed, pace, now = 50, ModelPace(10_000), 0.0
    seen = []
    for _ in range(600):
        now += 1.0
        in_flight = pace.pace.limit
        refused = max(0, in_flight - allowed)
        calls = Calls(refused=refused, answered=min(in_flight, allowed), seconds=float(min(in_flight, allowed)))
        pace.tick(now, in_flight, calls, is_refused=refused > 0, in_queue=refused)
        seen.append(pace.pace.limit)
    later = seen[300:]
    assert allowed * 0.6 < min(later)
    assert max(later) < allowed * 1.25
    assert allowed <= pace.pace.found[-1] < allowed * 1.25
    assert "429s" in pace.bound


def test_limit_of_an_unrefusing_server_is_found_by_latency() -> None:
    most_a_second, pace, now, seen = 40.0, ModelPace(10_000), 0.0, []
    for _ in range(600):
        now += 1.0
        in_flight = pace.pace.limit
        rate = min(float(in_flight), most_a_second)  # a second of latency, and a queue beyond that
        calls = Calls(answered=round(rate), seconds=in_flight / rate * round(rate), over_seconds=1.0)
        pace.tick(now, in_flight, calls, is_refused=False, in_queue=0)
        seen.append(in_flight)
    assert max(seen[300:]) < 4 * most_a_second
    assert "latency" in pace.bound


def test_slower_calls_with_longer_prompts_do_not_count() -> None:
    pace = ModelPace(100)
    for now in range(200):
        in_flight = pace.pace.limit
        latency = 1.0 + now / 20  # ten times as long at the end
        answered = max(1, round(in_flight / latency))
        calls = Calls(answered=answered, seconds=answered * latency)
        pace.tick(float(now), in_flight, calls, is_refused=False, in_queue=0)
    assert (pace.pace.limit, pace.pace.found) == (100, [])


def test_refusals_of_another_model_do_not_slow_this_one() -> None:
    pace = ModelPace(100)
    pace.tick(1.0, START, Calls(refused=5), is_refused=False, in_queue=0)
    assert pace.pace.limit == 2 * START


def test_the_quota_table_is_named_and_costs_no_limit() -> None:
    pace = ModelPace(100)
    pace.tick(1.0, START, Calls(), is_refused=True, in_queue=3)
    assert (pace.pace.limit, pace.bound) == (START, "the quota table: 3 wait for their turn")


def test_another_ceiling_holds_at_once() -> None:
    pace = Pace(4)
    pace.set_ceiling(2)
    assert pace.limit == 2
    pace.set_ceiling(50)
    assert pace.limit == START
