"""The page on adding things: each change, made in a copy of the packages, does what the page says.

Holds: nothing of the repository is changed; the copies are made from the files on disk.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from broker.contract.actions import CondensationAction
from broker.contract.condenser_specs import OtherCondenserSpec
from broker.contract.events import AgentSpec, Event, LLMSpec, WorkspaceSpec
from deckhands import Client
from tests.integration.command_line import Done, cluster, environment
from tests.turns import call, finish, script

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding-things.md").read_text(encoding="utf-8")
PACKAGES = ("broker", "controller_worker", "tool_worker", "deckhands")
LIMIT_SECONDS = 120
LIMITS = {
    "A tool of your own": 1,
    "A runnable action": 5,
    "An action that the controller settles": 4,
    "A condenser": 2,
    "A condenser in a package of your own": 2,
    "A provider": 3,
    "An agent": 1,
    "A verb of the command line": 2,
    "A field of a task": 4,
}
"""How many files each may touch."""

BLOCK = re.compile(
    r"^(?:`(?P<new>[^`\n]+)`|In `(?P<changed>[^`\n]+)`, below `(?P<anchor>[^`\n]+)`)\n\n```\w+\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Tree:
    path: Path

    def apply(self, title: str) -> set[str]:
        """Make the changes of a section, see whether they are as few as it says, and return the files."""
        touched = set()
        for block in BLOCK.finditer(section(title)):
            name = block["new"] or block["changed"]
            touched.add(name)
            file = self.path / name
            if block["new"]:
                assert not file.exists(), f"{name} is there already"
                file.write_text(block["text"], encoding="utf-8")
                continue
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            assert lines.count(f"{block['anchor']}\n") == 1, f"{name} has not one line {block['anchor']!r}"
            place = lines.index(f"{block['anchor']}\n") + 1
            file.write_text("".join([*lines[:place], block["text"], *lines[place:]]), encoding="utf-8")
        assert 1 <= len(touched) <= LIMITS[title], touched
        assert f"](#{title.lower().replace(' ', '-')}) | {len(touched)} |" in PAGE, touched
        if ours := [name for name in touched if name.startswith(PACKAGES)]:
            self.check(ours)
        return touched

    def check(self, names: Iterable[str]) -> None:
        """See whether what is added to the packages is as clean as they are."""
        command = [Path(sys.executable).parent / "ruff", "check", "--config", ROOT / "pyproject.toml"]
        command += ["--ignore", "ARG001", *names]  # the exclusions of a folder apply to the repository's path
        done = subprocess.run(command, cwd=self.path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout

    def install(self) -> None:
        """Do what an installer does with the entry points of `pyproject.toml`."""
        project = tomllib.loads((self.path / "pyproject.toml").read_text())["project"]
        described = self.path / f"{project['name']}-{project['version']}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        groups = project["entry-points"].items()
        written = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups]
        (described / "entry_points.txt").write_text("\n".join(written))

    def deckhands(self, *arguments: str | Path, **variables: str) -> Done:
        done = subprocess.run(
            (sys.executable, "-P", "-m", "deckhands", *map(str, arguments)),
            env=environment(self.path / "home", PYTHONPATH=str(self.path), **variables),
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def python(self, program: str) -> str:
        """Run a program with this copy and return its output."""
        done = subprocess.run(
            (sys.executable, "-P", "-c", program),
            env=environment(self.path / "home", PYTHONPATH=str(self.path)),
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, task: str, *options: str | Path, model: str, **variables: str) -> list[dict[str, object]]:
        """Run a task and return its events, and the summary behind them."""
        done = self.deckhands("run", task, "-w", self.workspace, "--model", model, "--json", *options, **variables)
        assert done.code == 0, done
        return done.json

    @property
    def workspace(self) -> Path:
        path = self.path / "workspace"
        path.mkdir(exist_ok=True)
        return path


def section(title: str) -> str:
    (text,) = re.findall(rf"^### {re.escape(title)}\n(.*?)(?=^### |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return text


def only(events: list[dict[str, object]], kind: str) -> dict[str, object]:
    (event,) = [event for event in events if event.get("kind") == kind]
    return event


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    """Yields a copy, removed at the end: every file of the packages, and the bytecode of unchanged ones."""
    path = tmp_path / "tree"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, path / package, ignore=shutil.ignore_patterns("examples"))
    yield Tree(path)
    shutil.rmtree(path)


def test_every_section_is_tried() -> None:
    assert re.findall(r"^### (.*)$", PAGE, re.MULTILINE) == list(LIMITS)


def test_a_tool_of_ones_own(tree: Tree) -> None:
    tree.apply("A tool of your own")
    model = script(tree.path / "m.json", call("stock", item="lamp"), finish("Yes."))
    events = tree.run("Lamps?", "--tool", "stock", model=model, DECKHANDS_TOOLS="shop_tools:stock")
    assert only(events, "observation.call_tool")["content"] == "4 lamps"


def test_a_runnable_action(tree: Tree) -> None:
    tree.apply("A runnable action")
    (tree.workspace / "a b.txt").write_text("one two three\n")
    counting = call("count_words", path="a b.txt", security_risk="LOW")
    missing = call("count_words", path="none.txt", security_risk="LOW")
    wrong = call("count_words", file="a", security_risk="LOW")
    model = script(tree.path / "m.json", counting, missing, wrong, finish("Three."))
    events = tree.run("Count.", model=model)
    answer = only(events, "observation.count_words")
    assert (answer["content"], answer["words"]) == ("a b.txt has 3 words.", 3)
    missed, refused = (event for event in events if event.get("kind") == "observation.error")
    assert "No such file" in str(missed["content"])
    assert refused["content"] == 'Missing required argument "path" in tool call count_words'


def test_an_action_that_the_controller_settles(tree: Tree) -> None:
    tree.apply("An action that the controller settles")
    model = script(tree.path / "m.json", call("steps_left"), call("steps_left"), finish("Few."))
    events = tree.run("How long?", "--max-iterations", "10", model=model)
    answers = [event for event in events if event.get("kind") == "observation.steps_left"]
    assert [answer["content"] for answer in answers] == ["9 steps are left.", "8 steps are left."]
    run_id = str(events[-1]["conversation_id"])
    replayed = tree.deckhands("replay", run_id, "--json")
    assert replayed.code == 0, replayed
    assert replayed.json[-1]["is_same"]


@pytest.mark.parametrize("title", ["A condenser", "A condenser in a package of your own"])
def test_a_condenser(tree: Tree, title: str) -> None:
    if "pyproject.toml" in tree.apply(title):
        tree.install()
    model = script(tree.path / "m.json", *(call("think", thought=f"Thought {n}") for n in range(3)), finish("Done."))
    condenser = OtherCondenserSpec(type="thoughtless", settings={"keep": 1})
    home = tree.path / "home"
    with cluster(home, "--sandbox", "none", PYTHONPATH=str(tree.path)):
        agent = AgentSpec(llm=LLMSpec(model=model), condenser=condenser)
        events = asyncio.run(conversation((home / "cluster" / "url").read_text().strip(), agent))
    kinds = {event.id: event.kind for event in events}
    forgotten = [event.forgotten for event in events if isinstance(event, CondensationAction)]
    assert [[kinds[event_id] for event_id in ids] for ids in forgotten] == [["action.think", "observation.think"]] * 2


async def conversation(url: str, agent: AgentSpec) -> Sequence[Event]:
    async with await Client.connect(url) as client:
        conversation_id = await client.submit("Think.", agent=agent, workspace=WorkspaceSpec(sandbox="none"))
        await client.wait_until_settled(conversation_id, timeout_seconds=LIMIT_SECONDS)
        return await client.events(conversation_id)


def test_a_provider(tree: Tree) -> None:
    tree.apply("A provider")
    events = tree.run("Say this.", model="echo/any", LLM_NATIVE_TOOL_CALLING="true")
    assert only(events, "model.reply")["model"] == "echo"
    assert only(events, "action.finish")["final_thought"] == "Say this."


def test_an_agent(tree: Tree) -> None:
    tree.apply("An agent")
    model = script(tree.path / "m.json", finish("Roses are red."))
    events = tree.run("A rose.", "--agent", "PoetAgent", model=model)
    greeting = only(events, "action.system")
    assert greeting["agent_class"] == "PoetAgent"
    assert str(greeting["content"]).endswith("Answer in verse.")


def test_a_verb(tree: Tree) -> None:
    tree.apply("A verb of the command line")
    assert "hello" in tree.deckhands("--help").out
    assert tree.deckhands("hello", "Ada").out == "Hello, Ada.\n"
    assert tree.deckhands("hello", "Ada", "--json").json == [{"greeting": "Hello, Ada."}]


EVERY_WAY_IN = """
import json, sys
from broker.contract.events import WorkspaceSpec
from deckhands import AsyncConversation, Conversation, TaskSpec
from deckhands.client.tasks.inputs import to_task_spec
from deckhands.ingress.inbox import InboxRequest
from deckhands.ingress.runs import RunMessage
from deckhands.server.models import NewConversation
from deckhands.server.schedules import NewSchedule

given = {"guidance": "Speak French."}
body = {"task": "Greet.", **given}
schedule = NewSchedule.model_validate({"cron": "* * * * *", "reason": "daily", "request": body})
found = {
    "http": NewConversation.model_validate(body),
    "inbox": InboxRequest.parse(body),
    "celery": RunMessage("id", ["Greet."], given, {}).request()[0],
    "schedule": schedule.request,
    "store of schedules": TaskSpec.parse(schedule.request.model_dump(mode="json")),
    "python": to_task_spec("Greet.", **given)[0],
}
assert {spec.guidance for spec in found.values()} == {"Speak French."}, found
place = WorkspaceSpec(sandbox="none")
AsyncConversation(**given)
with Conversation(model=MODEL, workspace=place, **given) as conversation:
    conversation.run("Greet.")
    print(json.dumps([event.export() for event in conversation.events()], default=str))
"""


def test_a_field_of_a_task(tree: Tree) -> None:
    touched = tree.apply("A field of a task")
    assert all(name.startswith(PACKAGES) for name in touched)
    model = script(tree.path / "m.json", finish("Bonjour."))
    by_option = tree.run("Greet.", "--guidance", "Speak French.", model=model)
    by_keyword = json.loads(tree.python(EVERY_WAY_IN.replace("MODEL", repr(model))))
    for events in (by_option, by_keyword):
        assert only(events, "conversation.created")["guidance"] == "Speak French."
        assert only(events, "observation.recall")["conversation_instructions"] == "Speak French."
    listed = tree.deckhands("submit", "--help").out
    assert "--guidance TEXT" in listed
    assert "What the agent must keep to" in listed
