"""The figures page: what was tried to make the promises fail, and what was seen.

`make proof` runs the suites of each section within a limit of time, keeps their results in docs/proof/SECTION.json, and
renders docs/proof.md and the block of README.md between the marks `proof`. `python -m tests.proof SECTION …` runs some
sections, `python -m tests.proof --render` none.

A test hands in what it measured with the fixture `proof`:

    proof.record("kills of workers", trials=500, failures=0, unit="kills", seed=7, figures={"takeover, p99": "2.1 s"})

Holds: no figure is on the page that a command of its section did not measure; a section that was not run keeps its
earlier results with their date. A suite that failed is shown as failed. Where each run draws other trials, the page adds the
trials of all runs up, those with failures too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree as ET

from tests.source_code import ROOT

KEPT = ROOT / "docs" / "proof"
PAGE = ROOT / "docs" / "proof.md"
README = ROOT / "README.md"
START, END = "<!-- proof: written by `make proof` -->", "<!-- end of proof -->"
OPTION = "--proof"
"""The option of pytest that names the folder of the records; `python -m tests.simulation` has it too."""
LIMIT = "--proof-seconds"
"""The option of pytest that names a section's limit of time, for tests whose trials can end earlier."""
SECONDS = 1_800.0
ENDING_SECONDS = 60.0
INTRODUCTION = (
    "What was tried to make the promises of Deckhands fail, and what was seen. `make proof` measures every figure on "
    "this page and writes it; a section that it did not run keeps its earlier results with their date. A failure that "
    "did not happen in N trials happens, with 95 % confidence, in fewer than 3/N of such trials: that is the column "
    "*bound*."
)


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: that of its file, and of its heading's anchor.
        promise: what would be broken by a failure.
        method: how it is tried, without figures.
        limits: what is not shown.
        arguments: what `python -m` runs; `SECONDS` stands for the limit of time.
        is_added_up: each run draws other trials of the section's first record.
    """

    name: str
    title: str
    promise: str
    method: str
    arguments: Sequence[str]
    limits: str = ""
    is_added_up: bool = False

    @property
    def command(self) -> str:
        """The command, as users type it."""
        return " ".join(["python -m", *(f"'{each}'" if " " in each else each for each in self.arguments)])


SECTIONS = (
    Section(
        "fail-over",
        "Fail-over of the store",
        "With `acks` replica, an event that was acknowledged survives every fail-over, ids have no gap, no event is "
        "written twice, and no former owner writes after a later one "
        "([when a write counts](deployment.md#when-a-write-counts)).",
        "Four groups side by side, three of Valkey and one of Redis, each of a primary, two replicas and three "
        "Sentinels, with six conversations. In every conversation, owners follow each other: each claims it, appends "
        "up to 40 events, and leaves; a producer appends to it, too. The primary is killed, replaced by an order, "
        "stopped, or cut off, as a seed draws. Calls and acknowledgements are recorded as they happen; at the end, "
        "`tests/fail_over_history.py`, which uses nothing of the product, compares them with the raw streams. It finds "
        "planted contradictions of eight kinds (`tests/faults/test_fail_over_history.py`). In the second test, the group "
        "is the primary of a slot with two replicas, in a cluster of nine servers of Valkey and in one of Redis; in the "
        "third one, real workers run conversations while the primary is killed.",
        [
            *(
                "pytest",
                "tests/faults/test_many_fail_overs.py",
                "-k",
                "thousand or many_fail_overs_in or workers_continue",
            ),
            *(LIMIT, "SECONDS"),
        ],
        "A Sentinel that alone takes a living replica for down leaves it out; if another Sentinel then promotes just "
        "that replica, its gap counts as lost. Several groups on one machine share its clock. Further faults of Sentinels and of `acks` are in `tests/faults/test_sentinel.py`, "
        "`tests/faults/test_sentinel_faults.py` and `tests/integration/test_acks.py`. Every replica that Sentinels may "
        "promote has to confirm, because one of them is not enough "
        "([decision 41](decisions/0041-sentinels-and-when-a-write-counts.md)).",
        is_added_up=True,
    ),
    Section(
        "pairs",
        "Pairs of faults in simulation",
        "Every accepted conversation ends; its log has no gap, one observation for each action, and nothing of a "
        "former owner; no command runs twice; nothing is left over; and each recovery stays within its bound.",
        "The product's workers, core and store functions run on virtual time with a store in memory "
        "(`tests/simulation`). A run of the canonical conversation has a first fault at one of its boundaries, which "
        "are before and after each command to the store, and a second one up to 34 boundaries later. The fourteen "
        "faults: a process is killed, stopped for longer or shorter than its heartbeat lives, loses its connection, "
        "or has a wrong clock; all workspace hosts, or a whole machine, die; the network is slow; all heartbeats "
        "lapse; the store restarts, fails over, loses its tail, refuses writes, or its clock jumps. Sections of the "
        "sweep continue where an earlier one ended; a failing run is shrunk and printed with its command.",
        ["tests.simulation", "pairs", "--seconds", "SECONDS"],
    ),
    Section(
        "hours",
        "Hours of clusters at work",
        "A cluster at work loses and doubles nothing, however long its calls and commands take: every conversation ends, "
        "its log is correct, no action runs twice, and every message of a person is in it once.",
        "A cluster hour is an hour of virtual time of two controller and two tool workers with four conversations "
        "(`tests/simulation/hours.py`). A model call takes a log-normal time with a median of 22 s, a command one with a "
        "median of 15 s and a mean of a minute and a half, up to three hours, and a person answers after two minutes in "
        "the median; 3 % of the calls are refused for half a minute. Of the fourteen faults, one strikes every four "
        "minutes on average, at one of the next 40 boundaries. A message to the store travels up to 20 ms. A span in "
        "which nothing travels, nothing is due, and all workers would only repeat their beats is left out, up to the end "
        "of a call, a command or a pause, and after a fault only when all have beaten again (`tests/simulation/leaps.py`); "
        "without these leaps, a run has the same logs (`tests/simulation/test_hours.py`). Each seed is another cluster.",
        ["tests.simulation", "hours", "--seconds", "SECONDS"],
        "The rate depends on what else the machine does.",
    ),
    Section(
        "planted",
        "Planted bugs",
        "The simulation finds errors of the protocol: each planted one makes one of its checks fail.",
        "Each bug changes one behaviour of the store's functions, of a connection, or of the workspace host. Most are "
        "looked for by the general search (`tests/simulation/general.py`): runs of four kinds of work under faults, which "
        "are the same for each bug. Bugs of the front door are looked for by a separate search "
        "(`tests/simulation/arrivals.py`), which is the same for each of them. The others have a plan of their own. A bug "
        "counts as found when a check fails that holds without it.",
        [
            *("pytest", "tests/simulation/test_general_search.py", "tests/simulation/test_arrivals.py"),
            "tests/simulation/test_planted_bugs.py",
        ],
    ),
    Section(
        "verification",
        "Verification of logs",
        "`deckhands verify` accepts every log of a correct cluster, and refuses logs that none writes.",
        "Recorded logs, each beginning of one, and mutated ones: events dropped, doubled, swapped or forged "
        "([the rules](replay.md#verification)).",
        ["pytest", "tests/replay/test_specification.py"],
    ),
    Section(
        "isolation",
        "Sandbox and tenants",
        "A command does not leave its sandbox and its bounds, and the server answers nobody without a key that allows "
        "the request: no conversation is reached with the key of another tenant.",
        "Ways out of a workspace (`tests/security/escape_probes.py`) are tried in a bubblewrap sandbox, and most of them "
        "without one, where they have to lead somewhere. Programs take all the processes, memory, descriptors and disk "
        "that they can get. At the server, every HTTP route is asked with no key, with nonsense, with an expired and a "
        "revoked key, with one that lacks just the scope, with one of another tenant, and with one that may; the routes "
        "are compared with the documentation, so that none is left out. WebSockets have a test of their own.",
        [
            *("pytest", "tests/security/test_escapes.py", "tests/security/test_sandbox.py"),
            *("tests/security/test_bounds.py", "tests/end_to_end/test_server_access.py", "-m", "not docker"),
        ],
        "Containers as the sandbox have the same ways out as a test of `make test-docker`.",
    ),
    Section(
        "effects",
        "No effect twice",
        "Every action has a key that each kind of tool gets ([keys](tools.md#a-key-for-each-action)). Whichever process "
        "dies, the effect of an action whose success the log states took place, and none took place twice; where the "
        "outcome is not known, the log says so.",
        "Two conversations at a time by each of three ways in (client, Celery task, HTTP server), each under its "
        "idempotency key. Each has eight actions: two commands, an idempotent, a checkable and an at-most-once tool, two "
        "tools of an MCP server over HTTP, and a Celery task. All report to a ledger, a program that knows nothing of "
        "Deckhands: it writes a request to its file, synchronizes it, and answers 0.15 s later, so that many kills fall "
        "between an effect and its answer. Tools that use the key have an effect only with a new key; for the others, "
        "each request is an effect. SIGKILL goes to every role, to each equally often and at its own pace from a seed: "
        "controller, tool worker, workspace host, ingress, jobs worker, beat, server, store. The ledger, the MCP server "
        "and the Celery worker of the tool belong to the user, and are not killed. For each action, "
        "`tests/faults/test_effects.py` compares its observation with the ledger: a success without an effect is lost, a "
        "second effect is doubled, and an effect whose action has neither a success nor an unknown outcome is unsaid. "
        "Each log is verified. The counting is tested with planted contradictions.",
        ["pytest", "tests/faults/test_effects.py", "-k", "ten_thousand or count_finds", LIMIT, "SECONDS"],
        "10,000 kills in one run, which are part of `make soak`, take hours.",
        is_added_up=True,
    ),
)


@dataclass
class Record:
    """What a test measured.

    Attributes:
        trials: how often it was tried, and what a trial is: `unit`.
        failures: in how many trials the promise was broken.
        seed: what repeats it, if it was drawn.
        figures: further measured values, as they are shown.
        is_drawn: whether trials are drawn from many that are alike, so that there is a bound.
    """

    name: str
    trials: int
    failures: int = 0
    unit: str = "trials"
    seed: int | str | None = None
    figures: Mapping[str, str | int | float] = field(default_factory=dict)
    test: str = ""
    is_drawn: bool = True

    @property
    def bound(self) -> str:
        """The 95 % bound on failures per trial: 3/N after N trials without one."""
        return f"< {3 / self.trials:.2g}" if not self.failures and self.trials and self.is_drawn else "-"


@dataclass(frozen=True)
class Proof:
    """Takes what one test measured; the fixture `proof`. Without `make proof`, it is forgotten.

    Attributes:
        seconds: how long the trials may last; then they end, and those that took place are handed in.
    """

    folder: Path | None
    test: str
    seconds: float = math.inf

    def record(
        self,
        name: str,
        *,
        trials: int,
        failures: int = 0,
        unit: str = "trials",
        seed: int | str | None = None,
        figures: Mapping[str, str | int | float] | None = None,
        is_drawn: bool = True,
    ) -> None:
        """Hand in a result, under a name that is unique in its section; a later one of the same name replaces it."""
        if self.folder is not None:
            found = Record(name, trials, failures, unit, seed, dict(figures or {}), self.test, is_drawn)
            file = "".join(letter if letter.isalnum() else "-" for letter in name)
            (self.folder / f"{file}.json").write_text(json.dumps(asdict(found)), encoding="utf-8")


def run_section(section: Section, seconds: float) -> dict[str, Any]:
    """Run the suites of a section and return its results as JSON."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        arguments = [f"{seconds:.0f}" if each == "SECONDS" else each for each in section.arguments]
        if arguments[0] == "pytest":
            arguments += ["-q", f"--junitxml={report}"]
        command = [sys.executable, "-m", *arguments, OPTION, folder]
        began, load = time.monotonic(), os.getloadavg()[0]
        status: int | None = None  # what was handed in until its limit counts
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = subprocess.run(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False, timeout=seconds + ENDING_SECONDS
            ).returncode
        taken = time.monotonic() - began
        records = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
        return {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "machine": f"{os.cpu_count()} cores, load {load:.0f} to {os.getloadavg()[0]:.0f}, "
            f"Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}",
            "seconds": round(taken),
            "ended": {None: "cut off by its limit of time", 0: "passed"}.get(status, "failed"),
            "tests": count_tests(report),
            "records": records,
        }


def count_tests(report: Path) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped, as pytest reports them."""
    if not report.exists():
        return {}
    suites = ET.parse(report).getroot().iter("testsuite")
    total = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for name in total:
            total[name] += int(suite.get(name, "0"))
    failed = total["failures"] + total["errors"]
    return {"passed": total["tests"] - failed - total["skipped"], "failed": failed, "skipped": total["skipped"]}


def add_up(runs: Iterable[Mapping[str, Any]]) -> Record:
    """Return a record with the trials and failures of the first records of all runs."""
    records = [Record(**each) for run in runs for each in run["records"][:1]]
    trials, failures = sum(each.trials for each in records), sum(each.failures for each in records)
    return replace(records[-1], trials=trials, failures=failures)


def shorten(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a later run keeps of a run."""
    return {"date": result["date"], "records": [each | {"figures": {}} for each in result["records"][:1]]}


def load_results() -> dict[str, dict[str, Any]]:
    """Return the kept results, by section."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(KEPT.glob("*.json"))}


def render_page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Render docs/proof.md."""
    lines = [
        "# Proof",
        "",
        INTRODUCTION,
        "",
    ]
    for section in SECTIONS:
        if section.name in results:
            lines += _render_section(section, results[section.name])
    return "\n".join(lines).rstrip() + "\n"


def _render_section(section: Section, result: Mapping[str, Any]) -> Iterable[str]:
    yield from (f"## {section.title}", "", f"**Promise.** {section.promise}", "", f"**Method.** {section.method}", "")
    tests = ", ".join(f"{number} {what}" for what, number in result["tests"].items())
    taken = f" in {result['seconds']:,} s" if result["seconds"] else ""
    yield f"**Run** of {result['date']}: {result['ended']}{taken}; {result['machine']}."
    yield from ([f"Tests: {tests}.", ""] if tests else [""])
    records = [Record(**each) for each in result["records"]]
    if records:
        yield from ("| what | trials | failures | bound | seed |", "|---|---|---|---|---|")
        for record in records:
            seed = "-" if record.seed is None else record.seed
            yield f"| {record.name} | {record.trials:,} {record.unit} | {record.failures:,} | {record.bound} | {seed} |"
        yield ""
    if section.is_added_up and result.get("earlier"):
        runs = [*result["earlier"], result]
        total = add_up(runs)
        failed = f"{total.failures:,} failures" if total.failures else f"no failure, bound {total.bound}"
        yield f"**All {len(runs)} runs** since {runs[0]['date']}: {total.trials:,} {total.unit}, {failed}."
        yield ""
    figures = [(record, name, value) for record in records for name, value in record.figures.items()]
    if figures:
        yield from ("| figure | value |", "|---|---|")
        yield from (f"| {record.name}: {name} | {_show(value)} |" for record, name, value in figures)
        yield ""
    if section.limits:
        yield from (f"**Not shown.** {section.limits}", "")
    yield from ("```text", f".venv/bin/{section.command.replace('SECONDS', '3600')}", "```", "")


def _show(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def render_readme(text: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the README with the rows of its table that are measured here."""
    rows = []
    for section in SECTIONS:
        result = results.get(section.name, {"records": ()})
        if result["records"]:
            runs = result.get("earlier", []) if section.is_added_up else []
            record = add_up([*runs, result])
            seen = f"{record.failures:,} failures" if record.failures else "no failure"
            link = f"[{section.title.lower()}](docs/proof.md#{section.title.lower().replace(' ', '-')})"
            rows.append(f"| **{record.trials:,} {record.unit}** | {seen}: {link} |")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n| | |\n|---|---|\n" + "\n".join(rows) + f"\n{END}{after}"


def write_pages() -> None:
    """Write the page and the block of the README from the kept results."""
    results = load_results()
    PAGE.write_text(render_page(results), encoding="utf-8")
    README.write_text(render_readme(README.read_text(encoding="utf-8"), results), encoding="utf-8")


def main() -> int:
    """Run the sections that are named, or all, and write the pages."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", choices=[[], *(each.name for each in SECTIONS)])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the limit of each section")
    parser.add_argument("--render", action="store_true", help="run nothing, write the pages from what is kept")
    options = parser.parse_args()
    has_failed = False
    for section in () if options.render else SECTIONS:
        if not options.sections or section.name in options.sections:
            result = run_section(section, options.seconds)
            if section.is_added_up and (before := load_results().get(section.name)):
                result["earlier"] = [*before.get("earlier", ()), shorten(before)]
            has_failed |= result["ended"] == "failed"
            KEPT.mkdir(exist_ok=True)
            (KEPT / f"{section.name}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    write_pages()
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
