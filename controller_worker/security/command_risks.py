"""The risk of each program: tables, and rules for programs with decisive arguments.

Holds: a program without an entry is MEDIUM: its name is known, its effect is not.
Does not: contain anything; the sandbox does. The risk is a hint for the user who confirms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from broker.contract import ActionSecurityRisk
from controller_worker.security.path_risk import rate_reading, rate_writing

LOW, MEDIUM, HIGH = ActionSecurityRisk.LOW, ActionSecurityRisk.MEDIUM, ActionSecurityRisk.HIGH

Arguments = Sequence[str | None]
"""The words after the program's name; None for a word that is unknown before it runs."""


def _split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


READERS = _split_words(
    "ls cat head tail wc grep egrep fgrep rg ag tree file stat du df diff cmp comm sort uniq cut tr nl od xxd hexdump "
    "strings md5sum sha1sum sha256sum cksum readlink realpath column paste fold jq yq less more zcat bat"
)
"""Programs that only read the paths in their arguments."""
HARMLESS = _split_words(
    "echo printf pwd cd true false : test [ date whoami id uname hostname basename dirname seq sleep wait jobs type "
    "which whereis printenv env ps top free uptime nproc arch expr let read shift return exit break continue set unset "
    "local readonly pushd popd dirs hash times ulimit umask getopts clear tput yes"
)
WRITERS = _split_words("cp mv ln tee touch mkdir rmdir install truncate split patch unzip tar gzip gunzip zip xz")
"""Programs that write the paths in their arguments."""
DESTROYERS = _split_words("rm unlink shred")
PERMISSIONS = _split_words("chmod chown chgrp setfacl chattr")
DANGEROUS = _split_words(
    "sudo su doas pkexec eval source . trap alias enable bind complete fc history dd mkfs fdisk parted mount umount "
    "swapon swapoff losetup cryptsetup shutdown reboot halt poweroff init telinit systemctl service crontab at batch "
    "useradd userdel usermod groupadd passwd chpasswd visudo chroot unshare nsenter insmod rmmod modprobe sysctl "
    "iptables ip6tables nft ufw ssh scp sftp rsync ftp telnet nc ncat netcat socat nmap tcpdump gdb strace ltrace "
    "docker podman kubectl helm terraform aws gcloud az gpg ssh-add ssh-keygen twine script screen tmux expect "
    "parallel watch"
)
DOWNLOADERS = frozenset(("curl", "wget"))
UPLOAD_FLAG = re.compile(
    r"-[a-zA-Z]*[dFTKX].*|--(data.*|json|form.*|upload-file|post-.*|body-.*|request|method|config|proxy.*|output-dir"
    r"|use-askpass|execute)(=.*)?",
    re.DOTALL,
)
INTERPRETERS = re.compile(r"(python|pypy|node|deno|bun|perl|ruby|php|lua|Rscript|tclsh|osascript|irb)[\d.]*")
INLINE_FLAG = re.compile(r"-[a-zA-Z]*[ceEpr]|--(eval|print|command|execute|require|import).*")
AWKS = frozenset(("awk", "gawk", "mawk", "nawk"))
RUNS_SHELL = re.compile(r"system\s*\(|\||getline|@load|>")
SED_RUNS_OR_WRITES = re.compile(r"(^|[;{\s\d$/])[ewW]\b|/[gpiIm\d]*[ew][gpiIm\d]*(\s|;|$|})")
GIT_READS = _split_words("status diff log show branch blame rev-parse ls-files describe shortlog grep remote tag")
GIT_SENDS = _split_words("push send-email request-pull config filter-branch daemon credential submodule")
PUBLISHES = _split_words("publish unpublish login adduser token owner deploy release")
PACKAGERS = _split_words("pip pip3 npm yarn pnpm cargo gem uv poetry apt apt-get")


def rate_command(name: str, arguments: Arguments, workspace: str) -> ActionSecurityRisk:
    """Return the risk of one program with its arguments.

    Args:
        name: the program, without its directory.
        workspace: the directory that may be changed.
    """
    if name in DANGEROUS or name.startswith("mkfs."):
        return HIGH
    if name in HARMLESS:
        return LOW
    rule = _RULES.get(name)
    if rule is not None:
        return rule(arguments, workspace)
    if name in READERS:
        return _rate_reads(arguments, workspace)
    if name in WRITERS:
        return max(LOW, _rate_writes(arguments, workspace))
    if name in DESTROYERS | PERMISSIONS:
        return max(MEDIUM, _rate_writes(arguments, workspace))
    return _rate_interpreter(arguments) if INTERPRETERS.fullmatch(name) else MEDIUM


def _rate_reads(arguments: Arguments, workspace: str) -> ActionSecurityRisk:
    return max((rate_reading(word, workspace) for word in _find_values(arguments)), default=LOW)


def _rate_writes(arguments: Arguments, workspace: str) -> ActionSecurityRisk:
    return max((rate_writing(word, workspace) for word in _find_values(arguments)), default=LOW)


def _find_values(arguments: Arguments) -> list[str | None]:
    """Return the arguments, with the values of options: `--target=/etc` names a path."""
    return [
        word.partition("=")[2] if word is not None and word.startswith("-") else word
        for word in arguments
        if word is None or not word.startswith("-") or "=" in word
    ]


def _rate_download(arguments: Arguments, workspace: str) -> ActionSecurityRisk:
    if any(word is None or UPLOAD_FLAG.fullmatch(word) for word in arguments):
        return HIGH
    follows_output = [word for flag, word in pairwise(arguments) if flag in ("-o", "-O", "--output", "-P")]
    return max(
        [MEDIUM, *(rate_writing(word, workspace) for word in follows_output if word is None or "://" not in word)]
    )


def _rate_interpreter(arguments: Arguments) -> ActionSecurityRisk:
    """Rate an interpreter. Neither a script nor a program in its arguments or standard input is examined."""
    if not arguments:
        return HIGH
    if any(word in ("--version", "-V", "--help", "-h") for word in arguments):
        return LOW
    for word in arguments:
        if word is None or word == "-":
            return HIGH
        if word == "-m":
            return MEDIUM
        if INLINE_FLAG.fullmatch(word):
            return HIGH
        if not word.startswith("-"):
            return MEDIUM
    return HIGH


def _rate_awk(arguments: Arguments, workspace: str) -> ActionSecurityRisk:
    program = next((word for word in arguments if word is None or not word.startswith("-")), None)
    if program is None or any(word in ("-f", "--file", "-i", "-l", "-E") for word in arguments):
        return HIGH
    return HIGH if RUNS_SHELL.search(program) else _rate_reads(arguments[arguments.index(program) + 1 :], workspace)


def _rate_sed(arguments: Arguments, workspace: str) -> ActionSecurityRisk:
    if any(word is None or word.startswith(("-f", "--file")) or SED_RUNS_OR_WRITES.search(word) for word in arguments):
        return HIGH
    is_in_place = any(word is not None and re.match(r"-[a-zA-Z]*i|--in-place", word) for word in arguments)
    names = [word for word in arguments if word is not None and not word.startswith("-")][1:]
    return _rate_writes(names, workspace) if is_in_place else _rate_reads(names, workspace)


def _rate_git(arguments: Arguments, _: str) -> ActionSecurityRisk:
    if not arguments or any(word is None for word in arguments):
        return HIGH
    verb = arguments[0] or ""
    if verb.startswith("-"):  # a setting or another repository, which may name programs to run
        return LOW if verb in ("--version", "--help", "--no-pager") and len(arguments) == 1 else HIGH
    if verb in GIT_SENDS or any(word is not None and re.match(r"--(ext|upload-pack|exec)", word) for word in arguments):
        return HIGH
    is_listing = verb not in ("branch", "remote", "tag") or len(arguments) == 1
    return LOW if verb in GIT_READS and is_listing else MEDIUM


def _rate_packager(arguments: Arguments, _: str) -> ActionSecurityRisk:
    return HIGH if any(word is None or word in PUBLISHES for word in arguments) else MEDIUM


def _rate_kill(arguments: Arguments, _: str) -> ActionSecurityRisk:
    return HIGH if any(word is None or word in ("1", "-1", "0") for word in arguments[-1:]) else MEDIUM


_RULES: Mapping[str, Callable[[Arguments, str], ActionSecurityRisk]] = {
    **dict.fromkeys(DOWNLOADERS, _rate_download),
    **dict.fromkeys(AWKS, _rate_awk),
    **dict.fromkeys(PACKAGERS, _rate_packager),
    **dict.fromkeys(("kill", "pkill", "killall"), _rate_kill),
    "sed": _rate_sed,
    "git": _rate_git,
}
