"""The example that turns webhooks of GitHub and GitLab into tasks and messages, on a cluster of real workers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from broker.contract.actions import MessageAction
from tests.faults.harness import FaultCluster
from tests.ingress_parts import all_present, saying
from tests.polling import until
from tests.source_code import ROOT

PROGRAM = ROOT / "examples" / "producers" / "forge_webhooks.py"
SECRET, TOKEN = "a-secret-of-github", "a-token-of-gitlab"
LIMIT_SECONDS = 120.0
ADDRESS = re.compile(r"running on (http://\S+)")


class Receiver:
    """The program, and the forges that send deliveries to it."""

    def __init__(self, cluster: FaultCluster, url: str, http: httpx2.AsyncClient) -> None:
        self.cluster, self.url, self.http = cluster, url, http

    async def github(
        self, event: str, body: Any, *, secret: str = SECRET, delivery: str = "d-1", **headers: str | bytes
    ) -> httpx2.Response:
        """Send a delivery as GitHub does."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        signature = "sha256=" + hmac.new(secret.encode(), content, hashlib.sha256).hexdigest()
        named = {"X-GitHub-Event": event, "X-GitHub-Delivery": delivery, "X-Hub-Signature-256": signature, **headers}
        return await self.http.post(f"{self.url}/github", content=content, headers=named)

    async def gitlab(self, event: str, body: Any, *, token: str = TOKEN) -> httpx2.Response:
        """Send a delivery as GitLab does."""
        headers = {"X-Gitlab-Event": event, "X-Gitlab-Token": token, "X-Gitlab-Event-UUID": "u-1"}
        return await self.http.post(f"{self.url}/gitlab", json=body, headers=headers)

    async def settle(self, conversation_id: str) -> list[str]:
        """Wait until a conversation has settled, and return the texts of its users."""
        client = self.cluster.client
        await client.wait_until_settled(conversation_id, timeout_seconds=LIMIT_SECONDS)
        events = await client.events(conversation_id)
        return [event.content for event in events if isinstance(event, MessageAction) and event.source == "user"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def receiver(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Receiver]:
    root = tmp_path_factory.mktemp("forge")
    model = root / "model.json"
    model.write_text(json.dumps({"turns": saying("Done.") * 20}))
    task = {"model": f"scripted/{model}", "agent": {"enable_workspace_skills": False}}
    (root / "forge.toml").write_text(f"""
listen = "127.0.0.1:0"

[github]
secret_variable = "GITHUB_SECRET"
repositories = ["acme/shop"]
people = ["alice"]
task = {{ model = "{task["model"]}", agent = {{ enable_workspace_skills = false }} }}

[gitlab]
secret_variable = "GITLAB_TOKEN"
repositories = ["acme/tools/shop"]
people = ["alice"]
mention = "@bot"
task = {{ model = "{task["model"]}", agent = {{ enable_workspace_skills = false }} }}
""")
    async with FaultCluster(root).running() as cluster, httpx2.AsyncClient(timeout=LIMIT_SECONDS) as http:
        cluster.start_controller()
        await all_present(cluster)
        env = {**os.environ, "DECKHANDS_URL": cluster.store.url, "GITHUB_SECRET": SECRET, "GITLAB_TOKEN": TOKEN}
        log = root / "receiver.log"
        with (
            log.open("wb") as output,
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(root / "forge.toml")],
                env=env,
                cwd=root,
                stderr=output,
                stdout=output,
            ) as program,
        ):
            try:
                await until(lambda: ADDRESS.search(log.read_text()), what="the address of the receiver")
                yield Receiver(cluster, ADDRESS.findall(log.read_text())[0], http)
            finally:
                program.terminate()


def issue_event(number: int, body: str | None = "Please fix it, @deckhands.", login: str = "alice") -> dict[str, Any]:
    """The part of GitHub's event `issues` that is read."""
    user = {"login": login, "id": 1, "type": "User"}
    issue = {"id": 9_000 + number, "number": number, "title": f"Prices are wrong {number}", "body": body, "user": user}
    repository = {"id": 5, "full_name": "acme/shop", "default_branch": "main"}
    return {"action": "opened", "issue": issue, "repository": repository, "sender": user}


def comment_event(number: int, comment_id: int, text: str, login: str = "alice") -> dict[str, Any]:
    """The part of GitHub's event `issue_comment` that is read."""
    user = {"login": login, "id": 1, "type": "User"}
    event = issue_event(number)
    comment = {"id": comment_id, "body": text, "user": user}
    return {**event, "action": "created", "comment": comment, "sender": user}


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_issue_is_a_task_and_its_comment_a_message(receiver: Receiver) -> None:
    opened = await receiver.github("issues", issue_event(1))
    assert opened.status_code == 202, opened.text
    conversation_id = opened.json()["conversation"]
    assert await receiver.settle(conversation_id) == ["Prices are wrong 1\n\nPlease fix it, @deckhands."]
    commented = await receiver.github("issue_comment", comment_event(1, 70, "In euros, too."))
    assert commented.json() == {"message": conversation_id}
    assert (await receiver.settle(conversation_id))[1:] == ["alice comments:\n\nIn euros, too."]


async def test_repeated_delivery_has_no_second_effect(receiver: Receiver) -> None:
    first = await receiver.github("issues", issue_event(2))
    again = await receiver.github("issues", issue_event(2))
    thief = await receiver.github("issues", issue_event(2), delivery="another-id")
    assert first.json() == again.json() == thief.json()
    for delivery in ("c-1", "c-1", "forged"):
        await receiver.github("issue_comment", comment_event(2, 80, "Hurry."), delivery=delivery)
    texts = await receiver.settle(first.json()["conversation"])
    assert len(texts) == 2


async def test_comment_that_names_the_agent_starts_it(receiver: Receiver) -> None:
    assert "does not name" in (await receiver.github("issues", issue_event(3, "Broken."))).json()["ignored"]
    assert "does not name" in (await receiver.github("issue_comment", comment_event(3, 90, "Yes."))).json()["ignored"]
    events = [comment_event(3, number, "@deckhands fix it") for number in (91, 91, 92)]
    answers = await asyncio.gather(*(receiver.github("issue_comment", event) for event in events))
    (conversation_id,) = {found for answer in answers for found in answer.json().values()}
    answers += [await receiver.github("issue_comment", events[0])]
    assert {answer.status_code for answer in answers} == {202}
    texts = await receiver.settle(conversation_id)
    assert len(texts) == 2
    assert all(text.endswith("alice comments:\n\n@deckhands fix it") for text in texts)


@pytest.mark.parametrize(
    ("event", "body", "reason"),
    [
        ("issues", issue_event(4, login="mallory"), "the person is not listed"),
        ("issues", {**issue_event(4), "repository": {"full_name": "mallory/shop"}}, "the repository is not listed"),
        ("issues", {**issue_event(4), "action": "edited"}, "the event issues"),
        ("issues", {**issue_event(4), "sender": {"login": "alice", "type": "Bot"}}, "the event issues"),
        ("ping", {"zen": "Keep it simple.", "hook_id": 1}, "the event ping"),
    ],
)
async def test_what_is_not_listed_is_ignored(receiver: Receiver, event: str, body: Any, reason: str) -> None:
    answer = await receiver.github(event, body)
    assert (answer.status_code, answer.json()) == (202, {"ignored": reason})


async def test_unsigned_delivery_is_refused_unread(receiver: Receiver) -> None:
    count = len(await receiver.cluster.client.recent())
    wrong = await receiver.github("issues", issue_event(5), secret="another-secret-1")
    none = await receiver.github("issues", issue_event(5), **{"X-Hub-Signature-256": ""})
    odd = await receiver.github("issues", issue_event(5), **{"X-Hub-Signature-256": b"sha256=\xc3\xa9"})
    tampered = await receiver.github("issues", b"not JSON", secret="another-secret-1")
    gitlab = await receiver.gitlab("Issue Hook", gitlab_issue(5), token="wrong")
    assert {answer.status_code for answer in (wrong, none, odd, tampered, gitlab)} == {401}
    assert len(await receiver.cluster.client.recent()) == count


async def test_malformed_and_large_deliveries_are_answered(receiver: Receiver) -> None:
    assert (await receiver.github("issues", b"not JSON")).status_code == 400
    assert (await receiver.github("issues", {"action": "opened"})).status_code == 400
    assert (await receiver.github("issues", b"[1]")).status_code == 400
    assert (await receiver.github("issues", issue_event(6, "x" * 1_000_001))).status_code == 413
    assert (await receiver.http.post(f"{receiver.url}/other", content=b"{}")).status_code == 404


def gitlab_issue(number: int) -> dict[str, Any]:
    """The part of GitLab's `Issue Hook` that is read."""
    issue = {"id": 300 + number, "iid": number, "title": "Prices", "description": "Fix them, @bot.", "action": "open"}
    return {
        "object_kind": "issue",
        "user": {"username": "alice"},
        "project": {"path_with_namespace": "acme/tools/shop"},
        "object_attributes": issue,
    }


async def test_gitlab_issue_and_note(receiver: Receiver) -> None:
    opened = await receiver.gitlab("Issue Hook", gitlab_issue(7))
    conversation_id = opened.json()["conversation"]
    assert await receiver.settle(conversation_id) == ["Prices\n\nFix them, @bot."]
    note = {
        **gitlab_issue(7),
        "object_kind": "note",
        "object_attributes": {"id": 900, "note": "And taxes.", "noteable_type": "Issue", "system": False},
        "issue": {"id": 307, "iid": 7, "title": "Prices", "description": "Fix them, @bot."},
    }
    for _ in range(2):
        assert (await receiver.gitlab("Note Hook", note)).json() == {"message": conversation_id}
    assert (await receiver.settle(conversation_id))[1:] == ["alice comments:\n\nAnd taxes."]
    request = {"id": 5, "iid": 7, "title": "Merge", "description": None}
    on_request = {**note, "issue": None, "merge_request": request}
    on_request["object_attributes"] = {"id": 901, "note": "@bot look", "system": False}
    started = await receiver.gitlab("Note Hook", on_request)
    assert started.json()["conversation"] != conversation_id


async def test_signature_is_that_of_githubs_documentation() -> None:
    described = importlib.util.spec_from_file_location("forge_webhooks", PROGRAM)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    sys.modules["forge_webhooks"] = module
    described.loader.exec_module(module)
    signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    secret = "It's a Secret to Everybody"
    assert module.is_signed_by_github(secret, b"Hello, World!", signature)
    assert not module.is_signed_by_github(secret, b"Hello, World?", signature)
