"""Files of tasks: valid lines, and invalid ones named by their number."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from deckhands.client.task_files.task_file import MAX_LINE_BYTES, BadLines, Form, TaskFile, TaskLine, open_task_file
from deckhands.client.tasks.spec import TaskSpec


def file_of(content: str | bytes, form: Form = "jsonl", batch: str = "b") -> TaskFile:
    data = content if isinstance(content, bytes) else content.encode()
    return TaskFile(io.BytesIO(data), form, batch, lambda request: request)


def lines_of(content: str | bytes, form: Form = "jsonl") -> list[TaskLine]:
    tasks = file_of(content, form)
    found = list(tasks.lines())
    assert tasks.check() == len(found)
    return found


def bad(content: str | bytes, form: Form = "jsonl") -> list[tuple[int, str]]:
    with pytest.raises(BadLines) as caught:
        file_of(content, form).check()
    return caught.value.lines


def test_a_line_is_a_task_with_an_id() -> None:
    one, two = lines_of(
        '\ufeff{"id": "a", "task": "x", "labels": {"k": "v"}, "limits": {"max_iterations": 3}}\n\n{"id": 2, "task": "y"}'
    )
    assert (one.number, one.line_id, one.request.labels, one.request.limits.max_iterations) == (1, "a", {"k": "v"}, 3)
    assert (two.number, two.line_id) == (3, "2")
    assert one.conversation_id != two.conversation_id


def test_the_key_belongs_to_the_batch_and_the_id() -> None:
    def key(batch: str, line_id: str, task: str = "x") -> str:
        return next(iter(file_of(json.dumps({"id": line_id, "task": task}), batch=batch).lines())).key

    assert key("b", "1") == key("b", "1", task="another")
    assert len({key("b", "1"), key("b", "2"), key("c", "1"), key("b1", "1"), key("b", "11")}) == 5
    assert len(key("b" * 5_000, "1" * 200)) < 100


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "it is not JSON"),
        ("[]", "it is not a JSON object"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"task": "x"}', "it has no id"),
        ('{"id": true, "task": "x"}', "it has no id"),
        ('{"id": "", "task": "x"}', "it has no id"),
        (json.dumps({"id": "i" * 201, "task": "x"}), "it has no id"),
        ('{"id": "a"}', "task: it is missing"),
        ('{"id": "a", "task": "x", "taks": 1}', "taks: there is no such field; did you mean task?"),
        ('{"id": "a", "task": "x", "idempotency_key": "k"}', "the id of the line is the key"),
        ('{"id": "a", "task": "x", "labels": {"no spaces": "x"}}', "labels"),
        ('{"id": "a", "task": "x", "workspace": "relative"}', "absolute path"),
        (json.dumps({"id": "a", "task": "x" * 100_001}), "task: String should have at most"),
        (json.dumps({"id": "a", "task": "x", "title": "t" * MAX_LINE_BYTES}), "more than 1 MiB"),
        (b'{"id": "a", "task": "\xff"}', "it is not text in UTF-8"),
    ],
)
def test_a_bad_line_is_named(line: str | bytes, why: str) -> None:
    data = line if isinstance(line, bytes) else line.encode()
    found = bad(b'{"id": "ok", "task": "x"}\n' + data + b'\n{"id": "fine", "task": "x"}\n{"id": "ok", "task": "x"}')
    assert [number for number, _ in found] == [2, 4]
    assert why in found[0][1], found
    assert "the id 'ok' is that of line 1" in found[1][1]


def test_no_more_than_twenty_bad_lines_are_listed() -> None:
    with pytest.raises(BadLines, match="1,000 lines cannot be used, so nothing was submitted") as caught:
        file_of("x\n" * 1_000).check()
    assert len(str(caught.value).splitlines()) == 1 + 20 + 1
    assert "… and 980 more" in str(caught.value)


def test_secrets_are_not_in_what_is_listed() -> None:
    [(_, why)] = bad('{"id": "a", "task": "x", "secrets": {"T": ["hidden"]}}')
    assert "hidden" not in why


def test_csv() -> None:
    head = "id,prompt,model,labels.team,labels.run,limits.max_iterations,headless,tools,workspace\n"
    one, two = lines_of(
        head
        + '1,"Say ""hello"",\nplease",m,a,,7,false,"[""github/*""]",/srv/x\n'
        + '\n2,x,,,,,,,"{""path"": ""/srv/y""}"\n',
        "csv",
    )
    request = one.request
    assert request.task == 'Say "hello",\nplease'
    assert (request.model, request.labels, request.limits.max_iterations) == ("m", {"team": "a"}, 7)
    assert (request.headless, request.tools, request.workspace) == (False, ("github/*",), "/srv/x")
    assert two.request.workspace_spec().path == "/srv/y"
    assert "model" not in two.request.model_fields_set


@pytest.mark.parametrize(
    ("content", "number", "why"),
    [
        ("id,task\n1,x,y\n", 2, "it has 3 cells; the header has 2"),
        ("id,task,task\n1,x,y\n", 1, "the header names a column twice"),
        ("id,task,prompt\n1,x,y\n", 1, "the header names a column twice"),
        ("id,task,limits\n1,x,many\n", 2, "limits: it is not JSON"),
        ('id,task,labels,labels.a\n1,x,"{}",y\n', 2, ""),
        ('id,task\n1,"x\n', 2, "it is not CSV"),
        ("id,task,colour\n1,x,red\n", 2, "colour: there is no such field"),
        ("task\nx\n", 2, "it has no id"),
    ],
)
def test_bad_csv(content: str, number: int, why: str) -> None:
    if not why:
        assert lines_of(content, "csv")[0].request.labels == {"a": "y"}
        return
    [(found, told)] = bad(content, "csv")
    assert (found, why in told) == (number, True), told


def test_an_open_quote_is_bounded() -> None:
    [(_, why)] = bad('id,task\n1,"' + "x\n" * 200_000, "csv")
    assert "field larger than field limit" in why


def test_lines_that_change_after_the_check_are_refused() -> None:
    file = io.BytesIO(b'{"id": "a", "task": "x"}\n')
    tasks = TaskFile(file, "jsonl", "b", lambda request: request)
    tasks.check()
    file.seek(0, io.SEEK_END)
    file.write(b"nonsense\n")
    with pytest.raises(BadLines, match="line 2"):
        list(tasks.lines())


def test_task_refused_by_the_command_is_named_by_line() -> None:
    def refuse(request: TaskSpec) -> TaskSpec:
        raise UsageError("No.", remedy="Do.")

    with pytest.raises(BadLines, match="line 1: No"):
        TaskFile(io.BytesIO(b'{"id": "a", "task": "x"}'), "jsonl", "b", refuse).check()


def test_files_and_standard_input(tmp_path: Path) -> None:
    path = tmp_path / "tasks.CSV"
    path.write_text("id,task\n1,x\n")
    keys = set()
    for name in (str(path), str(path.parent / "." / path.name)):
        with open_task_file(name, io.BytesIO, form=None, batch=None, complete=lambda request: request) as tasks:
            keys |= {line.key for line in tasks.lines()}
    assert len(keys) == 1
    with open_task_file(
        "-", lambda: io.BytesIO(b'{"id": 1, "task": "x"}'), form=None, batch="b", complete=lambda r: r
    ) as tasks:
        assert tasks.check() == 1
    for name, why in (("-", "Standard input has no name"), (str(tmp_path / "none"), "No such file")):
        with (
            pytest.raises(UsageError, match=why),
            open_task_file(name, io.BytesIO, form=None, batch=None, complete=lambda request: request),
        ):
            pass
