"""The risk of each program: the effect of its options and operands on the workspace, and rules for small languages.

Holds: a script, or a program without an entry, is UNCLEAR, because its effect is unknown. An option that is not
understood has the highest risk that its program can have.
Does not: confine a program; the sandbox does. The risk is a hint for the user who confirms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from controller_worker.security.command_options import (
    Arguments,
    Program,
    Use,
    load_programs,
    parse_arguments,
    split_bundle,
)
from controller_worker.security.path_risk import HIGH, LOW, MEDIUM, UNCLEAR, Paths, Rating, names_secret


def _split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DANGEROUS = _split_words(
    "sudo su doas pkexec eval source . trap alias enable bind complete compgen fc history dd mkfs fdisk parted mount "
    "umount swapon swapoff losetup cryptsetup shutdown reboot halt poweroff init telinit systemctl service crontab at "
    "batch useradd userdel usermod groupadd passwd chpasswd visudo chroot unshare nsenter insmod rmmod modprobe sysctl "
    "iptables ip6tables nft ufw ssh scp sftp rsync ftp telnet nc ncat netcat socat nmap tcpdump gdb strace ltrace "
    "docker podman kubectl helm terraform aws gcloud az gpg ssh-add ssh-keygen twine script screen tmux expect "
    "parallel watch csh tcsh elvish systemd-run setcap wipefs blkdiscard mosh autossh sshpass sshfs pssh nerdctl mailx "
    "sendmail mutt swaks croc wormhole coproc"
)
POISONED_VARIABLES = re.compile(
    r"(PATH|HOME|IFS|ENV|BASH_ENV|BASH_FUNC_.*|BASHOPTS|SHELLOPTS|INPUTRC|PS[0-4]|PROMPT_COMMAND|EDITOR|.*_EDITOR|VISUAL"
    r"|.*PAGER|BROWSER|LESS.*|LD_.*|DYLD_.*|GCONV_PATH|PYTHON.*|PERL.*|RUBY.*|NODE_.*|LUA_.*|PHPRC|PHP_INI.*|TCLLIBPATH"
    r"|JAVA_TOOL_OPTIONS|_JAVA_OPTIONS|GIT_.*|SSH_.*|.*_RSH|.*_COMMAND|.*_PROXY|.*_proxy|CDPATH|GLOBIGNORE|TAR_OPTIONS|TAPE|ZIPOPT"
    r"|UNZIP|RIPGREP_CONFIG_PATH|WGETRC|CURL_HOME|XDG_CONFIG_.*|MAKEFLAGS|RUSTC.*|CARGO_.*|OPENSSL_CONF|PIP_.*"
    r"|NPM_CONFIG_.*|npm_config_.*)(\[.*)?",
    re.DOTALL,
)
"""Variables that change the behavior of other programs."""
VARIABLE = re.compile(r"[A-Za-z_]\w*(\[[\w@*-]+\])?", re.ASCII)
ARITHMETIC = re.compile(r"[\w\s+\-*/%=<>!&|^~?:,()\[\]#@]*", re.ASCII)
"""Text that bash can evaluate as arithmetic and that starts nothing; a substitution in a subscript does."""
INTERPRETERS = re.compile(r"(python|pypy|node|deno|bun|perl|ruby|php|lua|Rscript|tclsh|osascript|irb)[\d.]*")
INLINE_FLAG = re.compile(
    r"-[a-zA-Z]*[ceEpr]|-[a-zA-Z]*[ce].*|--(eval|print|command|execute|require|import|loader|experimental-loader).*",
    re.DOTALL,
)
INTERPRETER_VALUES: Mapping[str, str] = {"python": "WX", "pypy": "WX", "perl": "I", "ruby": "CI", "php": "dt"}
"""Short options that take the next word; a program in the text may follow it."""
LOADING_FLAG: Mapping[str, re.Pattern[str]] = {
    "perl": re.compile(r"-\w*[mM].*"),
    "php": re.compile(r"-\w*[BRFSd].*"),
    "lua": re.compile(r"-\w*l.*"),
}
MODULES_THAT_RUN = _split_words(
    "timeit pdb code cProfile profile trace http.server smtplib ensurepip idlelib webbrowser"
)
RUNS_SHELL = re.compile(r"system\s*\(|\||getline|@|>")
SIMPLE_START = re.compile(r"\+(\d*[gG%]?|F|/[^\n\r\x1b!|]*)")
"""Where a pager or an editor starts; any other `+` is a command."""
GIT_QUIET = _split_words("--no-pager -P --no-optional-locks --literal-pathspecs --no-replace-objects")
GIT_READS = _split_words("status diff log show branch blame rev-parse ls-files describe shortlog grep remote tag")
GIT_CHANGES = _split_words(
    "add am apply archive branch bundle checkout checkout-index cherry cherry-pick clean clone commit commit-tree "
    "count-objects diff-files diff-index diff-tree fast-export fast-import fetch format-patch fsck gc hash-object "
    "init lfs log ls-remote ls-tree cat-file merge merge-base merge-file merge-tree mktree mv name-rev notes "
    "pack-refs prune pull range-diff read-tree rebase reflog remote repack replace reset restore rev-list revert "
    "rm sparse-checkout stash stripspace switch symbolic-ref tag update-index update-ref var verify-commit "
    "version help whatchanged worktree write-tree check-ignore check-attr for-each-ref show-ref"
)
"""Commands of git; any other word may be an alias, which can be any program."""
GIT_SENDS = _split_words(
    "push send-email imap-send request-pull config filter-branch daemon credential submodule difftool mergetool "
    "p4 svn send-pack instaweb web--browse gui citool hook for-each-repo maintenance http-backend shell bisect "
    "remote-ext remote-fd"
)
GIT_RUNS = [
    "--ext-diff",
    "--textconv",
    "--upload-pack",
    "--receive-pack",
    "--exec",
    "--extcmd",
    "--open-files-in-pager",
    "--template",
    "--config",
    "--unsafe-paths",
    "--remote",
    "--edit-description",
    "--parseopt",
    "--gpg-program",
    "--output-directory-script",
]
GIT_RUNS_SHORT: Mapping[str, str] = {"clone": "cu", "rebase": "x", "grep": "O"}
PUBLISHES = _split_words("publish unpublish login adduser token owner deploy release")
PACKAGERS = _split_words("pip pip3 npm yarn pnpm cargo gem uv poetry apt apt-get")
PACKAGER_RUNS: Mapping[str, re.Pattern[str]] = {
    **dict.fromkeys(("apt", "apt-get"), re.compile(r"-[a-z]*[oc].*|--(opt|conf).*")),
    **dict.fromkeys(("pip", "pip3"), re.compile(r"--edi.*")),
    **dict.fromkeys(("npm", "yarn", "pnpm"), re.compile(r"--(script-shell|shell|git|viewer|editor)(=.*)?")),
    "cargo": re.compile(r"--config(=.*)?"),
    "gem": re.compile(r"-e.*|--edi.*"),
}
"""Options of package managers that name a program."""


def rate_command(name: str, arguments: Arguments, paths: Paths) -> Rating:
    """Return the risk of one program with its arguments.

    Args:
        name: the program, without its directory.
        paths: rates the paths in the arguments.
    """
    if name in DANGEROUS or name.startswith("mkfs."):
        return HIGH
    risk = _rate_by_program(name, arguments, paths)
    # What the program does with a path may be unknown; that it gets one of a secret is not.
    is_given_secret = any(word is not None and names_secret(word) for word in arguments)
    return HIGH if risk in (MEDIUM, UNCLEAR) and is_given_secret else risk


def _rate_by_program(name: str, arguments: Arguments, paths: Paths) -> Rating:
    rule = _RULES.get(name)
    if rule is not None:
        return rule(arguments, paths)
    understood, known = load_programs()
    if name in understood:
        return _rate_arguments(understood[name], arguments, paths)
    interpreter = INTERPRETERS.fullmatch(name)
    if interpreter:
        return _rate_interpreter(interpreter[1], arguments, paths)
    return _rate_arguments(known[name], arguments, paths) if name in known else UNCLEAR


def starts_operand(name: str) -> bool:
    """Return whether a program is known to start the program that an operand names."""
    understood, known = load_programs()
    return name in known and known[name].starts_operand and not (name in understood or name in _RULES)


def _rate_arguments(program: Program, arguments: Arguments, paths: Paths) -> Rating:
    if program.is_opaque:
        return HIGH
    risks, operands = [program.least], 0
    for use, value in parse_arguments(program, arguments):
        match use:
            case Use.RUNS | Use.SENDS:
                return HIGH
            case Use.UNKNOWN:
                risks.append(HIGH if program.is_capable else UNCLEAR)
            case Use.READS:
                risks.append(paths.rate_reading(value))
            case Use.WRITES:
                risks.append(paths.rate_writing(value))
            case Use.OPERAND:
                risks.append(_rate_operand(program, value, operands, paths))
                operands += 1
    if program.here:
        risks.append(paths.rate_writing("./file") if program.here == "writes" else paths.rate_reading("."))
    return max(risks)


def _rate_operand(program: Program, value: str | None, position: int, paths: Paths) -> Rating:
    if value is not None and program.options.get(value.partition("=")[0]) in (Use.RUNS, Use.SENDS):
        return HIGH  # a setting of make, or a command such as `publish`
    if value is not None and value.startswith("+") and program.operands in ("reads", "editor"):
        return LOW if SIMPLE_START.fullmatch(value) else HIGH
    match program.operands:
        case "text":
            return LOW
        case "sends":
            return HIGH
        case "reads":
            return paths.rate_reading(value)
        case "edits":
            return paths.rate_writing(None if value is None else f"{value}/file")
        case "output" if position == 0:
            return paths.rate_reading(value)
    return paths.rate_writing(value)


def _rate_interpreter(language: str, arguments: Arguments, paths: Paths) -> Rating:
    """Rate an interpreter. Neither a script nor a program in its arguments or standard input is examined."""
    if not arguments:
        return HIGH
    if any(word in ("--version", "-V", "--help", "-h") for word in arguments[:1]):
        return LOW
    takes_value = INTERPRETER_VALUES.get(language, "")
    loading = LOADING_FLAG.get(language)
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word is None or word == "-":
            return HIGH
        if word == "-m" and language in ("python", "pypy"):
            return _rate_module(left, paths)
        if INLINE_FLAG.fullmatch(word) or (loading and loading.fullmatch(word)):
            return HIGH
        if not word.startswith("-"):
            return HIGH if word.startswith(("/dev/", "/proc/", "data:", "http:", "https:")) else UNCLEAR
        if len(word) > 1 and word[-1] in takes_value and not word.startswith("--"):
            left = left[1:]
    return HIGH


def _rate_module(words: Arguments, paths: Paths) -> Rating:
    """Rate `python -m`: a module that is a program on its own counts as that program."""
    module = words[0] if words else None
    if module is None or module in MODULES_THAT_RUN:
        return HIGH
    return max(MEDIUM, rate_command(module, words[1:], paths))


def _rate_awk(arguments: Arguments, paths: Paths) -> Rating:
    uses = list(parse_arguments(load_programs()[0]["awk"], arguments))
    if any(use in (Use.RUNS, Use.UNKNOWN) for use, _ in uses):
        return HIGH
    operands = [value for use, value in uses if use is Use.OPERAND]
    writes = max((paths.rate_writing(value) for use, value in uses if use is Use.WRITES), default=LOW)
    if not operands:
        return writes if arguments and None not in arguments else HIGH
    if operands[0] is None or RUNS_SHELL.search(operands[0]):
        return HIGH
    return max([writes, *(paths.rate_reading(value) for value in (".", *operands[1:]))])


def _rate_sed(arguments: Arguments, paths: Paths) -> Rating:
    words, is_in_place = list[str | None](), False
    for word in arguments:
        in_place = re.fullmatch(r"-([nErsuz]*)i(.*)|--in-(?:p|pl|pla|plac|place)(?:=(.*))?", word or "", re.DOTALL)
        if in_place and "/" in (in_place[2] or in_place[3] or ""):
            return HIGH
        is_in_place = is_in_place or in_place is not None
        words += [word] if in_place is None else [f"-{in_place[1]}"] if in_place[1] else []
    uses = list(parse_arguments(load_programs()[0]["sed"], words))
    if any(use in (Use.RUNS, Use.UNKNOWN) for use, _ in uses):
        return HIGH
    scripts = [value for use, value in uses if use is Use.VALUE]
    names = [value for use, value in uses if use is Use.OPERAND]
    if not scripts:
        # The `sed -i ''` of BSD: there, the empty word is a suffix, and the script follows.
        end = 2 if names[:1] == [""] else 1
        scripts, names = names[:end], names[1:]
    risks = [_rate_sed_script("\n".join(script or "" for script in scripts), paths) if None not in scripts else HIGH]
    rate = paths.rate_writing if is_in_place else paths.rate_reading
    return max([*risks, paths.rate_reading("."), *(rate(name) for name in names)])


SED_ADDRESS = re.compile(
    r"(\d+|\$|/((?:\\.|[^/\\])*)/[IM]*|\\(.)(?:\\.|(?!\3).)*\3[IM]*)([~,+!\s]+(?=[\d$/\\])|~)?", re.DOTALL
)
SED_COMMAND = re.compile(
    r"(?P<plain>[=dDgGhHnNpPxzFlqQ]\s*\d*\s*(?=[;}\n#]|$))|(?P<label>[:btT][^;\n}]*)|(?P<text>[aic](?:\\.|[^\\\n])*)"
    r"|(?P<read>[rR][ \t]*(?P<path>[^\n]*))"
    r"|(?P<change>[sy](?P<mark>[^\\\n])(?:\\.|(?!(?P=mark))[^\\])*(?P=mark)(?:\\.|(?!(?P=mark))[^\\])*(?P=mark)"
    r"[gpiIMm0-9]*\s*(?=[;}\n#]|$))|(?P<comment>\#[^\n]*)",
    re.DOTALL,
)


def _rate_sed_script(script: str, paths: Paths) -> Rating:
    """Rate a script of sed. HIGH for `e` and `w`, as command or flag, and for parts that are not understood."""
    position, risk = 0, LOW
    while position < len(script):
        if script[position] in " \t\n;{}!,~+":
            position += 1
            continue
        found = SED_ADDRESS.match(script, position)
        command = None if found else SED_COMMAND.match(script, position)
        if command is None and found is None:
            return HIGH
        if command is not None and command["read"] is not None:
            risk = max(risk, paths.rate_reading(command["path"]))
        position = (found or command).end()  # type: ignore[union-attr]
    return risk


def _rate_git(arguments: Arguments, paths: Paths) -> Rating:
    words = [word for word in arguments if word is not None]
    if not words or len(words) < len(arguments):
        return HIGH
    while len(words) > 1 and words[0] in GIT_QUIET:
        words = words[1:]
    verb, rest = words[0], words[1:]
    if verb.startswith("-"):  # a setting or another repository, which may name programs to run
        return LOW if verb in ("--version", "--help", "--no-pager") and not rest else HIGH
    if verb in GIT_SENDS or any(_starts_programs(verb, word) for word in rest):
        return HIGH
    is_listing = verb not in ("branch", "remote", "tag") or not rest
    if verb in GIT_READS and is_listing:
        # The similarity of a rename is not a separate option: `-M90%`.
        words = [word for word in rest if not re.fullmatch(r"-[MCB][\d%/]+", word)]
        return _rate_arguments(load_programs()[0]["git-read"], words, paths)
    written = [word.partition("=")[2] if word.startswith("--") else word.removeprefix("-o") for word in rest]
    known = MEDIUM if verb in GIT_READS | GIT_CHANGES else UNCLEAR
    return max([known, *(paths.rate_writing(word) for word in written if word.startswith(("/", "~")))])


def _starts_programs(verb: str, word: str) -> bool:
    """Return whether an argument of git, possibly abbreviated, names a program."""
    if re.match(r"[A-Za-z][\w+.-]*::", word):
        return True
    if not word.startswith("--"):
        letters = GIT_RUNS_SHORT.get(verb, "")
        return word.startswith("-") and any(letter in word for letter in letters)
    name = word.partition("=")[0]
    return len(name) > 4 and any(option.startswith(name) for option in GIT_RUNS)


def _rate_packager(name: str) -> Callable[[Arguments, Paths], Rating]:
    runs = PACKAGER_RUNS.get(name)

    def rate(arguments: Arguments, paths: Paths) -> Rating:
        words = [word for word in arguments if word is not None]
        if len(words) < len(arguments) or not PUBLISHES.isdisjoint(words):
            return HIGH
        if runs and any(runs.fullmatch(word) for word in words):
            return HIGH
        # A directory is where it installs to, or what it installs from.
        places = [word.rpartition("=")[2] for word in words]
        return max(
            [MEDIUM, *(paths.rate_writing(f"{place}/file") for place in places if place.startswith(("/", "~", "..")))]
        )

    return rate


def _rate_kill(arguments: Arguments, _: Paths) -> Rating:
    return HIGH if any(word is None or word in ("1", "-1", "0") for word in arguments[-1:]) else MEDIUM


def is_plain_variable(name: str | None) -> bool:
    """Return whether a built-in can assign or test a variable without more: a subscript may hold a substitution."""
    return name is not None and VARIABLE.fullmatch(name) is not None and not POISONED_VARIABLES.fullmatch(name)


def _rate_names(names: Sequence[str | None]) -> Rating:
    return LOW if all(is_plain_variable(name) for name in names) else HIGH


def _rate_let(arguments: Arguments, _: Paths) -> Rating:
    is_plain = all(
        word is not None
        and ARITHMETIC.fullmatch(word)
        and not any(POISONED_VARIABLES.fullmatch(name) for name in re.findall(r"\w+(?=\s*\W?=)", word))
        for word in arguments
    )
    return LOW if is_plain else HIGH


def _rate_test(arguments: Arguments, _: Paths) -> Rating:
    follow = [after for before, after in pairwise(arguments) if before in ("-v", "-R")]
    return LOW if all(name is not None and VARIABLE.fullmatch(name) for name in follow) else HIGH


def _rate_printf(arguments: Arguments, _: Paths) -> Rating:
    first = arguments[0] if arguments else ""
    if first is None or not first.startswith("-v"):
        return LOW
    return _rate_names([first[2:] or (arguments[1] if len(arguments) > 1 else "x")])


def _name_options(values: str, names: str = "") -> Program:
    """Return a built-in whose operands, and the values of its options `names`, are names of variables."""
    options = {f"-{letter}": Use.VALUE for letter in values} | {f"-{letter}": Use.OPERAND for letter in names}
    return Program(options=options, least=LOW)


_NAMING_BUILTINS: Mapping[str, Program] = {
    "read": _name_options("dinNptu", "a"),
    "unset": _name_options(""),
    "wait": _name_options("", "p"),
    "mapfile": _name_options("dnOsuc"),
    "readarray": _name_options("dnOsuc"),
}


def _rate_naming(name: str) -> Callable[[Arguments, Paths], Rating]:
    def rate(arguments: Arguments, _: Paths) -> Rating:
        uses = list(parse_arguments(_NAMING_BUILTINS[name], arguments))
        is_array = name in ("mapfile", "readarray")
        if is_array and any(word is None or word.startswith("-C") for word in arguments):
            return HIGH
        names = [value for use, value in uses if use is Use.OPERAND]
        if name == "wait":
            names = [value for value in names if value is None or not re.fullmatch(r"\d+|%.*", value)]
            names = [value for value in names if value is not None or "-p" in arguments]
        return max(_rate_names(names), MEDIUM if is_array else LOW)

    return rate


def _rate_getopts(arguments: Arguments, _: Paths) -> Rating:
    return _rate_names(arguments[1:2])


def _rate_tar(arguments: Arguments, paths: Paths) -> Rating:
    program = load_programs()[0]["tar"]
    words = split_bundle(program, arguments)
    # An archive on another machine is reached by a program: `host:path`.
    is_remote = any(
        use is Use.WRITES and value is not None and ":" in value for use, value in parse_arguments(program, words)
    )
    return HIGH if is_remote and "--force-local" not in words else _rate_arguments(program, words, paths)


def _rate_curl(arguments: Arguments, paths: Paths) -> Rating:
    if any(word is None or "%output" in word for word in arguments):
        return HIGH
    return _rate_arguments(load_programs()[0]["curl"], arguments, paths)


def _rate_wget(arguments: Arguments, paths: Paths) -> Rating:
    return HIGH if None in arguments else _rate_arguments(load_programs()[0]["wget"], arguments, paths)


def _rate_yq(arguments: Arguments, paths: Paths) -> Rating:
    if any(word is not None and re.fullmatch(r"-[CMNPejnrvcS0]*i.*|--in-?place", word) for word in arguments):
        operands = [word for word in arguments if word is None or not word.startswith("-")]
        return max((paths.rate_writing(word) for word in operands[1:]), default=HIGH)
    return _rate_arguments(load_programs()[0]["yq"], arguments, paths)


def _rate_database(arguments: Arguments, paths: Paths) -> Rating:
    """Rate a client of a database; its commands can start a shell."""
    shell = re.compile(
        r"(^|[\n;])\s*(\.(shell|system|output|once|import|load|read|save|backup|excel)|\\[!ogw]|system\b)"
    )
    if any(word is None or shell.search(word) or re.search(r"\bPROGRAM\b", word) for word in arguments):
        return HIGH
    return max([MEDIUM, *(paths.rate_writing(word) for word in arguments if word and word.startswith(("/", "~")))])


_RULES: Mapping[str, Callable[[Arguments, Paths], Rating]] = {
    **dict.fromkeys(("awk", "gawk", "mawk", "nawk"), _rate_awk),
    **dict.fromkeys(("kill", "pkill", "killall"), _rate_kill),
    **dict.fromkeys(("sqlite3", "psql", "mysql", "mariadb"), _rate_database),
    **dict.fromkeys(("test", "["), _rate_test),
    **dict.fromkeys(("tar", "bsdtar"), _rate_tar),
    **dict.fromkeys(("wget", "wget2"), _rate_wget),
    **{name: _rate_packager(name) for name in PACKAGERS},
    **{name: _rate_naming(name) for name in _NAMING_BUILTINS},
    "curl": _rate_curl,
    "getopts": _rate_getopts,
    "git": _rate_git,
    "let": _rate_let,
    "printf": _rate_printf,
    "sed": _rate_sed,
    "yq": _rate_yq,
}
