"""How busy a machine is, by its kernel's files."""

from __future__ import annotations

from pathlib import Path

from broker.runtime.host_load import HostLoad

MEMORY = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    250 kB\n"
PRESSURE = "some avg10=12.50 avg60=1.00 avg300=0.00 total=7\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n"


def stat(busy: int, idle: int) -> str:
    return f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"


def test_shares_are_read_and_cpu_counts_since_the_last_reading(tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()
    for name in ("cpu", "memory", "io"):
        (tmp_path / "pressure" / name).write_text(PRESSURE)
    (tmp_path / "meminfo").write_text(MEMORY)
    (tmp_path / "stat").write_text(stat(100, 900))
    load = HostLoad(tmp_path)
    stalled = {"host_cpu_stalled": 0.125, "host_memory_stalled": 0.125, "host_io_stalled": 0.125}
    assert load.read() == {**stalled, "host_memory_free": 0.25}
    (tmp_path / "stat").write_text(stat(175, 925))
    assert load.read()["host_cpu"] == 0.75
    assert "host_cpu" not in load.read()  # no time has passed


def test_missing_kernel_figures_are_left_out(tmp_path: Path) -> None:
    assert HostLoad(tmp_path).read() == {}
    (tmp_path / "stat").write_text("cpu a b c\n")
    (tmp_path / "meminfo").write_text("MemTotal: 0 kB\nMemAvailable: 0 kB\n")
    assert HostLoad(tmp_path).read() == {}
