"""Reads documents that are not text files: the text of a PDF, extracted by a program with limits on time and memory.

Holds: if no PDF reader is available, the answer says so.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable

from tool_worker.host.search.file_search import SearchError
from tool_worker.host.search.limited_work import run_limited, run_program

LIMIT_SECONDS = 30.0
PROGRAM_SECONDS = 25.0
PROGRAM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "sessions", "document_text.py")
NO_READER = "the workspace has neither the package pypdf nor the program pdftotext"


def read_pages(arguments: dict[str, object], packages: str) -> str:
    """Return the text of pages.

    Args:
        arguments: `path` (absolute), and optionally `view_range`, the first and the last page, from 1.
        packages: The folder of the package pypdf; empty for Python's default path.

    Raises:
        SearchError: the document cannot be read; the text is for the model.
    """
    path = arguments.get("path")
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise SearchError(f"ERROR:\nInvalid `path` parameter: {path!r}. The path should be an absolute path.")
    if not os.path.isfile(path):
        raise SearchError(f"ERROR:\nThe path {path} is not a file. Please provide a valid path.")
    wanted = arguments.get("view_range") or [1, -1]
    if not (isinstance(wanted, list) and len(wanted) == 2 and all(type(page) is int for page in wanted)):
        raise SearchError("ERROR:\n`view_range` of a PDF is a list of its first and last page, such as [1, 5].")
    first, last = map(str, wanted)

    def work(write: Callable[[str], None]) -> None:
        text = _run_for_output([sys.executable, "-I", PROGRAM, packages, path, first, last])
        if (not text or "nothing here reads" in text[:80]) and shutil.which("pdftotext"):
            text = _run_for_output(
                ["pdftotext", "-layout", "-f", first, *(["-l", last] if last != "-1" else []), path, "-"]
            )
        write(text.strip() or f"ERROR: {NO_READER}, or it took too long.")

    text, _ = run_limited(LIMIT_SECONDS, work)
    if text.startswith("ERROR:"):
        raise SearchError(f"ERROR:\n{path}: {text.removeprefix('ERROR:').strip()}")
    return text


def _run_for_output(command: list[str]) -> str:
    ran = run_program(command, PROGRAM_SECONDS)  # the command is our own program or pdftotext
    return "" if ran is None else ran.stdout[:100_000].decode("utf-8", "replace")
