"""Bad input: every message names the input and the remedy, and no traceback is shown."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import socket
import subprocess
import sys

import pytest

from broker.store.connection import MultiplexedConnection
from controller_worker.agents.registry import AGENTS
from deckhands.client.known_agents import list_local_agents
from deckhands.client.runs.records import RunFolder
from tests.integration.command_line import COMMAND, Done, Terminal, deckhands, environment
from tests.unit.deckhands.sample_log import finished_log

MODEL = {"LLM_MODEL": "scripted//dev/null"}
NO_CLUSTER = ("No cluster is running here.", "`deckhands up`", "DECKHANDS_URL")
NO_STORE = ("DECKHANDS_URL is not set, and no cluster is running here.", "redis://host:6379/0", "deckhands up")
RESUMED = "keeps the options it was started with"


@pytest.fixture
def env(tmp_path):
    return environment(tmp_path / "home", **MODEL)


@pytest.fixture
def served(env, command):
    """The environment of a command with an empty store."""
    return env | {"DECKHANDS_URL": command.url}


def refused(done, code: int, *texts: str) -> None:
    """Make sure that a command was refused with an exit code and a message that contains the texts, nothing else."""
    assert done.code == code, done
    assert done.err.startswith(("deckhands: ", "Usage: ")), done.err
    assert "Traceback" not in done.err
    for text in texts:
        assert text in done.err


CASES = {
    "no task": (["run"], 2, "No task is given.", "-t TEXT, with -f FILE"),
    "empty text": (["run", "-t", ""], 2, "The task is empty.", "Describe the task."),
    "blank text": (["run", "-t", " \n "], 2, "The task is empty.", "Describe the task."),
    "two tasks": (["run", "x", "-t", "x"], 2, "given more than once", "as an argument, with -t or with -f"),
    "text and file": (["run", "-t", "x", "-f", "t"], 2, "given more than once", "as an argument, with -t or with -f"),
    "no file": (["run", "-f", "{tmp}/t"], 2, "The file {tmp}/t cannot be read: No such file"),
    "file that is no text": (["run", "-f", "{tmp}/bytes"], 2, "The file {tmp}/bytes is not text in UTF-8."),
    "no directory": (["run", "-t", "x", "-w", "{tmp}/nowhere"], 2, "The directory {tmp}/nowhere does not exist.", "-w"),
    "file as directory": (["run", "-t", "x", "-w", "{tmp}/bytes"], 2, "The directory {tmp}/bytes is not a directory."),
    "long directory": (
        ["run", "-t", "x", "-w", "{tmp}/" + "x" * 256],
        2,
        "The directory {tmp}/xxx",
        "cannot be used: File name too long.",
        "-w",
    ),
    "no such verb": (["exprot"], 2, "No such command: 'exprot'. Did you mean 'export'?"),
    "nothing like a verb": (["xyzzy"], 2, "`deckhands --help` lists the commands."),
    "no iterations": (["run", "-i", "0"], 2, "-i"),
    "negative budget": (["run", "-b", "-1"], 2, "-b"),
    "no time": (["run", "--timeout", "0"], 2, "--timeout"),
    "no such sandbox": (["run", "--sandbox", "bwarp"], 2, "--sandbox"),
    "no such port": (["up", "--port", "99999"], 2, "--port"),
    "no conversations": (["demo", "--conversations", "0"], 2, "--conversations"),
    "no id": (["show"], 2, "ID"),
    "submit without a cluster": (["submit", "-t", "x"], 1, *NO_CLUSTER),
    "pause without a cluster": (["pause", "abc"], 1, *NO_CLUSTER),
    "message without a cluster": (["message", "abc", "hi"], 1, *NO_CLUSTER),
    "controller without a store": (["controller"], 2, *NO_STORE),
    "tools without a store": (["tools"], 2, *NO_STORE),
    "unknown conversation": (["show", "abc"], 2, "No conversation with the id 'abc'"),
    "impossible id": (["show", "../../etc"], 2, "'../../etc' cannot be used", "3 to 64 letters"),
    "unknown run": (["run", "--resume", "abc"], 2, "No conversation with the id 'abc'"),
    "resumed with an agent": (["run", "--resume", "abc", "--agent", "a"], 2, "--agent cannot be", RESUMED),
    "resumed with a limit": (["run", "--resume", "abc", "-i", "3"], 2, "--max-iterations cannot be", RESUMED),
    "resumed elsewhere": (["run", "--resume", "abc", "-w", "."], 2, "--workspace cannot be", RESUMED),
    "resumed with a network": (["run", "--resume", "abc", "--network"], 2, "--network cannot be", RESUMED),
}


@pytest.mark.parametrize("case", CASES)
def test_input_and_remedy_are_named(env, tmp_path, case):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    arguments, code, *texts = CASES[case]
    done = deckhands(*(word.replace("{tmp}", str(tmp_path)) for word in arguments), env=env, stdin=Terminal())
    refused(done, code, *(text.replace("{tmp}", str(tmp_path)) for text in texts))


class TestTask:
    @pytest.mark.parametrize("arguments", [[], ["-f", "-"]])
    def test_empty_on_standard_input(self, env, arguments):
        refused(deckhands("run", *arguments, env=env), 2, "The task is empty.", "Describe the task.")

    def test_too_long(self, env):
        done = deckhands("run", env=env, stdin="x" * 100_001)
        refused(done, 2, "The task has 100,001 characters; the limit is 100,000.", "into a file of the workspace")

    def test_on_a_standard_input_that_is_no_text(self, env):
        stdin = io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8")
        refused(deckhands("run", env=env, stdin=stdin), 2, "Standard input is not text in UTF-8.")

    def test_bytes_that_are_no_text_pass_in_no_locale(self, env):
        done = subprocess.run(
            [*COMMAND, "run"], env={**env, "LC_ALL": "C"}, input=b"\xff", capture_output=True, check=False
        )
        refused(Done(done.returncode, "", done.stderr.decode()), 2, "Standard input is not text in UTF-8.")

    def test_an_empty_idempotency_key(self, served):
        done = deckhands("submit", "-t", "x", "--idempotency-key", "", env=served)
        refused(done, 2, "The idempotency key is empty.", "Give one, or leave the option out.")

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            ("{", "is not JSON"),
            ("[]", "does not hold an object"),
            ('{"type": "array"}', "is not of the type object"),
            ('{"type": "object", "required": 1}', "cannot be used"),
        ],
    )
    def test_a_schema_that_is_none(self, env, tmp_path, content, told):
        file = tmp_path / "schema.json"
        file.write_text(content)
        refused(deckhands("run", "-t", "x", "--model", "m", "--output-schema", file, env=env), 2, told)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("runs/run-1/events.jsonl", ["export", "run-1"]),
        ("runs/run-1/summary.json", ["show", "run-1"]),
        ("cluster/url", ["up", "--controllers", "0", "--tools", "0"]),
    ],
)
def test_a_directory_where_a_file_of_the_home_belongs(env, tmp_path, name, arguments):
    (path := tmp_path / "home" / name).mkdir(parents=True)
    told = f"deckhands: {path} cannot be used: Is a directory."
    refused(deckhands(*arguments, env=env), 1, told, "Move it away, or set DECKHANDS_HOME to another directory.")


class TestAgentAndModel:
    """Refused before anything starts: no folder of a run is left, and each message is there once."""

    @pytest.mark.parametrize(
        ("option", "told", "remedy"),
        [
            (
                ["--agent", "NoAgent"],
                "There is no agent named 'NoAgent'.",
                f"Known agents: {', '.join(sorted({*AGENTS, 'acp:COMMAND'} - {'AcpAgent'}))}.",
            ),
            (
                ["--model", "scripted//nowhere.json"],
                "The script of the model scripted//nowhere.json cannot be read: No such file or directory.",
                "Name a file: scripted/FILE.",
            ),
        ],
        ids=["agent", "script"],
    )
    def test_that_there_is_not(self, env, tmp_path, option, told, remedy):
        (tmp_path / "work").mkdir()
        done = deckhands("run", "-t", "x", *option, "-w", tmp_path / "work", env=env)
        assert (done.code, done.out, done.err.count(told)) == (2, "", 1)
        assert done.err.startswith(f"deckhands: {told}\n  {remedy}")
        assert not (tmp_path / "home" / "runs").exists()

    def test_agent_names_match_those_found_by_import(self):
        assert list_local_agents() == frozenset(AGENTS)


class TestWorkspace:
    @pytest.mark.parametrize("verb", ["run", "submit"])
    def test_without_a_name(self, served, verb):
        done = deckhands(verb, "-t", "x", "-w", "", env=served)
        refused(done, 2, "-w names no workspace.", "Name one, or leave -w out.")

    def test_that_cannot_be_written(self, env, tmp_path):
        workspace = tmp_path / "workspace"
        workspace.mkdir()
        command = ["bwrap", "--dev-bind", "/", "/", "--ro-bind", workspace, workspace, *COMMAND]
        command += ["run", "-t", "x", "-w", workspace]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert f"The directory {workspace} cannot be written." in done.stderr


class TestSettings:
    def test_no_model(self, tmp_path):
        done = deckhands("run", "-t", "x", env=environment(tmp_path))
        refused(done, 2, "No model is configured.", "LLM_MODEL and LLM_API_KEY", "LLM_BASE_URL", "deckhands demo")

    def test_a_misspelt_variable(self, tmp_path):
        done = deckhands("ls", env=environment(tmp_path, DECKHANDS_URLS="redis://x"))
        refused(done, 2, "DECKHANDS_URLS is unknown.", "Did you mean DECKHANDS_URL?")

    def test_a_home_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        env = environment(tmp_path / "file" / "home", **MODEL)
        (tmp_path / "work").mkdir()
        for verb in (["run", "-t", "x", "-w", tmp_path / "work"], ["up"]):
            refused(deckhands(*verb, env=env), 2, f"{tmp_path}/file/home", "Not a directory", "DECKHANDS_HOME")

    @pytest.mark.parametrize("verb", [["ls"], ["show", "abc"], ["submit", "-t", "x"], ["run", "-t", "x"], ["up"]])
    @pytest.mark.parametrize(
        ("home", "reason"), [("file", "Not a directory|File exists"), ("x" * 256, "File name too long")]
    )
    def test_a_home_that_cannot_be_one(self, tmp_path, verb, home, reason):
        (tmp_path / "file").write_text("")
        done = deckhands(*verb, env=environment(tmp_path / home, **MODEL))
        refused(done, 2, home, "cannot be used: ", "DECKHANDS_HOME")
        assert re.search(reason, done.err)

    def test_a_home_of_nobody(self, tmp_path):
        done = deckhands("ls", env=environment("~nobody-at-all/x"))
        refused(done, 2, "~nobody-at-all/x", "Name a directory by DECKHANDS_HOME.")

    @pytest.mark.parametrize(
        "closed", ["<&- >&- 2>&-", *(pytest.param(one, marks=pytest.mark.soak) for one in ("<&-", ">&-", "2>&-"))]
    )
    def test_standard_streams_that_are_closed(self, env, tmp_path, closed):
        leave_a_run(tmp_path / "home" / "runs" / "abc")
        for verb, code in ((["show", "abc"], 0), (["run"], 2)):
            done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, *verb], env=env, check=False)
            assert done.returncode == code

    def test_a_terminal_of_another_encoding(self, served):
        bare = {**served, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        done = subprocess.run([*COMMAND, "ls"], env=bare, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.partition(".")[0]) == (0, "There are no conversations and no runs yet")


class TestStore:
    @pytest.mark.parametrize(
        "verb",
        [["submit"], pytest.param(["run", "--timeout", "0.5", "-w", "work"], marks=pytest.mark.soak)],  # waits for 15 s
    )
    def test_a_cluster_without_workers(self, tmp_path, served, verb):
        (tmp_path / "work").mkdir()
        arguments = [tmp_path / word if word == "work" else word for word in verb[1:]]
        done = deckhands(verb[0], "-t", "x", *arguments, env=served)
        assert "No controller and no tool worker is running; the conversation waits." in done.err.splitlines()
        assert done.code == (0 if verb == ["submit"] else 4)

    @pytest.mark.parametrize("verb", [["submit", "-t", "x"], ["ls"], ["show", "abc"], ["controller"], ["tools"]])
    def test_a_server_that_cannot_be_reached(self, tmp_path, verb):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
            url = f"redis://:hunter2@127.0.0.1:{port}/0"
            done = deckhands(*verb, env=environment(tmp_path, DECKHANDS_URL=url))
        refused(done, 1, f"Cannot connect to the store at 127.0.0.1:{port}/0", "DECKHANDS_URL")
        assert "hunter2" not in done.err

    def test_a_url_that_is_none(self, tmp_path):
        refused(deckhands("ls", env=environment(tmp_path, DECKHANDS_URL="http://x")), 1, "URL", "redis://host:6379/0")

    @pytest.mark.parametrize("verb", ["show", "logs", "export", "pause", "resume", "cancel"])
    def test_an_unknown_conversation(self, served, verb):
        done = deckhands(verb, "abc", env=served)
        refused(done, 2, "No conversation with the id 'abc'", "`deckhands ls` lists all conversations.")

    def test_a_newer_schema(self, served):
        call(served, "HSET", "deck:store", "schema", 99)
        refused(deckhands("ls", env=served), 1, "The store has schema version 99", "Upgrade Deckhands")

    @pytest.mark.parametrize("verb", ["show", "logs", "export"])
    def test_a_damaged_entry(self, served, verb):
        cid = deckhands("submit", "-t", "x", env=served).out.strip()
        call(served, "XADD", f"deck:{{0}}:c:{cid}:events", "3-0", "e", b"\x01\x00garbage")
        done = deckhands(verb, cid, env=served)
        refused(done, 1, "Event 3 cannot be read: An entry does not match its checksum.", "from its last good copy")


def call(env, *arguments):
    """Call the store."""

    async def ask():
        connection = MultiplexedConnection(env["DECKHANDS_URL"])
        await connection.call(*arguments)
        await connection.aclose()

    asyncio.run(ask())


class TestRuns:
    @pytest.mark.parametrize("name", ["../..", "", ".", "a/../b"])
    def test_resuming_what_cannot_be_an_id_touches_nothing(self, env, tmp_path, name):
        (tmp_path / "home" / "runs" / "a").mkdir(parents=True)
        before = sorted(tmp_path.rglob("*"))
        refused(deckhands("run", "--resume", name, env=env), 2, f"The conversation id {name!r} cannot be used.")
        assert sorted(tmp_path.rglob("*")) == before

    def test_speaking_to_a_run_that_is_over(self, env, tmp_path):
        leave_a_run(tmp_path / "home" / "runs" / "abc")
        done = deckhands("pause", "abc", env=env)
        refused(done, 2, "The run abc is not in progress.", "`deckhands run --resume abc`")

    @pytest.mark.parametrize("line", [b"{}", b'"\xff"', b"[" * 100_000], ids=["fields", "bytes", "depth"])
    def test_a_damaged_line(self, env, tmp_path, line):
        folder = leave_a_run(tmp_path / "home" / "runs" / "abc")
        folder.events_file.write_bytes(line + b"\n")
        refused(deckhands("export", "abc", env=env), 1, f"Line 1 of {folder.events_file} is not an event")

    def test_a_file_that_cannot_be_written(self, env, tmp_path):
        leave_a_run(tmp_path / "home" / "runs" / "abc")
        done = deckhands("export", "abc", "-o", tmp_path, env=env)
        refused(done, 2, f"The file {tmp_path} cannot be written: Is a directory.", "-o")


class TestUnexpectedErrors:
    @pytest.fixture
    def broken(self, tmp_path, monkeypatch):
        """A run on a machine where reading JSON fails in an unforeseen way."""
        leave_a_run(tmp_path / "home" / "runs" / "abc")
        monkeypatch.setattr(json, "loads", lambda _: 1 / 0)

    @pytest.mark.usefixtures("broken")
    def test_one_line_and_where_the_traceback_is(self, env, tmp_path):
        done = deckhands("show", "abc", env=env)
        assert done.code == 1
        assert re.fullmatch(
            r"deckhands: unexpected error: ZeroDivisionError: .*\n  .* at the end of .*/home/errors\.log\.\n", done.err
        )
        assert "Traceback (most recent call last)" in (tmp_path / "home" / "errors.log").read_text()

    @pytest.mark.usefixtures("broken")
    def test_a_traceback_for_those_who_ask(self, env):
        done = deckhands("show", "abc", env={**env, "DECKHANDS_DEBUG": "1"})
        assert done.code == 1
        assert "Traceback (most recent call last)" in done.err

    def test_an_interruption_while_a_verb_is_loaded(self, env):
        program = (
            "import builtins, os, signal\n"
            "build = builtins.__build_class__\n"
            "def interrupted(body, name, *rest, **more):\n"
            "    if name == 'ConversationQuery': os.kill(os.getpid(), signal.SIGINT)\n"
            "    return build(body, name, *rest, **more)\n"
            "builtins.__build_class__ = interrupted\n"
            "from deckhands.cli.main import main\n"
            "main()\n"
        )
        done = subprocess.run([sys.executable, "-c", program, "ls"], env=env, capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")

    def test_a_reader_that_has_gone(self, env, tmp_path):
        leave_a_run(tmp_path / "home" / "runs" / "abd")
        command = [*COMMAND, "export", "abd"]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            running.stdout.close()
            assert running.stderr.read() == ""
        assert running.returncode == 1


def leave_a_run(path) -> RunFolder:
    """Leave the files of a finished run."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    with folder.recording() as recording:
        for event in finished_log():
            recording.add(event)
    return folder
