"""A program that speaks to a controller worker as the SDK's does, without the SDK.

`sdk_stand_in.py HABIT [HEARD] DESCRIPTOR`; HEARD is a file to which it adds each line that reaches it.

Habits: `obedient` acts as the SDK does; `silent` reads and writes nothing; `dying` ends at its first query; `nonsense`
writes invalid JSON; `idle` ends each turn without a model call; `missing` says that the SDK is not installed; `refused`
says that the provider has refused its key.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

FAILURES = {"missing": "ModuleNotFoundError", "refused": "authentication_failed"}


def main(habit: str, heard: str, descriptor: int) -> None:
    with (
        socket.socket(fileno=descriptor) as connection,
        connection.makefile("r", encoding="utf-8") as lines,
        Path(heard).open("a", encoding="utf-8") as record,
    ):

        def say(**line: Any) -> None:
            connection.sendall(json.dumps(line).encode() + b"\n")

        asked, waits_for, replies, results = 0, [], [], {}
        is_in_turn = False
        for text in lines:
            record.write(text)
            record.flush()
            line = json.loads(text)
            if "query" in line:
                match habit:
                    case "dying":
                        return
                    case "nonsense":
                        connection.sendall(b"no JSON\n")
                    case "idle":
                        say(ended="success", is_error=False, text="")
                    case "missing" | "refused":
                        say(failed={"error": FAILURES[habit], "text": "said the stand-in", "stderr": ""})
                    case "obedient":
                        is_in_turn, asked = True, asked + 1
                        say(asks=asked)
            elif "reply" in line:
                replies.append(line["reply"])
            elif "result" in line:
                results[line["result"]["id"]] = line["result"]
            while habit == "obedient" and is_in_turn:
                if waits_for:
                    if waits_for[0] not in results:
                        break
                    waits_for.pop(0)
                    if waits_for:
                        say(calls=waits_for[0])
                    else:
                        asked += 1
                        say(asks=asked)
                elif replies:
                    waits_for = [call["id"] for call in replies.pop(0)["calls"]]
                    if waits_for:
                        say(calls=waits_for[0])
                    else:
                        is_in_turn = False
                        say(ended="success", is_error=False, text="")
                else:
                    break


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 3 else os.devnull, int(sys.argv[-1]))
