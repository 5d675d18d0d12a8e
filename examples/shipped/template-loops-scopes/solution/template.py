"""A small template language."""

import re
from html import escape


class Mistake(Exception):
    """The template is wrong."""

    def __init__(self, message, line):
        super().__init__(f"line {line}: {message}")
        self.line = line


TEXT = r'"(?:[^"\\]|\\.)*"'
PATH = r"\w+(?:\.\w+)*"
TAG = re.compile(
    r"(?P<comment>\{#.*?#\})|(?P<block>\{%.*?%\})|(?P<value>\{\{(?:" + TEXT + r'|(?!\}\})[^"])*\}\})|(?P<open>\{[{%#])',
    re.DOTALL,
)
VALUE = re.compile(rf"\s*({PATH})\s*((?:\|\s*\w+\s*(?:\(\s*{TEXT}\s*\)\s*)?)*)", re.DOTALL)
FILTER = re.compile(rf"\|\s*(\w+)\s*(?:\(\s*({TEXT})\s*\))?", re.DOTALL)
FOR = re.compile(rf"for\s+(\w+)(?:\s*,\s*(\w+))?\s+in\s+({PATH})")
IF = re.compile(rf"(?:el)?if\s+(not\s+)?({PATH})")
FILTERS = {
    "upper": lambda value: show(value).upper(),
    "lower": lambda value: show(value).lower(),
    "length": lambda value: len(value) if hasattr(value, "__len__") else 0,
}


def show(value):
    return "" if value is None else str(value)


def look_up(path, scope):
    """Return what the path leads to, or None."""
    value = scope
    for name in path.split("."):
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, (list, tuple)) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


class Block:
    """An if or a for: branches with what decides about them."""

    def __init__(self, kind, line, head):
        self.kind = kind
        self.line = line
        self.branches = [(head, [])]
        self.closed = False  # whether there was an else

    def render(self, scope):
        if self.kind == "for":
            return self.loop(scope)
        for head, nodes in self.branches:
            if head is None or bool(look_up(head[2], scope)) != bool(head[1]):
                return render_all(nodes, scope)
        return ""

    def loop(self, scope):
        head, nodes = self.branches[0]
        items = look_up(head[3], scope) or []
        items = list(items.items()) if head[2] and isinstance(items, dict) else list(items)
        result = []
        for at, item in enumerate(items):
            names = {head[1]: item} if not head[2] else {head[1]: item[0], head[2]: item[1]}
            loop = {"index": at + 1, "first": at == 0, "last": at == len(items) - 1, "outer": scope.get("loop")}
            result.append(render_all(nodes, {**scope, **names, "loop": loop}))
        if not items and len(self.branches) > 1:
            return render_all(self.branches[1][1], scope)
        return "".join(result)


class Value:
    """A value with filters."""

    def __init__(self, text, line):
        found = VALUE.fullmatch(text)
        if not found:
            raise Mistake("not a value", line)
        self.path = found[1]
        self.filters = FILTER.findall(found[2])
        for name, argument in self.filters:
            if (name == "default") != bool(argument) or name not in (*FILTERS, "raw", "default"):
                raise Mistake(f"not a filter: {name}", line)

    def render(self, scope):
        value = look_up(self.path, scope)
        raw = False
        for name, argument in self.filters:
            if name == "raw":
                raw = True
            elif name == "default":
                if value is None or value == "":
                    value = re.sub(r"\\(.)", r"\1", argument[1:-1], flags=re.DOTALL)
            else:
                value = FILTERS[name](value)
        return show(value) if raw else escape(show(value)).replace("&#x27;", "&#39;")


def render_all(nodes, scope):
    return "".join(node if isinstance(node, str) else node.render(scope) for node in nodes)


def block(tag, stack, nodes, line):
    """Handle a block tag and return the list for what follows."""
    word = tag.split()[0] if tag.split() else ""
    current = stack[-1][0] if stack else None
    if word in ("for", "if"):
        head = (FOR if word == "for" else IF).fullmatch(tag)
        if not head:
            raise Mistake(f"not a {word}", line)
        new = Block(word, line, head)
        nodes.append(new)
        stack.append((new, nodes))
        return new.branches[0][1]
    if tag == "end" and current:
        return stack.pop()[1]
    head = IF.fullmatch(tag) if word == "elif" else None
    if current and not current.closed and (tag == "else" or (head and current.kind == "if")):
        current.closed = tag == "else"
        current.branches.append((head, []))
        return current.branches[-1][1]
    raise Mistake(f"unexpected: {tag}", line)


def parse(text):
    """Return the nodes of a template."""
    top = nodes = []
    stack = []
    at = 0
    for found in TAG.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        start, end = found.span()
        if found["open"]:
            raise Mistake("a tag is not closed", line)
        if not found["value"]:
            before = re.search(r"(?:^|(?<=\n))[ \t]*\Z", text[at:start]) if at == 0 or text[at - 1] == "\n" or "\n" in text[at:start] else None
            after = re.compile(r"[ \t]*(?:\r?\n|\Z)").match(text, end)
            if before and after:
                start, end = at + before.start(), after.end()
        nodes.append(text[at:start])
        at = end
        if found["value"]:
            nodes.append(Value(found[0][2:-2], line))
        elif found["block"]:
            nodes = block(found[0][2:-2].strip(), stack, nodes, line)
    if stack:
        raise Mistake("an end is missing", stack[-1][0].line)
    nodes.append(text[at:])
    return top


def render(text, values):
    """Return the text with all tags replaced."""
    return render_all(parse(text), dict(values))
