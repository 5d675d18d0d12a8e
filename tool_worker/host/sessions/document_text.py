"""Prints the text of PDF pages: `document_text.py <folder of packages> <path> <first page> <last page>`.

It is a separate program because the PDF reader is not in the standard library, and because a hostile document may take
long.

Holds: its output is bounded, and starts with `ERROR:` if the document cannot be read.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

MAX_FILE_BYTES = 64 * 2**20
MAX_MEMORY_BYTES = 2**30
MAX_PRINTED_CHARS = 24_000


def main() -> None:
    """Print the pages; -1 as the last page means the end of the document."""
    packages, path, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    if packages:
        sys.path.append(packages)
    try:
        text = _pages(path, first, last)
    except ImportError:
        text = "ERROR: nothing here reads PDF files."
    except Exception as error:  # noqa: BLE001  (the edge of the program; the library raises many kinds)
        text = f"ERROR: it cannot be read: {type(error).__name__}: {str(error)[:300]}"
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))


def _pages(path: str, first: int, last: int) -> str:
    from pypdf import PdfReader

    if not Path(path).is_file() or Path(path).stat().st_size > MAX_FILE_BYTES:
        return f"ERROR: it is not a file of up to {MAX_FILE_BYTES >> 20} MiB."
    pages = PdfReader(path).pages
    count = len(pages)
    if not 1 <= first <= count or (last != -1 and last < first):
        return f"ERROR: it has the pages 1 to {count}; `view_range` names others."
    last = count if last == -1 else min(last, count)
    text = f"The text of {path}, {count} pages:\n"
    for number in range(first, last + 1):
        page = f"--- page {number} ---\n{pages[number - 1].extract_text().strip()}\n"
        if len(text) + len(page) > MAX_PRINTED_CHARS:
            room = MAX_PRINTED_CHARS - len(text)
            return f"{text}{page[:room]}\n[Cut here. Give `view_range` to see pages from {number} on.]"
        text += page
    return text


if __name__ == "__main__":
    main()
