"""One task through the stream contract, with redis-py: `python inbox.py redis://127.0.0.1:6379/0 "List the files"`.

docs/producing-work.md describes the contract.
"""

from __future__ import annotations

import json
import os
import sys
import uuid

import redis


def main(address: str, task: str) -> int:
    """Send a task, print each answer, and end when the agent has."""
    store = redis.Redis.from_url(address, decode_responses=True)
    # The same id sent again is the same task; an id must be known before the entry is sent.
    request = {"id": str(uuid.uuid4()), "task": task, "model": os.environ.get("MODEL")}
    name = f"example-{request['id']}"
    store.xadd("deck:inbox", {"v": "1", "request": json.dumps(request), "reply_to": name})
    after = "0-0"
    while True:
        for _, entries in store.xread({f"deck:replies:{name}": after}, block=2_000) or []:
            for after, reply in entries:
                answer = json.loads(reply["json"])
                sys.stdout.write(f"{reply['event']} {answer.get('state', '')} {answer.get('message', '')}\n")
                if reply["event"] != "accepted":
                    return 0 if reply["event"] == "settled" else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
