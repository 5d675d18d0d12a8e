"""The containers, tried with a real engine: up, at work, killed, stopped, hung, and watched.

The image is built unless there is one; `IMAGE` and `CLAUDE_IMAGE` name others, of one version, `BASE_IMAGE` another
base to build it from. The containers' logs are kept beside the test's other files, in `containers.log`, and a picture
of an agent in Flower. Run by `pytest -m docker`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator

import httpx
import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from tests.browser_pages import CHROMIUM, opened
from tests.integration.compose_project import (
    LIMIT_SECONDS,
    Project,
    docker,
    engine_answers,
    image_is_there,
    outputs,
    project_in,
    until_health,
)
from tests.integration.test_compose import CHAOS, CLAUDE, PRODUCERS, STAYING
from tests.polling import until

BUILD_LIMIT_SECONDS = 1_800
UP_LIMIT_SECONDS = 300
OWNER = """
import asyncio, os, sys
from broker.store.connection import MultiplexedConnection
async def main():
    connection = MultiplexedConnection(os.environ["DECKHANDS_URL"])
    print((await connection.call("HGET", "deck:{0}:c:%s:meta" % sys.argv[1], "owner")).decode())
asyncio.run(main())
"""
ARCHIVED = """
import hashlib, json, sys, zipfile
name = f"{hashlib.sha256(sys.argv[1].encode()).hexdigest()[:2]}/{sys.argv[1]}.zip"
with zipfile.ZipFile(f"/var/lib/archive/{name}") as file:
    manifest = json.loads(file.read("manifest.json"))
    sums = {name: hashlib.sha256(file.read(name)).hexdigest() for name in file.namelist() if name != "manifest.json"}
    wrong = [name for name, about in manifest["members"].items() if sums.pop(name) != about["sha256"]]
    print(json.dumps({"state": manifest["state"], "wrong": wrong + list(sums), "events": manifest["last_event_id"]}))
"""
REFUSED = """
import asyncio, os
from broker.store.connection import MultiplexedConnection
async def main():
    try:
        await MultiplexedConnection(os.environ["DECKHANDS_URL"]).call("CONFIG", "GET", "dir")
    except Exception as error:
        print(error)
asyncio.run(main())
"""
pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(BUILD_LIMIT_SECONDS + UP_LIMIT_SECONDS)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The whole cluster, up and healthy, with two controllers and two tool workers."""
    if not engine_answers():
        pytest.skip("no docker engine with compose answers here")
    folder = tmp_path_factory.mktemp("deckhands-trial")
    image = os.environ.get("IMAGE", "deckhands:latest")
    rules = folder / "retention.toml"
    rules.write_text('[[rule]]\nlabels = {stays = "no"}\nage = "1s"\n')
    project = project_in(folder, PRODUCERS, IMAGE=image, RETENTION_FILE=rules)
    if not image_is_there(image):
        project.compose("build", "controller", limit=BUILD_LIMIT_SECONDS)
    try:
        project.compose("up", "-d", "--no-build", "--wait", "store", limit=UP_LIMIT_SECONDS)
        project.deckhands("key", "add", "first", "--tenant", "nobody")  # the gateway starts with one
        project.compose(
            *("up", "-d", "--no-build", "--wait", "--scale", "controller=2", "--scale", "tools=2"),
            *STAYING,
            limit=UP_LIMIT_SECONDS,
        )
        yield project
    finally:
        project.down()


def test_every_service_is_healthy_and_nobody_is_root(project: Project) -> None:
    counts = {name: len(project.containers(name)) for name in STAYING}
    assert counts == {name: 2 if name in ("controller", "tools") else 1 for name in STAYING}
    for name in STAYING:
        for container in project.containers(name):
            assert docker("inspect", "-f", "{{.State.Health.Status}}", container) == "healthy"
            assert docker("exec", container, "id", "-u") == "10001"
            written = subprocess.run(["docker", "exec", container, "touch", "/opt/x"], check=False, capture_output=True)
            assert b"Read-only file system" in written.stderr


def test_a_conversation_is_carried_out(project: Project) -> None:
    conversation_id = project.submit("short")
    project.deckhands("logs", "-f", conversation_id)
    observations = [
        (event["kind"], event["content"].strip())
        for event in project.events(conversation_id)
        if event["kind"] in ("observation.run", "observation.error", "observation.outcome_unknown")
    ]
    assert observations == [("observation.run", ""), ("observation.run", "one")]


def test_a_conversation_reaches_nothing_but_its_workspace(project: Project) -> None:
    conversation_id = project.submit("prying")
    project.deckhands("logs", "-f", conversation_id)
    assert outputs(project.events(conversation_id)) == [
        "1000",
        "0",
        "ls: cannot access '/var/lib/deckhands': No such file or directory",
        "no way to the store",
        "no namespaces",
        "no kernel settings",
    ]
    held = "the sandbox is bwrap; commands of agents reach their own workspace"
    assert project.compose("logs", "tools").count(held) == 2


def test_a_secret_is_for_the_commands_that_name_it(project: Project) -> None:
    run = ("run", "--rm", "-T", "-e", "API_TOKEN=correct-horse-battery", "cli")
    model = ("--model", "scripted//scripts/secret.json")
    conversation_id = project.compose(*run, "submit", "-t", "do it", *model, "--secret", "API_TOKEN").split()[-1]
    project.deckhands("logs", "-f", conversation_id)
    assert outputs(project.events(conversation_id)) == ["the token is <secret_hidden>", "21", "0"]


async def test_killed_containers_lose_nothing(project: Project) -> None:
    conversation_id = project.submit("long")

    def at_work() -> list[str]:
        return [one for one in project.containers("tools") if "sleep 600" in docker("top", one, "-eo", "pid,cmd")]

    await until(at_work, limit=LIMIT_SECONDS, what="tool worker that sleeps")
    (tools,) = at_work()
    store = project.containers("store")[0]
    owner = docker("exec", store, "python", "-c", OWNER, conversation_id).split("-")[1]
    (controller,) = [one for one in project.containers("controller") if one.startswith(owner)]
    docker("kill", "-s", "KILL", tools, controller)
    try:
        project.deckhands("logs", "-f", conversation_id)
        events = project.events(conversation_id)
        assert outputs(events) == ["", "began"]
        assert [event["kind"] for event in events].count("observation.outcome_unknown") == 1
        assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    finally:
        docker("start", tools, controller)
        for container in (tools, controller):
            await until_health(container, "healthy")


async def test_a_worker_that_hangs_is_unhealthy(project: Project) -> None:
    container = project.containers("tools")[0]
    # The worker itself, not the init before it, nor the workspace hosts, nor this shell.
    worker = r"""for p in /proc/[0-9]*; do case $(tr '\0' ' ' <$p/cmdline) in /opt/*' -m tool_worker '*) echo ${p#/proc/}; esac; done"""
    pid = docker("exec", container, "sh", "-c", worker)
    docker("exec", container, "sh", "-c", f"kill -STOP {pid}")
    try:
        await until_health(container, "unhealthy")
    finally:
        docker("exec", container, "sh", "-c", f"kill -CONT {pid}")
    await until_health(container, "healthy")


async def test_flower_wants_the_password_and_lists_every_kind_of_worker(project: Project) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{project.flower_port}", timeout=LIMIT_SECONDS) as flower:
        for login in (None, ("deckhands", "wrong")):
            assert (await flower.get("/api/workers", auth=login)).status_code == 401

        async def roles() -> list[str]:
            login = ("deckhands", project.passwords["FLOWER"])
            answer = await flower.get("/api/workers", params={"refresh": "1"}, auth=login)
            return sorted(name.partition("-")[0] for name, about in answer.json().items() if "stats" in about)

        async def all_are_listed() -> bool:
            found = await roles()
            return all(
                found.count(role) >= count
                for role, count in (("controller", 2), ("tool", 2), ("ingress", 1), ("jobs", 1))
            )

        await until(all_are_listed, limit=LIMIT_SECONDS, what="all workers in Flower")


async def test_an_agent_is_a_celery_task_of_an_application_outside(project: Project) -> None:
    address = f"127.0.0.1:{project.queue_port}/0"
    nobody = Celery("shop", broker=f"redis://:wrong@{address}", set_as_current=False)
    with pytest.raises(OperationalError, match="username-password pair"):
        nobody.send_task("deckhands.run", ["do it"], queue="deckhands", retry=False)
    sent = producer(project).send_task(
        "deckhands.run", ["do it"], {"model": "scripted//scripts/short.json"}, queue="deckhands"
    )
    summary = await asyncio.to_thread(sent.get, timeout=LIMIT_SECONDS)
    assert (summary["state"], summary["message"]) == ("finished", "done")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{project.flower_port}", timeout=LIMIT_SECONDS) as flower:

        async def is_shown() -> bool:
            answer = await flower.get("/api/tasks", auth=("deckhands", project.passwords["FLOWER"]))
            shown = answer.json().get(sent.id, {})
            return (shown.get("name"), shown.get("state")) == ("deckhands.run", "SUCCESS")

        await until(is_shown, limit=LIMIT_SECONDS, what="the agent's task in Flower")


async def test_a_conversation_leaves_for_the_archive_by_a_rule(project: Project) -> None:
    conversation_id = project.submit("short", "--label", "stays=no")
    await until(
        lambda: not project.listed("stays=no"), limit=LIMIT_SECONDS, what="conversation that has left the store"
    )
    assert outputs(project.events(conversation_id)) == ["", "one"]  # read in the archive
    jobs = project.containers("jobs")[0]
    found = json.loads(docker("exec", jobs, "python3", "-c", ARCHIVED, conversation_id))
    assert found == {"state": "finished", "wrong": [], "events": len(project.events(conversation_id))}


async def test_a_schedule_begins_conversations(project: Project) -> None:
    task = ("--cron", "* * * * *", "-t", "do it", "--model", "scripted//scripts/short.json")
    project.deckhands("schedule", "add", "each-minute", *task)

    def finished() -> list[str]:
        return [one for one, state in project.listed("schedule=each-minute") if state == "finished"]

    await until(finished, limit=LIMIT_SECONDS, what="conversation of the schedule")
    project.deckhands("schedule", "rm", "each-minute")
    assert outputs(project.events(finished()[0])) == ["", "one"]


async def test_flower_shows_an_agent_as_a_task_in_a_browser(project: Project) -> None:
    if not CHROMIUM:
        pytest.skip("no Chromium here")
    options = {"model": "scripted//scripts/secret.json", "secrets": {"API_TOKEN": "correct-horse-battery"}}
    sent = producer(project).send_task("deckhands.run", ["do it " * 100], options, queue="deckhands")
    assert (await asyncio.to_thread(sent.get, timeout=LIMIT_SECONDS))["state"] == "finished"
    flower = f"http://127.0.0.1:{project.flower_port}"
    async with opened(f"{flower}/tasks", login=("deckhands", project.passwords["FLOWER"])) as page:
        await page.locator(f"#tasks-table a[href$='{sent.id}']").wait_for()
        row = await page.locator("#tasks-table tr", has_text=sent.id).inner_text()
        assert "deckhands.run" in row
        await page.goto(f"{flower}/task/{sent.id}")
        text = await page.locator("body").inner_text()
        assert re.search(r"Status\s+SUCCESS", text)
        assert re.search(r"Name\s+deckhands.run", text)
        assert "do it do it" in text
        assert "do it " * 50 not in text
        assert "correct-horse-battery" not in await page.content()
        assert "&lt;secret_hidden&gt;" in await page.content()
        await page.screenshot(path=project.folder / "flower-task.png")
        await page.goto(f"{flower}/workers")
        await page.get_by_text("ingress-").first.wait_for()


async def test_services_that_are_stopped_and_started_lose_nothing(project: Project) -> None:
    project.compose("stop", "ingress", "jobs", "beat")
    model = {"model": "scripted//scripts/short.json"}
    sent = [producer(project).send_task("deckhands.run", ["do it"], model, queue="deckhands").id for _ in range(3)]
    at_work = project.submit("long", "--label", "restarted=yes")
    project.compose("restart", "store", "queue")
    project.compose("up", "-d", "--no-recreate", "--no-deps", "--wait", "store", "queue", limit=UP_LIMIT_SECONDS)
    app = producer(project)
    assert [app.AsyncResult(one).state for one in sent] == ["PENDING"] * 3
    project.compose(
        "up", "-d", "--no-recreate", "--no-deps", "--wait", "ingress", "jobs", "beat", limit=UP_LIMIT_SECONDS
    )
    for one in sent:
        summary = await asyncio.to_thread(app.AsyncResult(one).get, timeout=LIMIT_SECONDS)
        assert (summary["state"], summary["message"]) == ("finished", "done")
    project.deckhands("cancel", at_work)
    stopped = [(at_work, "stopped")]
    await until(
        lambda: project.listed("restarted=yes") == stopped, limit=LIMIT_SECONDS, what="the end of what was at work"
    )
    events = project.events(at_work)
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))


async def test_gateway_requires_a_key_and_logs_in_as_itself(project: Project) -> None:
    (container,) = project.containers("gateway")
    assert "User gateway has no permissions" in docker("exec", container, "python", "-c", REFUSED)
    networks = json.loads(docker("inspect", "-f", "{{json .NetworkSettings.Networks}}", container))
    assert {name.removeprefix(f"{project.folder.name}_") for name in networks} == {"inside", "web"}
    mine, other = ({"Authorization": f"Bearer {api_key(project, tenant)}"} for tenant in ("acme", "rival"))
    request = {"task": "do it", "model": "scripted//scripts/short.json", "labels": {"stays": "no"}}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{project.gateway_port}", timeout=LIMIT_SECONDS) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/runs/wait", json=request)).status_code == 401
        answer = await client.post("/runs/wait", json=request, headers=mine)
        assert answer.status_code == 200, answer.text
        assert answer.json()["summary"]["state"] == "finished"
        path = f"/conversations/{answer.json()['conversation_id']}"
        assert (await client.get(path, headers=other)).status_code == 404
        await until(lambda: not project.listed("stays=no"), limit=LIMIT_SECONDS, what="conversation in the archive")
        archived = await client.get(f"{path}/events", headers=mine)
        assert outputs(archived.json()["events"]) == ["", "one"]


def producer(project: Project) -> Celery:
    """Return an application outside, which has nothing of Deckhands but the address of the queue."""
    url = f"redis://producer:{project.passwords['PRODUCER']}@127.0.0.1:{project.queue_port}/0"
    return Celery("shop", broker=url, backend=url, set_as_current=False)


def api_key(project: Project, tenant: str) -> str:
    made = project.deckhands("key", "add", "trial", "--tenant", tenant, "--scope", "read", "--scope", "write", "--json")
    token: str = json.loads(made)["token"]
    return token


@pytest.fixture(scope="module")
def sdk_project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A controller whose image has the SDK, and a tool worker."""
    if not engine_answers():
        pytest.skip("no docker engine with compose answers here")
    image = os.environ.get("CLAUDE_IMAGE", "deckhands-claude:latest")
    project = project_in(tmp_path_factory.mktemp("deckhands-claude"), CLAUDE, CLAUDE_IMAGE=image)
    if not image_is_there(image):
        project.compose("build", "controller", "tools", limit=BUILD_LIMIT_SECONDS)
    try:
        project.compose("up", "-d", "--no-build", "--wait", "controller", "tools", limit=UP_LIMIT_SECONDS)
        yield project
    finally:
        project.down()


def test_an_sdk_agent_is_carried_out_in_its_sandbox(sdk_project: Project) -> None:
    conversation_id = sdk_project.submit("short", "--agent", "CodeActAgentSDK")
    sdk_project.deckhands("logs", "-f", conversation_id)
    kinds = [event["kind"] for event in sdk_project.events(conversation_id)]
    assert kinds.count("model.reply") == 3
    assert "conversation.changed" not in kinds  # no legacy agent has helped
    (controller,) = sdk_project.containers("controller")
    assert docker("exec", controller, "printenv", "DECKHANDS_SDK_SANDBOX") == "bwrap"
    assert "the SDK starts" in sdk_project.compose("logs", "controller")


@pytest.fixture(scope="module")
def chaos_project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A cluster whose workers share their process ids."""
    if not engine_answers():
        pytest.skip("no docker engine with compose answers here")
    image = os.environ.get("IMAGE", "deckhands:latest")
    project = project_in(tmp_path_factory.mktemp("deckhands-chaos"), CHAOS, IMAGE=image)
    if not image_is_there(image):
        project.compose("build", "controller", limit=BUILD_LIMIT_SECONDS)
    try:
        scale = ("--scale", "controller=2", "--scale", "tools=2")
        services = ("controller", "tools", "ingress", "jobs", "beat")
        project.compose("up", "-d", "--no-build", "--wait", *scale, *services, limit=UP_LIMIT_SECONDS)
        yield project
    finally:
        project.down()


def test_chaos_kills_and_stops_workers_of_other_containers(chaos_project: Project) -> None:
    options = ("--duration", "60s", "--every", "4s", "--conversations", "4", "--json")
    printed = chaos_project.compose("run", "--rm", "-T", "chaos", *options, limit=UP_LIMIT_SECONDS)
    report = json.loads(printed.splitlines()[-1])
    assert report["holds"], report["findings"]
    kinds = {fault["kind"] for fault in report["faults"]}
    assert {"kill", "stop", "disconnect", "pause", "memory", "store"} <= kinds, report
    roles = {fault["target"].partition("-")[0] for fault in report["faults"] if fault["kind"] in ("kill", "stop")}
    assert len(roles) >= 2
    assert report["effects"]["lost"] == report["effects"]["doubled"] == 0
    assert report["effects"]["done"] > 0
    assert set(report["not_tried"]) >= {"delay", "partition", "clock", "disk", "failover"}
