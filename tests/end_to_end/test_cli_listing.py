"""`ls` on terminals of any width, its filter and its last line; ids by their beginnings, in every verb; colours."""

from __future__ import annotations

import asyncio
import re

import pytest

from deckhands import AgentSpec, Client, LLMSpec
from deckhands.cli.command_group import find_commands
from deckhands.client.reading.summary import summarize
from deckhands.client.reading.terminal import measure_width
from deckhands.client.runs.records import RunFolder
from tests.integration.command_line import deckhands, environment, on_terminal
from tests.stores import RealServer, emptied
from tests.unit.deckhands.sample_log import finished_log, state

TITLE = "Fix the failing test of the parser and the one of the printer, 日本語の題名も, and all the others"


@pytest.fixture
def env(tmp_path, valkey_server: RealServer):
    """A cluster without workers: six conversations in three states; and a run of this machine."""
    asyncio.run(_fill(valkey_server.url))
    folder = RunFolder(tmp_path / "runs" / run_id())
    folder.path.mkdir(parents=True)
    log = finished_log()
    with folder.recording() as recording:
        for event in log:
            recording.add(event)
    folder.finish(summarize(log))
    return environment(tmp_path, DECKHANDS_URL=valkey_server.url)


async def _fill(url: str) -> None:
    await emptied(url)
    async with await Client.connect(url) as client:
        for number in range(6):
            cid = f"job-{number}{number}"
            await client.submit("x", agent=AgentSpec(llm=LLMSpec(model="m")), title=TITLE, conversation_id=cid)
            name = ("running", "awaiting_user_input", "finished")[number % 3]
            fields = {"state": name, "cost_usd": 0.5, "iterations": 2}
            if number == 3:
                fields["wait_reason"] = "waiting_for_budget"
            await client.log.append(cid, [state("running"), state(name)], fields=fields)
        await client.submit("x", title="Alone", conversation_id="unlike")


@pytest.mark.parametrize("columns", [200, 100, 80, 60, 40, 20])
def test_lines_fit_the_terminal(env, columns):
    lines = on_terminal("ls", env=env, columns=columns).splitlines()
    assert len(lines) == 1 + 8 + 1
    assert max(map(measure_width, lines)) <= columns
    assert all(any(line.startswith(f"job-{n}{n}"[:columns]) for line in lines) for n in range(6))
    if columns >= 80:
        assert "Fix the failing" in lines[2]


def test_a_pipe_gets_everything_and_the_last_line_adds_up(env):
    lines = deckhands("ls", env=env).out.splitlines()
    assert lines[0].split() == ["CONVERSATION", "WHERE", "STATE", "STEPS", "COST", "UPDATED", "(UTC)", "TITLE"]
    where = {line.split()[0]: line.split()[1] for line in lines[1:-1]}
    assert where == {f"job-{n}{n}": "cluster" for n in range(6)} | {"unlike": "cluster", run_id(): "run"}
    assert lines[-1].startswith("8 conversations: ")
    assert re.search(r"2 running.*; \d+ steps, cost: .*\$3\.\d+", lines[-1])
    listed = {line["conversation_id"]: line["is_run"] for line in deckhands("ls", "--json", env=env).json}
    assert [cid for cid, is_run in listed.items() if is_run] == [run_id()]


def run_id() -> str:
    return summarize(finished_log()).conversation_id


@pytest.mark.parametrize(
    ("states", "found"),
    [
        ("running", {"job-00", "job-33"}),
        ("waiting", {"job-11", "job-44", "job-33"}),
        ("awaiting_user_input, Running", {"job-00", "job-11", "job-33", "job-44"}),
        ("finished", {"job-22", "job-55", "c1"}),
    ],
)
def test_only_those_in_some_states(env, states, found):
    listed = {line["conversation_id"] for line in deckhands("ls", "--state", states, "--json", env=env).json}
    assert listed == {run_id() if cid == "c1" else cid for cid in found}
    shown = deckhands("ls", "--state", states, "-n", "1", env=env).out.splitlines()
    assert len(shown) == 3
    assert shown[-1].startswith("1 of 8: 1 ")


def test_unknown_states_are_refused_and_empty_ones_list_nothing(env):
    unknown = deckhands("ls", "--state", "runing", env=env)
    assert (unknown.code, unknown.out) == (2, "")
    assert unknown.err.startswith("deckhands: There is no state 'runing'.\n  Known: loading, running, ")
    none = deckhands("ls", "--state", "rejected", env=env)
    assert (none.code, none.out, none.err) == (0, "", "None of 8 conversations is in the state rejected.\n")


def test_show_says_what_a_conversation_waits_for(env):
    shown = deckhands("show", "job-33", env=env).out
    assert "Waits for:    money: a budget of its tenant or experiment is used up." in shown
    assert "(waiting_for_budget)" in shown
    assert deckhands("show", "job-33", "--json", env=env).json[0]["wait_reason"] == "waiting_for_budget"


def test_the_beginning_of_an_id_is_enough(env):
    assert deckhands("show", "unl", "--json", env=env).json[0]["conversation_id"] == "unlike"
    assert deckhands("show", "job-2@1", "--json", env=env).json[0]["conversation_id"] == "job-22"
    assert deckhands("message", "job-2", "Faster", env=env).code == 0
    assert deckhands("logs", "job-2", "--json", env=env).json[-1]["content"] == "Faster"
    run = run_id()
    assert deckhands("show", run[:-1], "--json", env=env).json[0]["conversation_id"] == run


def test_a_beginning_that_several_ids_share_lists_them(env):
    done = deckhands("cancel", "job-", env=env)
    assert (done.code, done.out) == (2, "")
    lines = done.err.splitlines()
    assert lines[:2] == ["deckhands: Several ids start with 'job-'.", "  Type a longer prefix:"]
    assert [line.split()[:2] for line in lines[2:4]] == [["job-00", "running"], ["job-11", "awaiting_user_input"]]
    assert len(lines) == 8
    glob = deckhands("show", "job-*", env=env)
    assert (glob.code, "The conversation id 'job-*' cannot be used." in glob.err) == (2, True)


def test_whole_id_is_not_taken_as_a_prefix(env, valkey_server: RealServer):
    async def add() -> None:
        async with await Client.connect(valkey_server.url) as client:
            await client.submit("x", conversation_id="unlike-2")

    asyncio.run(add())
    assert deckhands("show", "unlike", "--json", env=env).json[0]["conversation_id"] == "unlike"


def test_every_verb_that_takes_an_id_takes_its_beginning(env):
    refused = []
    for name, verb in find_commands().items():
        ids = [
            p
            for p in verb.command().params
            if p.param_type_name == "argument" and p.name in ("conversation_id", "conversation_ids", "point")
        ]
        if not ids:
            continue
        refused.append(name)
        rest = {"recover": ["wait"], "secret": ["X", "--remove"], "message": ["text"], "fork": []}.get(name, [])
        done = deckhands(name, "job-@1" if name == "fork" else "job-", *rest, env=env)
        assert (done.code, done.err.partition("\n")[0]) == (2, "deckhands: Several ids start with 'job-'."), name
    others = [["cp", "job-:a", "."], ["cp", "README.md", "job-:a"], ["replay", "job-"], ["run", "--resume", "job-"]]
    for arguments in others:
        assert "Several ids start with 'job-'." in deckhands(*arguments, env=env).err, arguments
    assert len(refused) >= 14, refused


@pytest.mark.parametrize(
    ("variables", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_are_left_out_where_nobody_wants_them(env, variables, is_coloured):
    shown = on_terminal("logs", run_id(), env=env | variables)
    assert ("\x1b[" in shown) is is_coloured
