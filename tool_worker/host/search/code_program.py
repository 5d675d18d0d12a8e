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
from tool_worker.host.search.code_questions import QuestionError, answer_question
from tool_worker.host.search.document_reading import read_pages
from tool_worker.host.search.file_check import find_problems
from tool_worker.host.search.file_search import SearchError, find_files, search_lines

SESSION_FD = 3
FILE_SEARCHES = {"grep": search_lines, "glob": find_files}

Result = dict[str, object]


def answer_call(code: CodeMap, arguments: dict[str, object]) -> Result:
    """Return the result of one call."""
    question = arguments.get("question")
    asked = arguments.get("arguments")
    if not isinstance(question, str) or not isinstance(asked, dict):
        return {"content": "ERROR: the call names no question.", "is_error": True}
    try:
        if question in FILE_SEARCHES:
            return {"content": FILE_SEARCHES[question](asked, str(arguments.get("cwd") or code.root))}
        if question == "document":
            return {"content": read_pages(asked, sys.argv[1] if len(sys.argv) > 1 else "")}
        if question == "check":
            paths = asked.get("paths")
            return {"content": find_problems([str(path) for path in paths] if isinstance(paths, list) else [])}
        code.refresh()
        return {"content": answer_question(code, question, asked)}
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
                result = answer_call(code, message["arguments"])
            except Exception as error:  # noqa: BLE001  (the edge of the program: a defect is the answer to this call)
                result = {"content": f"ERROR: {type(error).__name__}: {error}", "is_error": True}
            stream.write(json.dumps({"call": message["call"], "result": result}).encode("ascii") + b"\n")
            stream.flush()


if __name__ == "__main__":
    main()
