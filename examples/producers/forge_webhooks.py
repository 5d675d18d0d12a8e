"""Webhooks of GitHub and GitLab as tasks and messages: `python forge_webhooks.py forge.toml`.

An issue whose text names the agent starts a conversation; each later comment on it is a message to the agent. A comment
that names the agent starts one, too. docs/producing-work.md describes the file.

Holds: nothing is read of a request before its signature or token is verified. Only listed repositories and people are
served. The ids in the verified body are the idempotency keys, so a delivery that is sent again, by the forge or by a
thief under another delivery id, has no second effect.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from deckhands import Client, DeckhandsError, TaskSpec, UsageError

MAX_BODY_BYTES = 1_000_000
MAX_TEXT_CHARS = 50_000


@dataclass(frozen=True)
class Forge:
    """What the file says about one forge.

    Attributes:
        secret: the webhook's secret (GitHub) or token (GitLab).
        repositories: the full names of those that may start conversations.
        people: the accounts whose issues and comments are taken.
        mention: the word that addresses the agent.
        task: further fields of a task, as in docs/tasks.md; `{repository}` in its workspace stands for the repository.
    """

    name: str
    secret: str
    repositories: frozenset[str]
    people: frozenset[str]
    mention: str
    task: Mapping[str, Any]


@dataclass(frozen=True)
class Said:
    """What a person has written on an issue, a pull request or a merge request.

    Attributes:
        key: names this text for ever, so that it is taken once.
        number: of the issue or request, with its kind, such as `issues/7`.
        opening: the title and the text of the issue or request itself.
        text: the comment; empty: the issue has just been opened.
    """

    key: str
    repository: str
    number: str
    person: str
    title: str
    opening: str
    text: str

    def conversation_id(self, forge: Forge) -> str:
        """Return the id of the conversation about this issue."""
        thread = f"{forge.name}/{self.repository}/{self.number}"
        return f"{forge.name}-{hashlib.sha256(thread.encode()).hexdigest()[:32]}"


def is_signed_by_github(secret: str, body: bytes, signature: str) -> bool:
    """Return whether `X-Hub-Signature-256` belongs to the body."""
    expected = "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    return hmac.compare_digest(expected.encode(), signature.encode())


def read_github(event: str, body: Mapping[str, Any]) -> Said | None:
    """Return what a person has written; None: the event is about something else."""
    if (event, body.get("action")) not in (("issues", "opened"), ("issue_comment", "created")):
        return None
    issue, comment = body["issue"], body.get("comment")
    if body["sender"]["type"] != "User":
        return None  # a program that answers a program would never end
    return Said(
        key=f"comment-{comment['id']}" if comment else f"issue-{issue['id']}",
        repository=body["repository"]["full_name"],
        number=f"issues/{issue['number']}",  # pull requests have numbers of issues
        person=(comment or issue)["user"]["login"],
        title=issue["title"],
        opening=issue["body"] or "",
        text=comment["body"] if comment else "",
    )


def read_gitlab(event: str, body: Mapping[str, Any]) -> Said | None:
    """Return what a person has written; None: the event is about something else."""
    about = body.get("object_attributes", {})
    if event == "Issue Hook" and about.get("action") == "open":
        subject, text = about, ""
    elif event == "Note Hook" and about.get("action", "create") == "create" and not about.get("system"):
        found = body.get("issue") or body.get("merge_request")
        if found is None:
            return None
        subject, text = found, about["note"]
    else:
        return None
    kind = "merge_requests" if "merge_request" in body else "issues"
    return Said(
        key=f"note-{about['id']}" if text else f"issue-{about['id']}",
        repository=body["project"]["path_with_namespace"],
        number=f"{kind}/{subject['iid']}",
        person=body["user"]["username"],
        title=subject["title"],
        opening=subject["description"] or "",
        text=text,
    )


READERS = {"github": read_github, "gitlab": read_gitlab}


async def take(client: Client, forge: Forge, said: Said) -> dict[str, str]:
    """Start a conversation, or send a message to one; return what was done."""
    if said.repository not in forge.repositories:
        return {"ignored": "the repository is not listed"}
    if said.person not in forge.people:
        return {"ignored": "the person is not listed"}
    conversation_id = said.conversation_id(forge)
    message = f"{said.person} comments:\n\n{said.text[:MAX_TEXT_CHARS]}"
    if forge.mention in (said.text or f"{said.title}\n{said.opening}"):
        task = f"{said.title}\n\n{said.opening[:MAX_TEXT_CHARS]}" + (f"\n\n{message}" if said.text else "")
        try:
            spec = make_task(forge, said, task)
            # Sent again, it is the same conversation: the key is that of its first delivery.
            await client.submit(spec, conversation_id=conversation_id, idempotency_key=said.key)
        except UsageError:
            if not await client.exists(conversation_id):
                raise
        else:
            return {"conversation": conversation_id}
    elif not said.text or not await client.exists(conversation_id):
        return {"ignored": f"it does not name {forge.mention}"}
    if not said.text:
        return {"ignored": "a comment has started its conversation"}
    await client.send_message(conversation_id, message, idempotency_key=said.key)
    return {"message": conversation_id}


def make_task(forge: Forge, said: Said, task: str) -> TaskSpec:
    """Return the task of a conversation. The repository's address comes from the file, and not from the delivery."""
    fields = dict(forge.task)
    if isinstance(fields.get("workspace"), str):
        fields["workspace"] = fields["workspace"].replace("{repository}", said.repository)
    named = {"task": task, "title": said.title[:100], "labels": {"forge": forge.name}, "headless": False}
    return TaskSpec.parse({**named, **fields})


def make_app(forges: Mapping[str, Forge], address: str | None) -> Starlette:
    """Return the application; it finds the cluster as `Client.connect` does."""

    @asynccontextmanager
    async def connected(app: Starlette) -> AsyncIterator[None]:
        async with await Client.connect(address) as client:
            app.state.client = client
            yield

    async def deliver(request: Request) -> JSONResponse:
        forge = forges.get(request.path_params["forge"])
        if forge is None:
            return JSONResponse({"error": "there is no such forge"}, 404)
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return JSONResponse({"error": "the delivery is too large"}, 413)
        if forge.name == "github":
            is_genuine = is_signed_by_github(forge.secret, body, request.headers.get("X-Hub-Signature-256", ""))
        else:
            given = request.headers.get("X-Gitlab-Token", "")
            is_genuine = hmac.compare_digest(forge.secret.encode(), given.encode())
        if not is_genuine:
            return JSONResponse({"error": "the signature or the token is wrong"}, 401)
        event = request.headers.get("X-GitHub-Event") or request.headers.get("X-Gitlab-Event", "")
        try:
            said = READERS[forge.name](event, json.loads(body))
            done = (
                {"ignored": f"the event {event}"} if said is None else await take(request.app.state.client, forge, said)
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return JSONResponse({"error": f"the delivery has another form: {type(error).__name__}"}, 400)
        except UsageError as error:
            return JSONResponse({"error": str(error)}, 422)
        except DeckhandsError as error:  # the forge shows it, and sends the delivery again when asked to
            return JSONResponse({"error": str(error)}, 503)
        return JSONResponse(done, 202)

    return Starlette(routes=[Route("/{forge}", deliver, methods=["POST"])], lifespan=connected)


def read_forges(tables: Mapping[str, Any]) -> dict[str, Forge]:
    """Return the forges of the file; their secrets are in the environment."""
    found = {}
    for name in READERS.keys() & tables.keys():
        table = tables[name]
        secret = os.environ.get(table["secret_variable"], "")
        if len(secret) < 16:
            sys.exit(f"Set {table['secret_variable']} to the secret of the webhook, 16 characters or more.")
        people, repositories = frozenset(table["people"]), frozenset(table["repositories"])
        found[name] = Forge(
            name, secret, repositories, people, table.get("mention", "@deckhands"), table.get("task", {})
        )
    return found


def main(file: str) -> None:
    """Serve until the program is stopped."""
    tables = tomllib.loads(Path(file).read_text("utf-8"))
    host, _, port = tables.get("listen", "127.0.0.1:8099").rpartition(":")
    app = make_app(read_forges(tables), os.environ.get("DECKHANDS_URL"))
    uvicorn.run(app, host=host, port=int(port), log_level="info")


if __name__ == "__main__":
    main(sys.argv[1])
