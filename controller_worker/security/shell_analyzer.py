"""The risk of a command, found by parsing it as bash (docs/security.md lists the rules).

Holds: fails closed: code that cannot be parsed or is unknown before it runs (a program's name from a variable, `eval`,
a program on an interpreter's standard input) is HIGH. Every command counts, also in substitutions, functions and
loops. Pure, so that the same command has the same risk everywhere.
Does not: confine anything: a command can always be hidden from a parser. The sandbox is the boundary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

import tree_sitter

from broker.tools import parse_bash
from controller_worker.security.command_options import Arguments
from controller_worker.security.command_risks import (
    INTERPRETERS,
    POISONED_VARIABLES,
    is_plain_variable,
    rate_command,
    starts_operand,
)
from controller_worker.security.path_risk import HIGH, LOW, MEDIUM, UNCLEAR, Paths, Rating

MAX_COMMAND_CHARS = 100_000
MAX_DEPTH = 40
"""Deeper nesting cannot be judged by a user either."""

SHELLS = frozenset(("sh", "bash", "rbash", "dash", "ash", "zsh", "ksh", "ksh93", "mksh", "fish"))
MULTI_CALL = frozenset(("busybox", "toybox"))
"""Programs whose first argument is the name of the program that they are."""
BIN_DIRECTORIES = re.compile(r"(/usr)?(/local)?/s?bin/")
WRAPPERS: dict[str, tuple[str, str]] = {
    "env": ("-i -0 -v --ignore-environment --null --debug", "-u --unset"),
    "nice": ("", "-n --adjustment"),
    "ionice": ("-t", "-c -n"),
    "nohup": ("", ""),
    "time": ("-p -v -q", "-f --format"),
    "timeout": ("--foreground --preserve-status -v --verbose", "-s -k --signal --kill-after"),
    "command": ("-p -v -V", ""),
    "builtin": ("", ""),
    "exec": ("-c -l", "-a"),
    "setsid": ("-c -f -w --ctty --fork --wait", ""),
    "stdbuf": ("", "-i -o -e --input --output --error"),
    "xargs": (
        "-0 -r -t -p -x -o --null --no-run-if-empty --verbose --interactive --exit --open-tty -i -l -e --show-limits",
        "-n -P -I -L -d -s -E --max-args --max-procs --replace --max-lines --delimiter --max-chars --eof",
    ),
}
"""Programs that run the program in their arguments: their options without and with a value."""
RUNNERS = frozenset(
    (
        *("poetry", "uv", "pipenv", "bundle", "hatch", "rye", "pdm", "pixi", "conda", "mamba", "tox"),
        *("npm", "yarn", "pnpm"),
    )
)
"""Programs of which a command, `RUN_VERBS`, starts the program that follows."""
RUN_VERBS = frozenset(("run", "exec", "x"))
TOX_VERBS = frozenset(("exec", "e"))
"""The `run` of tox runs environments, whose commands are in a file of the project."""
COVERAGE_FLAGS = frozenset(
    ("-a", "-p", "-L", "--append", "--branch", "--parallel-mode", "--pylib", "--timid", "--save-signal")
)
SCRIPT_RUNNERS = frozenset(("npm", "yarn", "pnpm"))
"""Runners whose `run` starts a script of the project."""
MAX_STARTED_WORDS = 8
BRACES = re.compile(r"\{([^{}]*(?:,|\.\.)[^{}]*)\}")
MAX_BRACE_WORDS = 64
PLAIN_WORD = re.compile(r"[\w./{},*?=:@%+-]+", re.ASCII)
CHANGES_DIRECTORY = frozenset(("cd", "chdir", "pushd", "popd"))
LOOPS = frozenset(("for_statement", "c_style_for_statement", "while_statement", "function_definition"))
OWN_PROCESS = frozenset(("subshell", "command_substitution", "process_substitution"))
BRANCHES = frozenset(("if_statement", "elif_clause", "else_clause", "case_statement", "case_item", "list"))
EVALUATING = frozenset(
    (
        "test_command",
        "declaration_command",
        "unset_command",
        "variable_assignment",
        "arithmetic_expansion",
        "subscript",
        "c_style_for_statement",
        "compound_statement",
        "herestring_redirect",
    )
)
"""Where bash may evaluate the text of a quoted word as arithmetic."""
HIDDEN_SUBSTITUTION = re.compile(r"\w\[[^\]]*(\$[({]|`)")
ARRAY_ASSIGNMENT = re.compile(r"\+?=.*", re.DOTALL)
FIND_RUNS = frozenset(("-exec", "-execdir", "-ok", "-okdir"))
MAX_FIND_RUNS = 20
FIND_WRITES = frozenset(("-delete", "-fprint", "-fprintf", "-fls", "-fprint0"))
RUNS_VALUE = re.compile(r"@P\s*\}$")
"""`${x@P}` expands a value as a prompt: bash runs the substitutions in it."""
INDIRECT = re.compile(r"\$\{!(?!\w+(?:\[[@*]\]|[@*])\}$)")
"""`${!x}` evaluates the value of a variable as a name; the lists of names `${!x[@]}` and `${!x*}` do not."""
ESCAPED = re.compile(r"\\([$`\"\\])")
UNKNOWN_TEXT = frozenset(
    ("simple_expansion", "expansion", "command_substitution", "process_substitution", "arithmetic_expansion")
)
WRITES = frozenset((">", ">>", "&>", "&>>", ">|", "<>"))


def rate_shell(command: str, workspace: str, directory: str | None = None) -> Rating:
    """Return the risk of a command line or script; never UNKNOWN.

    Args:
        workspace: the directory that may be changed.
        directory: where it starts; None for any directory in the workspace.
    """
    if len(command) > MAX_COMMAND_CHARS or "\0" in command:
        return HIGH
    root = parse_bash(command)
    if root is None or root.has_error:
        return HIGH
    walk = _SyntaxWalk(Paths(workspace) if directory is None else Paths(workspace).change(directory))
    return max(walk.rate(root, 0), walk.paths.rate_staying())


class _SyntaxWalk:
    """One walk through a syntax tree.

    Attributes:
        paths: rates the paths of the next command; every command that changes the directory replaces it.
    """

    def __init__(self, paths: Paths) -> None:
        self.paths = paths

    def rate(self, node: tree_sitter.Node, depth: int, *, is_fed: bool = False) -> Rating:
        """Return the highest risk of a node and all nodes below it.

        Args:
            is_fed: its standard input comes from another command or is in the text.
        """
        if depth > MAX_DEPTH:
            return HIGH
        before = self.paths
        if node.type in LOOPS and any(name in CHANGES_DIRECTORY for name in _find_names(node)):
            self.paths = before.join(before.change(None))
        risk = self._rate_node(node, depth, is_fed=is_fed)
        if node.type in OWN_PROCESS:
            self.paths = before
        elif (node.type in BRANCHES and not _is_part_of_list(node)) or node.type in LOOPS:
            # A part of it may not have run. In `cd a && b`, the `b` runs in `a`; what follows may not.
            self.paths = self.paths.join(before)
        return risk

    def _rate_node(self, node: tree_sitter.Node, depth: int, *, is_fed: bool) -> Rating:
        own = HIGH if node.type in EVALUATING and _hides_substitution(node) else LOW
        match node.type:
            case "command":
                return max(own, self._rate_command(node, is_fed=is_fed, depth=depth))
            case "variable_assignment" | "declaration_command" | "unset_command":
                own = max(own, self._rate_variables(node))
            case "for_statement":
                own = LOW if is_plain_variable(_to_text(node.child_by_field_name("variable"))) else HIGH
            case "unary_expression":
                own = _rate_variable_test(node)
            case "expansion":
                own = max(own, _rate_expansion(_to_text(node)))
            case "file_redirect":
                own = self._rate_redirect(node)
            case "function_definition":
                own = HIGH if _calls_itself(node) else LOW
            case "pipeline":
                return self._rate_pipeline(node, depth, is_fed=is_fed)
            case "list":
                return self._rate_list(node, depth, is_fed=is_fed)
            case "if_statement" | "case_statement":
                return max(own, self._rate_branches(node, depth, is_fed=is_fed))
            case "redirected_statement":
                is_fed = is_fed or any(child.type.startswith("here") or _is_input(child) for child in node.children)
                # A redirection is opened before the command runs.
                redirects = [child for child in node.named_children if child.type.endswith("redirect")]
                others = [child for child in node.named_children if child not in redirects]
                # The parser gives a list the redirections of its last command, which runs after each `cd` of the list.
                after = redirects if any(child.type == "list" for child in others) else []
                return max(self.rate(child, depth + 1, is_fed=is_fed) for child in (*redirects, *others, *after))
        return max([own, *(self.rate(child, depth + 1, is_fed=is_fed) for child in node.named_children)])

    def _rate_pipeline(self, node: tree_sitter.Node, depth: int, *, is_fed: bool) -> Rating:
        before, risks = self.paths, [LOW]
        for position, child in enumerate(node.named_children):
            self.paths = before  # each part is a separate process
            risks.append(self.rate(child, depth + 1, is_fed=is_fed or position > 0))
        self.paths = before
        return max(risks)

    def _rate_list(self, node: tree_sitter.Node, depth: int, *, is_fed: bool) -> Rating:
        before, risks = self.paths, [LOW]
        for child in node.children:
            if child.type == "||":
                self.paths = self.paths.join(before)
            if child.is_named:
                risks.append(self.rate(child, depth + 1, is_fed=is_fed))
        return max(risks)

    def _rate_branches(self, node: tree_sitter.Node, depth: int, *, is_fed: bool) -> Rating:
        risks, reached = [LOW], self.paths
        for child in node.named_children:
            if child.type in ("elif_clause", "else_clause", "case_item"):
                self.paths = reached
            risks.append(self.rate(child, depth + 1, is_fed=is_fed))
            reached = reached.join(self.paths)
        self.paths = reached
        return max(risks)

    def _rate_command(self, node: tree_sitter.Node, *, is_fed: bool, depth: int) -> Rating:
        # Substitutions in the arguments, and redirections, come before the command itself.
        below = max([LOW, *(self.rate(child, depth + 1, is_fed=is_fed) for child in node.named_children)])
        name_node = node.child_by_field_name("name")
        name = (
            _find_known_text(name_node.named_children[0])
            if name_node is not None and name_node.named_children
            else None
        )
        if name_node is None or name is None or _has_braces(name_node):
            return HIGH
        is_fed = is_fed or any(child.type.startswith("here") for child in node.children)
        arguments = [word for child in node.children_by_field_name("argument") for word in _find_known_words(child)]
        before = self.paths
        risk = max(below, self._rate_program(name, arguments, is_fed=is_fed, depth=depth))
        if self.paths != before and not _is_joined_by_and(node):
            self.paths = self.paths.join(before)  # the change may fail
        return risk

    def _rate_program(self, name: str, arguments: Arguments, *, is_fed: bool, depth: int) -> Rating:
        if depth > MAX_DEPTH:
            return HIGH
        name = BIN_DIRECTORIES.sub("", name) if BIN_DIRECTORIES.match(name) else name
        if "/" in name:
            return rate_command(name, arguments, self.paths)  # a program of the workspace, or an unknown one
        if name in SHELLS:
            return self._rate_shell(arguments, depth)
        if name in MULTI_CALL and arguments and arguments[0] in ("--help", "--list"):
            return LOW
        if name in MULTI_CALL:
            known = arguments[0] if arguments else None
            is_applet = known is not None and not known.startswith("-")
            return self._rate_program(known or "", arguments[1:], is_fed=is_fed, depth=depth + 1) if is_applet else HIGH
        if name in WRAPPERS:
            return self._rate_wrapped(name, arguments, is_fed=is_fed, depth=depth)
        if name == "find":
            return self._rate_find(arguments, depth)
        if name in CHANGES_DIRECTORY:
            return self._change_directory(name, arguments)
        risk = rate_command(name, arguments, self.paths)
        if name in SCRIPT_RUNNERS and arguments[:1] == ["run"]:
            return max(risk, MEDIUM)
        if name == "coverage" and "run" in arguments:
            return max(risk, self._rate_covered(arguments[arguments.index("run") + 1 :], depth))
        if (started := _find_started(name, arguments)) is not None:
            program, *rest = started or [None]
            if program is None or program.startswith("-"):
                return max(risk, self._rate_started(started, depth))
            return max(risk, MEDIUM, self._rate_program(program, rest, is_fed=is_fed, depth=depth + 1))
        if starts_operand(name):
            return max(risk, self._rate_started(arguments, depth))
        is_interpreter = risk is not LOW and INTERPRETERS.fullmatch(name) is not None
        if is_interpreter and len(arguments) > 1 and arguments[0] == "-m" and arguments[1] in (*RUNNERS, "coverage"):
            return max(risk, self._rate_program(arguments[1], arguments[2:], is_fed=is_fed, depth=depth + 1))
        has_script = any(word is not None and not word.startswith("-") for word in arguments)
        return HIGH if is_fed and is_interpreter and not has_script else risk

    def _change_directory(self, name: str, arguments: Arguments) -> Rating:
        options = ("-L", "-P", "-e", "-@", "--", "-n")
        words = [word for word in arguments if word not in options]
        home = None if name in ("pushd", "popd") else "~"
        target = words[0] if words and name != "popd" else home
        if target is not None and re.match(r"[-+]\d*$", target):
            target = None
        self.paths = self.paths.change(target)
        return LOW

    def _rate_started(self, arguments: Arguments, depth: int) -> Rating:
        """Rate a program that another one starts. Any word may be its name, because the options are unknown."""
        risks = [UNCLEAR]
        for position, word in enumerate(arguments[:MAX_STARTED_WORDS]):
            if word is None or (word in WRAPPERS or word in RUNNERS or starts_operand(word)):
                return HIGH
            if not word.startswith("-"):
                risks.append(self._rate_program(word, arguments[position + 1 :], is_fed=False, depth=depth + 1))
        return max(risks)

    def _rate_covered(self, arguments: Arguments, depth: int) -> Rating:
        """Rate the Python program that `coverage run` starts."""
        left = list(arguments)
        while left and left[0] is not None and (left[0] in COVERAGE_FLAGS or re.match(r"--[\w-]+=", left[0])):
            left = left[1:]
        if left and left[0] == "--module":
            left[0] = "-m"
        is_known = bool(left) and left[0] is not None and (left[0] == "-m" or not left[0].startswith("-"))
        if not is_known:  # an option with a value, which may be followed by any program
            return self._rate_started(left, depth)
        return max(MEDIUM, self._rate_program("python", left, is_fed=False, depth=depth + 1))

    def _rate_shell(self, arguments: Arguments, depth: int) -> Rating:
        if any(word is None for word in arguments):
            return HIGH
        left = [word for word in arguments if word is not None]
        if left in (["--version"], ["--help"]):
            return LOW
        is_command, own = False, LOW
        while left and (left[0].startswith(("-", "+")) and left[0] != "-"):
            word = left.pop(0)
            if word == "--":
                break
            if word in ("--rcfile", "--init-file"):
                own, left = UNCLEAR, left[1:]  # a script in a file
            elif word.startswith("--"):
                if word not in ("--login", "--norc", "--noprofile", "--posix", "--verbose", "--restricted"):
                    return HIGH
            elif re.fullmatch(r"[-+][a-zA-Z]+", word) and "C" not in word.replace("-C", "", word[1:] == "C"):
                is_command = is_command or "c" in word
                if "s" in word or "i" in word or word == "-C":
                    return HIGH
                left = left[sum(letter in "oO" for letter in word) :]
            else:
                return HIGH
        if not left:
            return HIGH
        if is_command:
            return max(own, self._rate_script(left[0], depth))
        return HIGH if left[0].startswith(("-", "/dev/", "/proc/")) else max(UNCLEAR, self.paths.rate_reading(left[0]))

    def _rate_script(self, script: str, depth: int) -> Rating:
        root = parse_bash(script)
        if root is None or root.has_error or not script.strip():
            return HIGH
        return _SyntaxWalk(self.paths).rate(root, depth + 1)

    def _rate_wrapped(self, name: str, arguments: Arguments, *, is_fed: bool, depth: int) -> Rating:
        """Return the risk of a program that another one runs."""
        flags, values = (options.split() for options in WRAPPERS[name])
        left, before, read = list(arguments), self.paths, LOW
        while left:
            word = left[0]
            if word is None:
                return HIGH
            option, has_value, value = word.partition("=")
            if word == "--":
                left = left[1:]
                break
            if has_value and name == "env" and not word.startswith("-"):
                if POISONED_VARIABLES.fullmatch(option):
                    return HIGH
            elif word == "-" and name == "env":
                pass
            elif not word.startswith("-"):
                break
            elif name == "env" and option in ("-C", "--chdir"):
                self.paths = self.paths.change(value if has_value else left[1] if len(left) > 1 else None)
                left = left if has_value else left[1:]
            elif name == "xargs" and (found := re.fullmatch(r"-a(.*)|--arg-file(?:=(.*))?", word, re.DOTALL)):
                attached = found[1] or found[2]
                read = max(read, self.paths.rate_reading(attached or (left[1] if len(left) > 1 else None)))
                left = left if attached else left[1:]
            elif option in values:
                left = left if has_value else left[1:]
            elif not (
                word in flags
                or (name == "nice" and re.fullmatch(r"-\d+", word))
                or (word[:2] in values and not word.startswith("--"))
                or (not word.startswith("--") and all(f"-{letter}" in flags for letter in word[1:]))
                or (name == "xargs" and re.fullmatch(r"-[ile].+|--(replace|max-lines|eof)(=.*)?", word))
            ):
                return HIGH  # an option that is not understood, such as `env -S`
            if word in ("-v", "-V") and name == "command":
                return LOW
            left = left[1:]
        if name == "timeout":
            left = left[1:]
        if name == "env":
            while left and left[0] is not None and "=" in left[0]:
                if POISONED_VARIABLES.fullmatch(left[0].partition("=")[0]):
                    return HIGH
                left = left[1:]
        if not left:
            return read
        if left[0] is None:
            return HIGH
        # The arguments added by xargs are unknown.
        rest: list[str | None] = [*left[1:], None] if name == "xargs" else left[1:]
        risk = max(read, self._rate_program(left[0], rest, is_fed=is_fed and name != "xargs", depth=depth + 1))
        if name not in ("command", "builtin", "time"):
            self.paths = before
        return risk

    def _rate_find(self, arguments: Arguments, depth: int) -> Rating:
        risk, left = LOW, list(arguments)
        while left and left[0] is not None and re.match(r"-[HLP]$|-O|-D$", left[0]):
            left = left[2 if left[0] == "-D" else 1 :]
        roots = list[str | None]()
        while left and (left[0] is None or not re.match(r"[-(!]", left[0])):
            roots.append(left.pop(0))
        found = [None if root is None else f"{root}/found" for root in roots or ["."]]
        risk = max(self.paths.rate_reading(root) for root in roots or ["."])
        if "-files0-from" in left:
            return HIGH
        if sum(word in FIND_RUNS for word in left) > MAX_FIND_RUNS or len(found) > MAX_FIND_RUNS:
            return HIGH
        for position, word in enumerate(left):
            if word == "-delete":
                risk = max(risk, MEDIUM, *(self.paths.rate_writing(one) for one in found))
            elif word in FIND_WRITES:
                target = left[position + 1] if position + 1 < len(left) else None
                risk = max(risk, MEDIUM, self.paths.rate_writing(target))
            elif word in FIND_RUNS:
                run = list(takewhile(lambda word: word != ";", left[position + 1 :]))
                if not run or run[0] is None or any(word in FIND_RUNS for word in run):
                    return HIGH
                for one in found:
                    words = [_put_found(argument, one) for argument in run[1:] if argument != "+"]
                    program = _put_found(run[0], one)
                    if program is None:
                        return HIGH
                    risk = max(risk, self._rate_program(program, words, is_fed=False, depth=depth + 1))
        return risk

    def _rate_variables(self, node: tree_sitter.Node) -> Rating:
        names = [child for child in (node, *node.named_children) if child.type == "variable_assignment"]
        texts = [_to_text(name.child_by_field_name("name")) for name in names]
        texts += [_to_text(child) for child in node.named_children if child.type in ("variable_name", "word")]
        if any(POISONED_VARIABLES.fullmatch(text) for text in texts):
            return HIGH
        if node.type != "variable_assignment":
            # `declare` and `unset` take quoted words as well: their text is an assignment or a name.
            quoted = [child for child in node.named_children if child.type in ("raw_string", "string", "concatenation")]
            names_in_text = [ARRAY_ASSIGNMENT.sub("", _find_known_text(child) or "$") for child in quoted]
            return LOW if all(is_plain_variable(name) for name in names_in_text) else HIGH
        return LOW

    def _rate_redirect(self, node: tree_sitter.Node) -> Rating:
        destination = node.child_by_field_name("destination")
        if destination is None or re.fullmatch(r"\d+|-", _to_text(destination)):
            return LOW
        path = _find_known_text(destination)
        is_written = any(child.type in WRITES for child in node.children)
        return self.paths.rate_writing(path) if is_written else self.paths.rate_reading(path)


def _find_started(name: str, arguments: Arguments) -> Arguments | None:
    """Return the words of the program that a runner starts, with options before it; None if it starts none."""
    if name not in RUNNERS:
        return None
    verbs = TOX_VERBS if name == "tox" else RUN_VERBS
    left = list(arguments)
    if name == "hatch" and "env" in left and left[left.index("env") + 1 :][:1] == ["run"]:
        del left[left.index("env")]
    if left and left[0] is not None and left[0].startswith("-"):
        # An option may have a value, so the command is not surely the next word.
        at = next((position for position, word in enumerate(left) if word in verbs), None)
        return None if at is None else ["-", *left[at + 1 :]]
    if not left or left[0] not in verbs:
        return None
    return left[2:] if left[1:2] == ["--"] else left[1:]


def _rate_expansion(text: str) -> Rating:
    if RUNS_VALUE.search(text):
        return HIGH
    return UNCLEAR if INDIRECT.match(text) else LOW


def _put_found(argument: str | None, found: str | None) -> str | None:
    """Return an argument of `find -exec` with the path that was found."""
    if argument is None or "{}" not in argument:
        return argument
    return None if found is None else argument.replace("{}", found)


def _is_joined_by_and(node: tree_sitter.Node) -> bool:
    """Return whether the next command runs only if this one succeeds."""
    after = node.next_sibling
    return after is None or after.type == "&&"


def _is_part_of_list(node: tree_sitter.Node) -> bool:
    """Return whether a node is the `a && b` of `a && b && c`."""
    return node.type == "list" and node.next_sibling is not None and node.next_sibling.type == "&&"


def _hides_substitution(node: tree_sitter.Node) -> bool:
    """Return whether a quoted word of a node holds a substitution in a subscript, which bash runs."""
    return any(
        found.type in ("raw_string", "ansi_c_string") and HIDDEN_SUBSTITUTION.search(_to_text(found)) is not None
        for found in _walk(node, stop=("command", *OWN_PROCESS))
    )


def _rate_variable_test(node: tree_sitter.Node) -> Rating:
    words = [child for child in node.children if child.type not in ("!", "(", ")")]
    if len(words) != 2 or _to_text(words[0]) not in ("-v", "-R"):
        return LOW
    name = _find_known_text(words[1])
    return LOW if is_plain_variable(name) or POISONED_VARIABLES.fullmatch(name or "") else HIGH


def _find_known_text(node: tree_sitter.Node) -> str | None:
    """Return the value of a word at run time; None if it is unknown. A glob in a path stands for itself."""
    match node.type:
        case "word" | "number":
            text = _to_text(node)
            return None if "\\" in text or text.startswith("~+") else text
        case "raw_string":
            return _to_text(node)[1:-1]
        case "string":
            if any(child.type in UNKNOWN_TEXT for child in node.named_children):
                return None
            return ESCAPED.sub(r"\1", _to_text(node)[1:-1].replace("\\\n", ""))
        case "concatenation":
            if PLAIN_WORD.fullmatch(_to_text(node)):
                return _to_text(node)
            parts = [_find_known_text(child) for child in node.named_children]
            whole = "".join(part or "" for part in parts)
            # Text between the parts, such as a brace, is no named node.
            is_whole = sum(child.end_byte - child.start_byte for child in node.named_children) == (
                node.end_byte - node.start_byte
            )
            return whole if is_whole and None not in parts else None
    return None


def _find_known_words(node: tree_sitter.Node) -> list[str | None]:
    """Return the values of a word with `{a,b}` in it; None for a range of letters, or if there are too many."""
    left, words = [_find_known_text(node)], list[str | None]()
    if node.type not in ("word", "concatenation"):
        return [*left]
    while left:
        text = left.pop(0)
        found = BRACES.search(text) if text is not None else None
        if text is None or found is None:
            words.append(text)
        elif "," in found[1]:
            left[:0] = [text[: found.start()] + part + text[found.end() :] for part in found[1].split(",")]
        elif re.fullmatch(r"-?\d+(\.\.-?\d+)+", found[1]):
            left.insert(0, text[: found.start()] + "1" + text[found.end() :])
        else:
            return [None]
        if len(left) + len(words) > MAX_BRACE_WORDS:
            return [None]
    return words


def _has_braces(name: tree_sitter.Node) -> bool:
    """Return whether bash makes several words of a command's name: `r{m,m}` is the program `rm`."""
    is_quoted = name.named_children[0].type not in ("word", "concatenation")
    return not is_quoted and BRACES.search(_to_text(name)) is not None


def _to_text(node: tree_sitter.Node | None) -> str:
    return "" if node is None or node.text is None else node.text.decode("utf-8", "replace")


def _is_input(node: tree_sitter.Node) -> bool:
    return node.type == "file_redirect" and any(child.type == "<" for child in node.children)


def _calls_itself(node: tree_sitter.Node) -> bool:
    name = _to_text(node.child_by_field_name("name"))
    return name in _find_names(node.child_by_field_name("body"))


def _find_names(node: tree_sitter.Node | None) -> Sequence[str]:
    return [] if node is None else [_to_text(found) for found in _walk(node) if found.type == "command_name"]


def _walk(node: tree_sitter.Node, stop: Sequence[str] = ()) -> Iterator[tree_sitter.Node]:
    """Yield a node and all nodes below it, but none below nodes of the types `stop`."""
    left = [node]
    while left:
        found = left.pop()
        yield found
        if found.type not in stop:
            left.extend(found.named_children)
