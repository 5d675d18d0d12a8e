"""Questions to a code map, answered in text for a model (OpenHands 9.3: names and arguments).

Holds: an answer is bounded; if something is left out, it says so and suggests a narrower question.
"""

from __future__ import annotations

import re

from tool_worker.host.search.code_files import pattern_of, text_of
from tool_worker.host.search.code_map import ROOT, CodeMap

MAX_ANSWER_CHARS = 28_000
MAX_WHOLE_LINES = 120
MAX_SHOWN_MATCHES = 3
MAX_LISTED = 20
MAX_TREE_LINES = 300
MAX_FILES_READ = 5_000
AROUND_LINES = 8
DEFAULT_PATTERN = "**/*.py"
DIRECTIONS = ("downstream", "upstream", "both")
ENTITY_TYPES = ("directory", "file", "class", "function")
DEPENDENCY_TYPES = ("contains", "imports", "invokes", "inherits")

Arguments = dict[str, object]


class QuestionError(Exception):
    """A question that cannot be answered; the text is for the model."""


def answer_question(code: CodeMap, question: str, arguments: Arguments) -> str:
    """Return the answer to a question.

    Raises:
        QuestionError: the question is unknown, or an argument is not valid.
    """
    ask = {
        "search_code_snippets": search_code_snippets,
        "get_entity_contents": get_entity_contents,
        "explore_tree_structure": explore_tree_structure,
    }.get(question)
    if ask is None:
        raise QuestionError(f"There is no search named {question!r}.")
    answer = ask(code, {name: _make_relative(code.root, value) for name, value in arguments.items()})
    if len(answer) > MAX_ANSWER_CHARS:
        answer = answer[:MAX_ANSWER_CHARS] + "\n[The rest is left out. Ask for fewer things at once.]"
    if code.is_cut:
        answer += f"\n[Only the first {len(code.files)} files of the workspace were looked at.]"
    return answer


def search_code_snippets(code: CodeMap, arguments: Arguments) -> str:
    """Find code by words, or by line numbers of one file."""
    terms = _read_texts(arguments, "search_terms")
    lines = _read_numbers(arguments, "line_nums")
    where = _read_text(arguments, "file_path_or_pattern", DEFAULT_PATTERN)
    if not terms and not lines:
        raise QuestionError("Give `search_terms`, or `line_nums` together with the path of one file.")
    is_one_file = where in code.files
    if lines and not is_one_file:
        raise QuestionError(f"`line_nums` needs the path of one file in `file_path_or_pattern`; {where!r} is none.")
    wanted = pattern_of(where)
    paths = [where] if is_one_file else [path for path in code.files if wanted.match(path)]
    if not paths:
        return f"No file matches {where!r}."
    parts = [_render_matches(code, term, paths) for term in terms]
    parts += [_render_line_context(code, where, line) for line in lines]
    return "\n\n".join(parts)


def get_entity_contents(code: CodeMap, arguments: Arguments) -> str:
    """Show the code of files, classes and functions."""
    names = _read_texts(arguments, "entity_names")
    if not names:
        raise QuestionError("Give at least one name in `entity_names`, such as `path/file.py:Class.method`.")
    return "\n\n".join(_render_entity(code, name) for name in names)


def explore_tree_structure(code: CodeMap, arguments: Arguments) -> str:
    """Show the dependencies of entities, or their dependents."""
    starts = _read_texts(arguments, "start_entities")
    direction = _read_text(arguments, "direction", "downstream")
    depth = arguments.get("traversal_depth", 2)
    if not starts:
        raise QuestionError(f"Give at least one name in `start_entities`, such as `path/file.py` or `{ROOT}`.")
    if direction not in DIRECTIONS:
        raise QuestionError(f"`direction` is one of {', '.join(DIRECTIONS)}.")
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < -1:
        raise QuestionError("`traversal_depth` is a number from 0 on, or -1 for no limit.")
    kinds = _parse_choices(arguments, "entity_type_filter", ENTITY_TYPES)
    dependencies = _parse_choices(arguments, "dependency_type_filter", DEPENDENCY_TYPES)
    trees = []
    for start in starts:
        found = code.find_entities(start)
        if len(found) != 1:
            trees.append(_explain_ambiguity(start, found))
            continue
        for is_upstream in (False, True):
            if direction in ("both", "upstream" if is_upstream else "downstream"):
                tree = _DependencyTree(code, kinds, dependencies, is_upstream=is_upstream)
                trees.append(tree.render(found[0], depth))
    return "\n\n".join(trees)


class _DependencyTree:
    """Renders one dependency tree as text."""

    def __init__(self, code: CodeMap, kinds: list[str], dependencies: list[str], *, is_upstream: bool) -> None:
        self._code = code
        self._kinds = kinds
        self._dependencies = dependencies
        self._is_upstream = is_upstream
        self._lines: list[str] = []
        self._drawn: set[str] = set()

    def render(self, start: str, depth: int) -> str:
        """Return the tree below an entity; depth -1: without a limit."""
        self._lines = [
            f"{start} [{self._code.kind_of(start)}]" + (", what depends on it:" if self._is_upstream else "")
        ]
        self._draw(start, depth, "")
        if len(self._lines) == 1:
            self._lines.append("(nothing)")
        if len(self._lines) > MAX_TREE_LINES:
            self._lines[MAX_TREE_LINES:] = ["[The rest is left out. Start from a deeper entity, or use the filters.]"]
        return "\n".join(self._lines)

    def _draw(self, name: str, depth: int, indent: str) -> None:
        if depth == 0 or name in self._drawn or len(self._lines) > MAX_TREE_LINES or len(indent) > 200:
            return
        self._drawn.add(name)
        edges = [
            (how, other)
            for how, other in self._code.edges(name, is_upstream=self._is_upstream)
            if how in self._dependencies and self._code.kind_of(other) in self._kinds
        ]
        for position, (how, other) in enumerate(edges):
            is_last = position == len(edges) - 1
            arrow = "←" if self._is_upstream else "→"
            known = (
                ", see above" if other in self._drawn and self._code.edges(other, is_upstream=self._is_upstream) else ""
            )
            line = f"{indent}{'└' if is_last else '├'}── {how} {arrow} {other} [{self._code.kind_of(other)}{known}]"
            self._lines.append(line)
            self._draw(other, depth - 1, indent + ("    " if is_last else "│   "))


def _render_matches(code: CodeMap, term: str, paths: list[str]) -> str:
    """Return the entities of a name and the lines that contain it."""
    looked_at = set(paths)
    named = [name for name in code.find_entities(term) if name.partition(":")[0] in looked_at]
    parts = [f"## {term}"]
    if named:
        parts += [_render_entity(code, name) for name in named[:MAX_SHOWN_MATCHES]]
        parts += [f"{name} [{code.kind_of(name)}]" for name in named[MAX_SHOWN_MATCHES:MAX_LISTED]]
        if len(named) > MAX_LISTED:
            parts.append(f"[{len(named) - MAX_LISTED} more of that name.]")
    hits, count = _find_lines(code, term, paths)
    if hits:
        parts.append("Lines with it:\n" + "\n".join(hits))
    if count > len(hits):
        parts.append(f"[{count - len(hits)} more lines. Name a file or pattern to see them.]")
    if len(parts) == 1:
        parts.append(f"Nothing in {len(paths)} files.")
    if len(paths) > MAX_FILES_READ:
        parts.append(f"[Only the first {MAX_FILES_READ} of {len(paths)} files were read for it.]")
    return "\n".join(parts)


def _find_lines(code: CodeMap, term: str, paths: list[str]) -> tuple[list[str], int]:
    wanted = re.compile(re.escape(term.strip()), re.IGNORECASE)
    hits: list[str] = []
    count = 0
    for path in paths[:MAX_FILES_READ]:
        text = text_of(code.root, path) or ""
        if not wanted.search(text):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if wanted.search(line):
                count += 1
                if len(hits) < MAX_LISTED:
                    entity = code.find_enclosing(path, number)
                    inside = f" ({entity.name})" if entity else ""
                    hits.append(f"{path}:{number}{inside}: {line.strip()[:200]}")
    return hits, count


def _render_entity(code: CodeMap, words: str) -> str:
    """Return the code of an entity, or the outline of a long one."""
    found = code.find_entities(words)
    if len(found) != 1:
        return _explain_ambiguity(words, found)
    name = found[0]
    path, _, inner = name.partition(":")
    kind = code.kind_of(name)
    if kind == "directory":
        inside = [other for how, other in code.edges(name, is_upstream=False) if how == "contains"]
        return f"{name} [directory]\n" + "\n".join(inside)
    text = text_of(code.root, path)
    if text is None:
        return f"{name} [{kind}]\nIt cannot be read: no text, too long, or gone."
    lines = text.splitlines()
    entity = code.entity(name)
    first, last = (entity.first, entity.last) if entity else (1, len(lines))
    problem = code.problem_of(path)
    head = f"{name} [{kind}]" + (f" (it cannot be parsed: {problem})" if problem else "")
    members = [one for one in code.entities_of(path) if one.name.startswith(f"{inner}." if inner else "")]
    if last - first < MAX_WHOLE_LINES or not members:
        return f"{head}\n{_number_lines(lines, first, last)}"
    outline = [f"{one.first}-{one.last}  {lines[one.head - 1].rstrip()}" for one in members if one.head <= len(lines)]
    return f"{head}, {last - first + 1} lines; what it defines:\n" + "\n".join(outline)


def _render_line_context(code: CodeMap, path: str, line: int) -> str:
    """Return the code around a line: its entity, or the lines next to it."""
    lines = (text_of(code.root, path) or "").splitlines()
    if not 1 <= line <= len(lines):
        return f"{path} has {len(lines)} lines; there is no line {line}."
    entity = code.find_enclosing(path, line)
    if entity is not None and entity.last - entity.first < MAX_WHOLE_LINES:
        return f"{path}:{entity.name} [{entity.kind}]\n{_number_lines(lines, entity.first, entity.last)}"
    inside = f" ({entity.name})" if entity else ""
    first = max(line - AROUND_LINES, 1)
    last = min(line + AROUND_LINES, len(lines))
    return f"{path}, around line {line}{inside}\n{_number_lines(lines, first, last)}"


def _number_lines(lines: list[str], first: int, last: int) -> str:
    return "\n".join(f"{number:6}\t{lines[number - 1]}" for number in range(first, min(last, len(lines)) + 1))


def _explain_ambiguity(words: str, found: list[str]) -> str:
    if not found:
        return f"There is no {words!r}. Names are like `path/file.py`, `path/file.py:Class.method` or `path`."
    listed = "\n".join(found[:MAX_LISTED])
    more = "\n…" if len(found) > MAX_LISTED else ""
    return f"{words!r} may be any of {len(found)}; name one of them:\n{listed}{more}"


def _read_texts(arguments: Arguments, name: str) -> list[str]:
    """Return a list of texts; a single text is accepted too, because models send it."""
    value = arguments.get(name) or []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise QuestionError(f"`{name}` is a list of texts.")
    return [text for text in texts if text.strip()]


def _read_numbers(arguments: Arguments, name: str) -> list[int]:
    value = arguments.get(name) or []
    numbers = [value] if isinstance(value, int) else value
    if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
        raise QuestionError(f"`{name}` is a list of numbers.")
    return numbers


def _read_text(arguments: Arguments, name: str, default: str) -> str:
    value = arguments.get(name) or default
    if not isinstance(value, str):
        raise QuestionError(f"`{name}` is a text.")
    return value


def _make_relative(root: str, value: object) -> object:
    """Return absolute workspace paths relative to the root, as the map names them."""
    if isinstance(value, list):
        return [_make_relative(root, one) for one in value]
    if not isinstance(value, str):
        return value
    return ROOT if value.rstrip("/") == root else value.strip().removeprefix(f"{root}/").removeprefix("./")


def _parse_choices(arguments: Arguments, name: str, known: tuple[str, ...]) -> list[str]:
    wanted = _read_texts(arguments, name) or list(known)
    unknown = [kind for kind in wanted if kind not in known]
    if unknown:
        raise QuestionError(f"`{name}` takes {', '.join(known)}; not {unknown[0]!r}.")
    return wanted
