"""An agent with the network reaches this machine's own ports: no server answers it without a key."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import stat
from pathlib import Path

import httpx2

from deckhands.client.client import Client
from deckhands.server.auth.api_keys import ApiKeys
from tests.faults.server_process import free_port
from tests.integration.command_line import cluster, deckhands, environment, finish, run_command, script, started

PATHS = ("/conversations", "/metrics", "/queues", "/v1/models", "/operations", "/tools")
PROBE = """
import json, sys, urllib.error, urllib.request
for method, address in json.loads(sys.argv[1]):
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method=method), timeout=30) as answer:
            print("status", answer.status)
    except urllib.error.HTTPError as error:
        print("status", error.code)
"""


def probe(model: Path, env: dict[str, str], *requests: tuple[str, str]) -> list[str]:
    """The statuses that an agent with the network gets in its sandbox."""
    script(model, run_command(shlex.join(["python3", "-c", PROBE, json.dumps(requests)])), finish("done"))
    asked = ("submit", "-t", "probe", "--model", f"scripted/{model}", "--network", "--json")
    (begun,) = deckhands(*asked, env=env).json
    assert deckhands("wait", begun["conversation_id"], env=env).code == 0
    shown = deckhands("logs", begun["conversation_id"], "--json", env=env).json
    (output,) = [event for event in shown if event["kind"] == "observation.run"]
    return [line.split()[1] for line in output["content"].splitlines() if line.startswith("status")]


def test_agent_cannot_list_or_delete_through_up_web(tmp_path: Path) -> None:
    home, port, model = tmp_path / "home", free_port(), tmp_path / "probe.json"
    few = ("--ingresses", "0", "--web", "--web-port", str(port), "--sandbox", "bwrap")
    with cluster(home, *few, BROWSER="/bin/true") as running:
        assert running.stderr is not None
        address = next(line for line in running.stderr if "The page is" in line).split()[-1]
        url, env = f"http://127.0.0.1:{port}", environment(home)
        (victim,) = deckhands("submit", "-t", "private", "--delay", "1h", "--json", env=env).json
        path = f"{url}/conversations/{victim['conversation_id']}"
        requests = [*(("GET", f"{url}{path}") for path in PATHS), ("DELETE", f"{path}?reason=x"), ("GET", path)]
        assert probe(model, env, *requests) == ["401"] * len(requests)
        key_file = home / "server.key"
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
        token = key_file.read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        assert httpx2.get(path, headers=headers).status_code == 200
        base, _, ticket = address.partition("/#/enter/")
        assert base == url
        entered = [httpx2.post(f"{url}/entries", json={"ticket": ticket}) for _ in range(2)]
        assert [answer.status_code for answer in entered] == [201, 401]
        brought = entered[0].json()["token"]
        assert brought != token
        assert httpx2.get(path, headers={"Authorization": f"Bearer {brought}"}).status_code == 200
        lives = [each["expires"] for each in deckhands("key", "ls", "--json", env=env).json]
        assert [life is None for life in lives] == [True, False]
        logs = b"".join(file.read_bytes() for file in (home / "cluster").rglob("*.log"))
        assert not any(each.encode() in logs for each in (token, brought))
        arguments = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if os.access(file, os.R_OK)]
        assert not any(each.encode() in line for line in arguments for each in (token, brought))


def test_server_without_keys_makes_one_for_this_machine(tmp_path: Path) -> None:
    home, port = tmp_path / "home", free_port()
    with cluster(home, "--controllers", "0", "--tools", "0", "--ingresses", "0"):
        env, found = environment(home), set()
        for _ in range(2):
            with started("serve", "--port", str(port), env=env) as serving:
                assert any("server.key" in line for line in iter(serving.stderr.readline, ""))
                found.add((home / "server.key").read_text().strip())
                assert httpx2.get(f"http://127.0.0.1:{port}/conversations").status_code == 401
        (token,) = found

        async def revoke() -> None:
            async with await Client.connect((home / "cluster" / "url").read_text().strip()) as client:
                await ApiKeys(client.store).revoke(token.split("_")[1])

        asyncio.run(revoke())
        with started("serve", "--port", str(port), env=env) as serving:
            assert any("was revoked" in line for line in iter(serving.stderr.readline, ""))
            headers = {"Authorization": f"Bearer {token}"}
            assert httpx2.get(f"http://127.0.0.1:{port}/conversations", headers=headers).status_code == 401
        assert (home / "server.key").read_text().strip() in found


def test_metrics_need_a_token_also_on_loopback(tmp_path: Path) -> None:
    home, port = tmp_path / "home", free_port()
    with (
        cluster(home, "--controllers", "0", "--tools", "0", "--ingresses", "0"),
        started("metrics", "--port", str(port), env=environment(home)) as serving,
    ):
        assert any("Metrics are at" in line for line in iter(serving.stderr.readline, ""))
        token_file, url = home / "metrics.token", f"http://127.0.0.1:{port}/metrics"
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        with httpx2.Client(transport=httpx2.HTTPTransport(retries=10)) as client:
            refused = client.get(url)
            assert (refused.status_code, b"deckhands_" in refused.content) == (401, False)
            headers = {"Authorization": f"Bearer {token_file.read_text().strip()}"}
            assert b"deckhands_store_up" in client.get(url, headers=headers).content


def test_key_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "metrics.token").mkdir(parents=True)
    env = environment(home, DECKHANDS_URL="redis://127.0.0.1:1")
    done = deckhands("metrics", env=env)
    assert done.code != 0
    assert "metrics.token" in done.err
