"""The home directory: permitted users, and how other commands find the cluster in it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from broker.runtime.errors import UsageError
from deckhands.cluster.home import Home, supervise

HOLD = """
import sys
from pathlib import Path
from deckhands.cluster.home import supervise
with supervise(Path(sys.argv[1]), "A cluster"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_it_is_made_for_its_user_alone(tmp_path):
    home = Home(tmp_path / "deep" / "home")
    home.prepare(home.cluster)
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    assert home.cluster.is_dir()


def test_a_home_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    home = Home(tmp_path / "file" / "home")
    with pytest.raises(UsageError, match=r"file/home.* cannot be used: Not a directory.*DECKHANDS_HOME"):
        home.prepare(home.cluster)


def test_folder_has_one_supervisor_known_by_pid(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        message = rf"A cluster is already running in .* \(pid {other.pid}\)\. Stop it with `kill {other.pid}`"
        with pytest.raises(UsageError, match=message), supervise(tmp_path, "A cluster"):
            pass
        other.kill()
        other.wait()
        with supervise(tmp_path, "A cluster"):
            assert (tmp_path / "supervisor.lock").read_text().strip() == str(os.getpid())


def test_the_url_is_there_as_long_as_the_cluster_is(tmp_path):
    home = Home(tmp_path)
    home.prepare(home.cluster)
    assert home.cluster_url is None
    with home.announce("unix:///run/x.sock", "redis+socket:///run/x.sock"):
        assert home.cluster_url == "unix:///run/x.sock"
        assert (home.cluster / "celery-url").read_text().strip() == "redis+socket:///run/x.sock"
        assert {stat.S_IMODE((home.cluster / name).stat().st_mode) for name in ("url", "celery-url")} == {0o600}
    assert home.cluster_url is None
