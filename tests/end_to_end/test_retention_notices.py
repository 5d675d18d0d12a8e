"""The operator of a cluster hears of rules that delete for good, and of an archive that cannot be used."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.integration.command_line import deckhands, environment, finished, read_until, started

FOR_GOOD = "a retention rule deletes conversations permanently, without an archive."
NOBODY = ("--controllers", "0", "--tools", "0", "--ingresses", "0", "--jobs", "0", "--beats", "0")


def rules(tmp_path: Path, text: str = '[[rule]]\nage = "1d"\nthen = "delete"\n') -> str:
    path = tmp_path / "retention.toml"
    path.write_text(text)
    return str(path)


def test_doctor_says_it(tmp_path: Path) -> None:
    env = environment(tmp_path, DECKHANDS_RETENTION=rules(tmp_path))
    found = {finding["name"]: finding for finding in deckhands("doctor", "--json", env=env).json}
    noticed = {"name": "retention", "is_good": False, "is_needed": False, "detail": FOR_GOOD, "remedy": ""}
    assert found["retention"] == noticed
    assert "archive" not in found
    env |= {"DECKHANDS_ARCHIVE": str(tmp_path / "archive"), "DECKHANDS_RETENTION": rules(tmp_path, "")}
    found = {finding["name"]: finding for finding in deckhands("doctor", "--json", env=env).json}
    assert found["retention"]["is_good"]
    assert found["archive"]["is_good"]


def test_doctor_says_what_cannot_be_used(tmp_path: Path) -> None:
    variables = {"DECKHANDS_RETENTION": rules(tmp_path, "[[rule]]"), "DECKHANDS_ARCHIVE": "nowhere://bucket"}
    done = deckhands("doctor", "--json", env=environment(tmp_path, **variables))
    assert done.code == 1
    found = {finding["name"]: finding for finding in done.json}
    assert "rule.0.age" in found["retention"]["detail"]
    assert "nowhere" in found["archive"]["detail"]
    assert [found[name]["is_needed"] for name in ("retention", "archive")] == [True, True]


def test_up_says_it(tmp_path: Path) -> None:
    with started("up", *NOBODY, env=environment(tmp_path, DECKHANDS_RETENTION=rules(tmp_path))) as running:
        read_until(running, "Ctrl-C stops it")
        running.send_signal(signal.SIGTERM)
        done = finished(running)
    assert f"Retention: {FOR_GOOD}" in done.err.replace("\n", " ")
