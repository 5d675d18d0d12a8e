"""The risk of a command, found by parsing it as bash (docs/security.md lists the rules).

Holds: fails closed: code that cannot be parsed or is unknown before it runs (a program's name from a variable, `eval`,
a program on an interpreter's standard input) is HIGH. Every command counts, also in substitutions, functions and
loops. Pure, so that the same command has the same risk everywhere.
Does not: contain anything; a command can always be hidden from a parser. The sandbox is the boundary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import tree_sitter

from broker.contract import ActionSecurityRisk
from broker.tools import parse_bash
from controller_worker.security.command_risks import HIGH, INTERPRETERS, LOW, MEDIUM, Arguments, rate_command
from controller_worker.security.path_risk import rate_reading, rate_writing

MAX_COMMAND_CHARS = 100_000
MAX_DEPTH = 40
"""Deeper nesting cannot be judged by a user either."""

SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh", "fish", "busybox"))
BIN_DIRECTORIES = re.compile(r"(/usr)?(/local)?/s?bin/")
POISONED_VARIABLES = re.compile(
    r"(PATH|IFS|ENV|BASH_ENV|BASH_FUNC_.*|SHELLOPTS|PS4|PROMPT_COMMAND|EDITOR|VISUAL|PAGER|LD_.*|DYLD_.*|PYTHON.*|PERL.*"
    r"|RUBY.*|NODE_.*|GIT_.*|.*_PROXY|.*_proxy|CDPATH|GLOBIGNORE)(\[.*)?"
)
"""Variables that change the behavior of other programs."""
WRAPPERS: dict[str, frozenset[str]] = {
    "env": frozenset(("-u", "-C", "--unset", "--chdir")),
    "nice": frozenset(("-n",)),
    "nohup": frozenset(),
    "time": frozenset(),
    "timeout": frozenset(("-s", "-k", "--signal", "--kill-after")),
    "command": frozenset(),
    "builtin": frozenset(),
    "exec": frozenset(("-a",)),
    "setsid": frozenset(),
    "stdbuf": frozenset(("-i", "-o", "-e")),
    "xargs": frozenset(("-n", "-P", "-I", "-L", "-d", "-s", "-a", "-E")),
}
"""Programs that run the program in their arguments, with their options that take a value."""
FIND_RUNS = frozenset(("-exec", "-execdir", "-ok", "-okdir"))
MAX_FIND_RUNS = 20
FIND_WRITES = frozenset(("-delete", "-fprint", "-fprintf", "-fls", "-fprint0"))
UNKNOWN_TEXT = frozenset(
    ("simple_expansion", "expansion", "command_substitution", "process_substitution", "arithmetic_expansion")
)
WRITES = frozenset((">", ">>", "&>", "&>>", ">|", "<>"))


def rate_shell(command: str, workspace: str) -> ActionSecurityRisk:
    """Return the risk of a command line or script; never UNKNOWN.

    Args:
        workspace: the directory that may be changed.
    """
    if len(command) > MAX_COMMAND_CHARS or "\0" in command:
        return HIGH
    root = parse_bash(command)
    return HIGH if root is None or root.has_error else _SyntaxWalk(workspace).rate(root, 0)


class _SyntaxWalk:
    """One walk through a syntax tree."""

    def __init__(self, workspace: str) -> None:
        self._workspace = workspace

    def rate(self, node: tree_sitter.Node, depth: int, *, is_fed: bool = False) -> ActionSecurityRisk:
        """Return the highest risk of a node and all nodes below it.

        Args:
            is_fed: its standard input comes from another command or is in the text.
        """
        if depth > MAX_DEPTH:
            return HIGH
        own = LOW
        match node.type:
            case "command":
                own = self._rate_command(node, is_fed=is_fed, depth=depth)
            case "variable_assignment" | "declaration_command" | "unset_command":
                own = self._rate_variables(node)
            case "file_redirect":
                own = self._rate_redirect(node)
            case "function_definition":
                own = HIGH if _calls_itself(node) else LOW
            case "pipeline":
                return max(self.rate(child, depth + 1, is_fed=n > 0) for n, child in enumerate(node.named_children))
            case "redirected_statement":
                is_fed = is_fed or any(child.type.startswith("here") or _is_input(child) for child in node.children)
        return max([own, *(self.rate(child, depth + 1, is_fed=is_fed) for child in node.named_children)])

    def _rate_command(self, node: tree_sitter.Node, *, is_fed: bool, depth: int) -> ActionSecurityRisk:
        name_node = node.child_by_field_name("name")
        name = (
            _find_known_text(name_node.named_children[0])
            if name_node is not None and name_node.named_children
            else None
        )
        if name_node is None or name is None:
            return HIGH
        is_fed = is_fed or any(child.type.startswith("here") for child in node.children)
        arguments = [_find_known_text(child) for child in node.children_by_field_name("argument")]
        return self._rate_program(name, arguments, is_fed=is_fed, depth=depth)

    def _rate_program(self, name: str, arguments: Arguments, *, is_fed: bool, depth: int) -> ActionSecurityRisk:
        if depth > MAX_DEPTH:
            return HIGH
        name = BIN_DIRECTORIES.sub("", name) if BIN_DIRECTORIES.match(name) else name
        if "/" in name:
            return MEDIUM  # a program of the workspace, or an unknown one
        if name in SHELLS:
            return self._rate_shell(arguments, depth)
        if name in WRAPPERS:
            return self._rate_wrapped(name, arguments, is_fed=is_fed, depth=depth)
        if name == "find":
            return self._rate_find(arguments, depth)
        risk = rate_command(name, arguments, self._workspace)
        is_interpreter = risk is not LOW and INTERPRETERS.fullmatch(name) is not None
        has_script = any(word is not None and not word.startswith("-") for word in arguments)
        return HIGH if is_fed and is_interpreter and not has_script else risk

    def _rate_shell(self, arguments: Arguments, depth: int) -> ActionSecurityRisk:
        if any(word is None for word in arguments):
            return HIGH
        words = [word for word in arguments if word is not None]
        for position, word in enumerate(words):
            if re.fullmatch(r"-[a-z]*c", word):
                script = words[position + 1] if position + 1 < len(words) else ""
                return self._rate_script(script, depth)
            if not word.startswith(("-", "+")):
                return MEDIUM  # a script in a file
        return LOW if words == ["--version"] else HIGH

    def _rate_script(self, script: str, depth: int) -> ActionSecurityRisk:
        root = parse_bash(script)
        return HIGH if root is None or root.has_error or not script.strip() else self.rate(root, depth + 1)

    def _rate_wrapped(self, name: str, arguments: Arguments, *, is_fed: bool, depth: int) -> ActionSecurityRisk:
        """Return the risk of a program that another one runs."""
        left = list(arguments)
        while left:
            word = left[0]
            if word is None:
                return HIGH
            if "=" in word and name == "env" and not word.startswith("-"):
                if POISONED_VARIABLES.fullmatch(word.partition("=")[0]):
                    return HIGH
            elif not word.startswith("-"):
                break
            elif word in ("-S", "--split-string") or word.startswith("--split-string="):
                return HIGH
            elif word in WRAPPERS[name]:
                left = left[1:]
            left = left[1:]
        if name == "timeout":
            left = left[1:]
        if not left:
            return LOW
        if left[0] is None:
            return HIGH
        # The arguments added by xargs are unknown.
        rest: list[str | None] = [*left[1:], None] if name == "xargs" else left[1:]
        return self._rate_program(left[0], rest, is_fed=is_fed and name != "xargs", depth=depth + 1)

    def _rate_find(self, arguments: Arguments, depth: int) -> ActionSecurityRisk:
        root = arguments[0] if arguments else "."
        one = None if root is None else f"{root}/found"
        risk = rate_reading(root, self._workspace)
        if sum(word in FIND_RUNS for word in arguments) > MAX_FIND_RUNS:
            return HIGH
        for position, word in enumerate(arguments):
            if word in FIND_WRITES:
                risk = max(risk, MEDIUM, rate_writing(one, self._workspace))
            if word in FIND_RUNS:
                run = arguments[position + 1 :]
                if not run or run[0] is None:
                    return HIGH
                found = [one if argument == "{}" else argument for argument in run[1:] if argument not in (";", "+")]
                risk = max(risk, self._rate_program(run[0], found, is_fed=False, depth=depth + 1))
        return risk

    def _rate_variables(self, node: tree_sitter.Node) -> ActionSecurityRisk:
        names = [child for child in (node, *node.named_children) if child.type == "variable_assignment"]
        texts = [_to_text(name.child_by_field_name("name")) for name in names]
        texts += [_to_text(child) for child in node.named_children if child.type in ("variable_name", "word")]
        return HIGH if any(POISONED_VARIABLES.fullmatch(text) for text in texts) else LOW

    def _rate_redirect(self, node: tree_sitter.Node) -> ActionSecurityRisk:
        destination = node.child_by_field_name("destination")
        if destination is None or re.fullmatch(r"\d+|-", _to_text(destination)):
            return LOW
        path = _find_known_text(destination)
        is_written = any(child.type in WRITES for child in node.children)
        return rate_writing(path, self._workspace) if is_written else rate_reading(path, self._workspace)


def _find_known_text(node: tree_sitter.Node) -> str | None:
    """Return the value of a word at run time; None if it is unknown before. A glob in a path counts as itself."""
    match node.type:
        case "word" | "number":
            text = _to_text(node)
            return None if "\\" in text or text.startswith("~+") else text
        case "raw_string":
            return _to_text(node)[1:-1]
        case "string":
            if any(child.type in UNKNOWN_TEXT for child in node.named_children) or "\\" in _to_text(node):
                return None
            return _to_text(node)[1:-1]
        case "concatenation":
            parts = [_find_known_text(child) for child in node.named_children]
            whole = "".join(part or "" for part in parts)
            # Text between the parts, such as a brace, is no named node.
            is_whole = sum(child.end_byte - child.start_byte for child in node.named_children) == (
                node.end_byte - node.start_byte
            )
            return whole if is_whole and None not in parts else None
    return None


def _to_text(node: tree_sitter.Node | None) -> str:
    return "" if node is None or node.text is None else node.text.decode("utf-8", "replace")


def _is_input(node: tree_sitter.Node) -> bool:
    return node.type == "file_redirect" and any(child.type == "<" for child in node.children)


def _calls_itself(node: tree_sitter.Node) -> bool:
    name = _to_text(node.child_by_field_name("name"))
    return name in _find_names(node.child_by_field_name("body"))


def _find_names(node: tree_sitter.Node | None) -> Sequence[str]:
    if node is None:
        return ()
    own = [_to_text(node)] if node.type == "command_name" else []
    return [*own, *(name for child in node.named_children for name in _find_names(child))]
