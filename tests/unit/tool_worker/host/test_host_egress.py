"""The host's end of the egress proxy: one proxy at a time, and what it refused, once."""

from __future__ import annotations

from tool_worker.host.egress import KEPT_REFUSALS, HostEgress


def test_only_the_proxys_end_makes_room_for_another() -> None:
    egress, proxy, client = HostEgress(0), object(), object()
    egress.proxy = proxy
    egress.forget(client)
    assert egress.proxy is proxy
    egress.forget(proxy)
    assert egress.proxy is None


def test_refusals_are_kept_once_and_bounded() -> None:
    egress = HostEgress(0)
    for number in (*range(KEPT_REFUSALS + 5), 0):
        egress.note({"why": f"no {number}"})
    assert egress.take_refusals() == [f"no {number}" for number in range(KEPT_REFUSALS)]
    assert egress.take_refusals() == []
    egress.note({"why": "no 0"})
    assert egress.take_refusals() == ["no 0"]


def test_without_a_port_there_is_no_socket_to_lend() -> None:
    egress = HostEgress(0)
    assert not egress.lend(object(), None, b"")  # type: ignore[arg-type]
    assert egress.proxy is None
