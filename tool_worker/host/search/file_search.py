"""Finds files by path (`glob`) and by content (`grep`), the most recently changed first.

Holds: time is bounded, whatever the pattern and the size of the tree. An answer is bounded and mentions omissions.
Links are not followed, and only regular files are read.
Does not: read hidden files and installed packages, unless `path` leads there; apply `.gitignore`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator

from tool_worker.host.search.code_files import LEFT_OUT
from tool_worker.host.search.limited_work import run_limited

LIMIT_SECONDS = 20.0
MAX_PATTERN_CHARS = 10_000
MAX_ENTRIES = 200_000
MAX_FILE_BYTES = 32 * 2**20
MAX_LISTED_FILES = 100
MAX_SHOWN_MATCHES = 200
MAX_ANSWER_CHARS = 24_000
MAX_LINE_CHARS = 300
MAX_CONTEXT_LINES = 10
BINARY_BEGINNING_BYTES = 8192

_PATTERN_SIGN = re.compile(r"\*\*/|\*\*|\*|\?|\[[!^]?\]?[^\]]{1,200}\]|\\.|.", re.DOTALL)
_SIGN_MEANINGS = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}

Arguments = dict[str, object]
Write = Callable[[str], None]


class SearchError(Exception):
    """A search that cannot be run; the text is for the model."""


def search_lines(arguments: Arguments, cwd: str, limit_seconds: float = LIMIT_SECONDS) -> str:
    """Search the contents of files.

    Args:
        arguments: `pattern`, a regular expression; optionally `path`, `include`, `context`, `case_sensitive`.
        cwd: The base of a relative `path`.

    Raises:
        SearchError: an argument is not valid.
    """
    pattern = _text(arguments, "pattern")
    tree = _FileTree(arguments, cwd, "include")
    context = arguments.get("context") or 0
    if not isinstance(context, int) or isinstance(context, bool) or not 0 <= context <= MAX_CONTEXT_LINES:
        raise SearchError(f"`context` is a number of lines from 0 to {MAX_CONTEXT_LINES}.")
    flags = 0 if arguments.get("case_sensitive") is True else re.IGNORECASE

    def work(write: Write) -> None:
        try:
            wanted = re.compile(pattern, flags)
        except (re.error, OverflowError, RecursionError) as error:
            write(f"ERROR: `pattern` is not a regular expression of Python's: {error}. Escape signs with a backslash.")
            return
        _MatchWriter(wanted, context, write).search(tree)

    return _answer(work, limit_seconds)


def find_files(
    arguments: Arguments, cwd: str, limit_seconds: float = LIMIT_SECONDS, *, max_entries: int = MAX_ENTRIES
) -> str:
    """Find files by path; the arguments are `pattern` and optionally `path`. Raises: see `search_lines`."""
    _text(arguments, "pattern")
    tree = _FileTree(arguments, cwd, "pattern", max_entries)

    def work(write: Write) -> None:
        paths = list(tree.files())
        write("\n".join(paths[:MAX_LISTED_FILES]) or "No file matches.")
        if len(paths) > MAX_LISTED_FILES:
            write(f"\n[{len(paths) - MAX_LISTED_FILES} more files match. Use a narrower pattern or `path`.]")
        write(tree.note)

    return _answer(work, limit_seconds)


def _answer(work: Callable[[Write], None], limit_seconds: float) -> str:
    text, is_whole = run_limited(limit_seconds, work)
    if text.startswith("ERROR: "):
        raise SearchError(text)
    if not is_whole:
        text = (
            f"{text}\n[The search was stopped after {limit_seconds:g} seconds; files that it had not reached are "
            "missing. Narrow `path` or `include`, or simplify the pattern.]"
        )
    return text.strip("\n")


class _FileTree:
    """The files below a path whose names match a pattern."""

    def __init__(self, arguments: Arguments, cwd: str, patterned: str, max_entries: int = MAX_ENTRIES) -> None:
        self.note = ""
        self._max_entries = max_entries
        self._shown = _text(arguments, "path", ".")
        self._start = os.path.join(cwd, self._shown)
        if not os.path.exists(self._start):
            raise SearchError(f"There is no {self._shown[:MAX_LINE_CHARS]!r}. Paths begin in {cwd}.")
        pattern = _text(arguments, patterned, "*" if patterned == "include" else None)
        self._is_not = pattern.startswith("!")
        pattern = pattern.removeprefix("!").removeprefix(os.path.abspath(self._start).rstrip("/") + "/")
        # A pattern with a slash is relative to the current directory; below another `path`, it may match at any depth.
        is_anywhere = self._shown != "." and "/" in pattern and not pattern.startswith("/")
        self._expression = ("(?:.*/)?" if is_anywhere else "") + path_regex(pattern)

    def files(self) -> Iterator[str]:
        """Yield the paths in the form for the model, the most recently changed first."""
        if os.path.isfile(self._start):
            yield _readable(self._shown)
            return
        wanted = re.compile(f"(?:{self._expression})\\Z", re.DOTALL)
        found = [
            (changed, path)
            for changed, path in self._entries()
            if (wanted.match(_readable(path)) is None) == self._is_not
        ]
        prefix = "" if self._shown in (".", "./") else self._shown.rstrip("/") + "/"
        yield from (_readable(prefix + path) for _, path in sorted(found, key=lambda one: (-one[0], one[1])))

    def absolute(self, shown: str) -> str:
        """Return the absolute path of a path that `files` has yielded."""
        return os.path.join(self._start[: len(self._start) - len(self._shown)], shown)

    def _entries(self) -> Iterator[tuple[int, str]]:
        folders = [""]
        count = 0
        while folders:
            folder = folders.pop()
            try:
                entries = list(os.scandir(os.path.join(self._start, folder)))
            except OSError:
                continue
            for entry in entries:
                count += 1
                if count > self._max_entries:
                    looked_at = f"{self._max_entries} files and directories"
                    self.note = f"\n[Only {looked_at} were looked at. Name a smaller `path`.]"
                    return
                if entry.name.startswith("."):
                    continue
                path = f"{folder}/{entry.name}" if folder else entry.name
                try:
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name not in LEFT_OUT:
                            folders.append(path)
                    elif entry.is_file(follow_symlinks=False):
                        yield entry.stat(follow_symlinks=False).st_mtime_ns, path
                except OSError:
                    continue


class _MatchWriter:
    """Collects the matching lines and writes them as text."""

    def __init__(self, wanted: re.Pattern[str], context: int, write: Write) -> None:
        self._wanted = wanted
        self._context = context
        self._write = write
        self._chars = 0
        self._shown = 0
        self._count = 0
        self._more_files = 0
        self._unread = 0

    def search(self, tree: _FileTree) -> None:
        for path in tree.files():
            self._look_into(path, tree.absolute(path))
        if not self._count:
            self._write("No line matches.")
        hidden = self._count - self._shown
        if hidden:
            self._write(
                f"\n[{hidden} more lines match, {self._more_files} more files among them. "
                "Use a narrower pattern, `include` or `path`.]"
            )
        if self._unread:
            self._write(f"\n[{self._unread} files of more than {MAX_FILE_BYTES >> 20} MiB were not read.]")
        self._write(tree.note)

    def _look_into(self, shown: str, path: str) -> None:
        content = _content(path)
        if content is None:
            self._unread += 1
            return
        if b"\0" in content[:BINARY_BEGINNING_BYTES]:
            return
        lines = content.decode("utf-8", "replace").split("\n")
        hits = [number for number, line in enumerate(lines) if self._wanted.search(line)]
        if lines[-1] == "" and hits and hits[-1] == len(lines) - 1:
            hits.pop()  # the text after the last line break is not a line
        if not hits:
            return
        self._count += len(hits)
        room = MAX_SHOWN_MATCHES - self._shown
        if room <= 0 or self._chars > MAX_ANSWER_CHARS:
            self._more_files += 1
            return
        self._show(shown, lines, hits[:room])

    def _show(self, path: str, lines: list[str], hits: list[int]) -> None:
        self._put(f"\n{path}\n" if self._shown else f"{path}\n")
        matching = set(hits)
        last = -1
        for hit in hits:
            first = max(hit - self._context, last + 1)
            if self._context and last >= 0 and first > last + 1:
                self._put("--\n")
            for number in range(first, min(hit + self._context, len(lines) - 1) + 1):
                if number > hit and number in matching:
                    break
                self._put(f"{number + 1}{':' if number == hit else '-'}{self._cut(lines[number])}\n")
                last = number
            self._shown += 1
            if self._chars > MAX_ANSWER_CHARS:
                return

    def _cut(self, line: str) -> str:
        """Return a line; a long line is cut to the part around the match."""
        line = line.rstrip("\r")
        if len(line) <= MAX_LINE_CHARS:
            return line
        match = self._wanted.search(line)
        first = max(0, match.start() - MAX_LINE_CHARS // 3) if match else 0
        shown = line[first : first + MAX_LINE_CHARS]
        return f"{'…' if first else ''}{shown}… [line of {len(line)} characters]"

    def _put(self, text: str) -> None:
        self._chars += len(text)
        self._write(text)


def _content(path: str) -> bytes | None:
    """Return the content of a regular file; empty if it cannot be read, None if it is too large."""
    try:
        # A link is followed only if the model has named it as `path`; `files` yields no links.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return b""
            return file.read(MAX_FILE_BYTES) if status.st_size <= MAX_FILE_BYTES else None
    except OSError:
        return b""


def path_regex(pattern: str) -> str:
    r"""Convert a path pattern, in the syntax of `rg -g` and `.gitignore`, to a regular expression.

    `*` and `?` match within a name, `**` across directories, `[a-z]` and `[!a-z]` one character, `{a,b}` either word;
    `\` escapes the next character. A pattern without a slash matches a name in any directory. Every other character is
    literal, including an unclosed bracket or brace.
    """
    signs = _PATTERN_SIGN.findall(pattern.removeprefix("/"))
    expression = "" if "/" in pattern else _SIGN_MEANINGS["**/"]
    depth = 0
    closing = signs.count("}")
    for sign in signs:
        closing -= sign == "}"
        if sign == "{" and closing > depth:
            depth += 1
            expression += "("
        elif sign == "}" and depth:
            depth -= 1
            expression += ")"
        elif sign == "," and depth:
            expression += "|"
        elif sign in _SIGN_MEANINGS:
            expression += _SIGN_MEANINGS[sign]
        elif len(sign) > 2:
            expression += "[^" + sign[2:] if sign[1] == "!" else sign
        else:
            expression += re.escape(sign[-1])
    return expression


def _readable(path: str) -> str:
    """Return a path as text; bytes that are not UTF-8 become U+FFFD."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _text(arguments: Arguments, name: str, default: str | None = None) -> str:
    value = arguments.get(name)
    if value is None or value == "":
        value = default
    if not isinstance(value, str) or "\0" in value or len(value) > MAX_PATTERN_CHARS:
        raise SearchError(f"`{name}` is a text of up to {MAX_PATTERN_CHARS} characters, without NUL.")
    return value
