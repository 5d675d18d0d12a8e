"""The session program that answers questions about the workspace's code; see `session_program`.

It is a separate program because reading a large workspace takes seconds, and the shell must stay responsive.

Holds: it changes nothing and runs nothing of the workspace. The map covers only files below its working directory;
`grep` and `glob` also follow paths that lead outside.
"""

from __future__ import annotations

import json
import os
import socket
import sys

if __name__ == "__main__":  # started by its path, with only the standard library
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from tool_worker.host.search.code_map import CodeMap
from tool_worker.host.search.code_questions import QuestionError, answered
from tool_worker.host.search.document_reading import pages_of
from tool_worker.host.search.file_check import problems_in
from tool_worker.host.search.file_search import SearchError, found_files, found_lines

SESSION_FD = 3
FILE_SEARCHES = {"grep": found_lines, "glob": found_files}

Result = dict[str, object]


def result_of(code: CodeMap, arguments: dict[str, object]) -> Result:
    """Return the result of one call."""
    question = arguments.get("question")
    asked = arguments.get("arguments")
    if not isinstance(question, str) or not isinstance(asked, dict):
        return {"content": "ERROR: the call names no question.", "is_error": True}
    try:
        if question in FILE_SEARCHES:
            return {"content": FILE_SEARCHES[question](asked, str(arguments.get("cwd") or code.root))}
        if question == "document":
            return {"content": pages_of(asked, sys.argv[1] if len(sys.argv) > 1 else "")}
        if question == "check":
            paths = asked.get("paths")
            return {"content": problems_in([str(path) for path in paths] if isinstance(paths, list) else [])}
        code.refresh()
        return {"content": answered(code, question, asked)}
    except (QuestionError, SearchError) as error:
        return {"content": str(error), "is_error": True}


def main() -> None:
    """Serve the workspace host that started this program until it closes the connection."""
    code = CodeMap(os.getcwd())
    with socket.socket(fileno=SESSION_FD) as line, line.makefile("rwb") as stream:
        for received in stream:
            message = json.loads(received)
            if "call" not in message:
                continue  # interrupts are ignored; the host kills a program that does not stop
            try:
                result = result_of(code, message["arguments"])
            except Exception as error:  # noqa: BLE001  (the edge of the program: a defect is the answer to this call)
                result = {"content": f"ERROR: {type(error).__name__}: {error}", "is_error": True}
            stream.write(json.dumps({"call": message["call"], "result": result}).encode("ascii") + b"\n")
            stream.flush()


if __name__ == "__main__":
    main()
