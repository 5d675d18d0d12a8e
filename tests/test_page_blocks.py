"""Blocks that are data fit our own classes, and commands that no test can run name verbs, options and files that exist.

`tests/end_to_end/test_page_blocks.py` runs all others.
"""

from __future__ import annotations

import ast
import io
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import click
import jsonschema_rs
import pytest
import yaml

from broker.contract.skill_sources import SkillSourceRule
from broker.contract.skills import parse_skills
from broker.contract.specs import AgentSpec
from broker.limits.quotas import QuotaTable
from broker.limits.tenants import TenantTable
from broker.runtime.settings import PREFIX, WORKER_SETTINGS, BrokerSettings
from broker.tools.mcp_config import read_allowed, read_servers
from controller_worker.agents.codeact import CodeActAgent
from controller_worker.loop.hooks import _HookTable
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.profiles import Profiles
from controller_worker.providers.scripted import Script
from deckhands.cli.commands.metrics import DEFAULT_PORT
from deckhands.cli.main import cli
from deckhands.client.archive.retention import Retention
from deckhands.client.task_files.task_file import open_task_file
from deckhands.client.tasks.spec import TaskSpec
from deckhands.configuration import read_configuration
from deckhands.evaluation.datasets.own_rows import OwnRow
from tests.page_blocks import RUN_ELSEWHERE, Block, blocks_of, pages
from tests.source_code import ROOT, tracked_sources
from tool_worker.secret_sources import read_secret_sources
from tool_worker.workspace import read_skill_credentials

RUN = {"bash", "console", "python"}
DATA = {"csv", "json", "jsonl", "markdown", "toml", "yaml"}
PROSE = {"text"}
"""What a program prints, or a model writes."""
MAX_NOT_RUN = 40
BLOCKS = [block for page in pages() for block in blocks_of(page) if block.part not in RUN_ELSEWHERE]
NOT_RUN = [block for block in BLOCKS if block.not_run]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMPOSE = yaml.safe_load(re.sub(r"!\w+", "", (ROOT / "compose.yaml").read_text(encoding="utf-8")))
EVERYTHING = AgentSpec(enable_patch=True, enable_jupyter=True, enable_browsing=True, enable_delegation=True)


def of(*languages: str) -> list[pytest.ParameterSet]:
    return [pytest.param(block, id=block.place) for block in BLOCKS if block.language in languages]


def test_every_block_says_what_it_is() -> None:
    assert [block.place for block in BLOCKS if block.language not in RUN | DATA | PROSE] == []


def test_few_blocks_cannot_run_and_each_says_why() -> None:
    for block in NOT_RUN:
        assert block.language in RUN, block.place
        missing = [name for name in re.findall(r"tests/[\w/.]+", block.not_run) if not (ROOT / name).exists()]
        assert not missing, f"{block.place}: {missing}"
    listed = "\n".join(f"{block.place}: {block.not_run}" for block in NOT_RUN)
    assert len(NOT_RUN) <= MAX_NOT_RUN, f"These blocks cannot run:\n{listed}"


@pytest.mark.parametrize("block", of("toml"))
def test_toml_is_what_its_reader_takes(block: Block, tmp_path: Path) -> None:
    content = tomllib.loads(block.text)
    path = tmp_path / "deckhands.toml"
    path.write_text(block.text)
    if "quota" in content:
        assert QuotaTable.load_setting(str(path)).pools
    elif "rule" in content:
        assert Retention.of_setting(str(path)).rule
    elif "tenants" in content:
        assert TenantTable.load_setting(str(path)).rules
    elif "github" in content:
        assert all(
            {"secret_variable", "repositories", "people"} <= content[forge].keys() for forge in ("github", "gitlab")
        )
    elif "vault" in content:
        assert len(read_secret_sources(path, {"VAULT_TOKEN": "t"})) == len(content)
    elif "acme=git.example.com/acme" in content:
        assert read_skill_credentials(path, tuple(map(SkillSourceRule.parse, content)), {"FILES_PASSWORD": "p"})
    elif "hook" in content:
        assert _HookTable.model_validate(content).hook
    elif "project" in content:
        read = {group for source in tracked_sources() for group in re.findall(r'"(deckhands\.\w+)"', source.text)}
        assert content["project"]["entry-points"].keys() <= read
    elif block.page == "docs/models.md" and "llm" in content:
        keys = dict.fromkeys(re.findall(r"\$\{(\w+)\}", block.text), "a key")
        assert Profiles.from_env({"LLM_CONFIG": str(path)} | keys)
    elif block.page == "docs/models.md":
        assert LLMConfig.create(model="any", **content)
    else:
        assert read_configuration({}, tmp_path).values


@pytest.mark.parametrize("block", of("json"))
def test_json_is_what_its_reader_takes(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(block.text)
    if '"mcpServers"' in block.text:
        assert read_servers(path, dict.fromkeys(re.findall(r"\$\{(\w+)\}", block.text), "a value"))
        assert read_allowed(path)
    elif '"mcp_servers"' in block.text:
        assert TaskSpec.parse(json.loads(block.text)).mcp_servers
    elif block.part == "docs/evaluation.md#evaluation-datasets":
        assert OwnRow.model_validate_json(block.text).tests
    elif '"turns"' in block.text:
        assert Script.load(path).turns
    elif block.part == "docs/agents.md#delegation":
        assert AgentSpec.model_validate_json(block.text).name
    elif '"logger"' in block.text:
        assert {"time", "level", "message", "role"} <= json.loads(block.text).keys()
    elif '"exchanges"' in block.text:  # played in tests/integration/test_recorded_wires.py
        assert json.loads(block.text)["exchanges"]
    else:
        tools = {tool.name: tool for tool in CodeActAgent(EVERYTHING).tools}
        for call in json_values(block.text):
            name = call.get("name", "str_replace_editor")  # a page may show the arguments alone
            arguments = call.get("arguments", call)
            jsonschema_rs.validate(tools[name].parameters, arguments)
            assert set(arguments) <= set(tools[name].parameters["properties"])


@pytest.mark.parametrize("block", of("jsonl", "csv"))
def test_lines_are_tasks_or_their_results(block: Block, tmp_path: Path) -> None:
    lines = block.text.splitlines()
    if block.language == "jsonl" and "summary" in lines[0]:
        assert [set(json.loads(line)) for line in lines] == [{"id", "conversation_id", "summary"}]
        return
    if block.language == "jsonl" and {"check", "answer"} & json.loads(lines[0]).keys():
        assert all(OwnRow.model_validate_json(line).id for line in lines)
        return
    path = tmp_path / f"tasks.{block.language}"
    path.write_text(block.text)
    with open_task_file(str(path), io.BytesIO, form=None, batch=None, complete=lambda request: request) as tasks:
        assert tasks.check() == len(lines) - (block.language == "csv")


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_what_its_reader_takes(block: Block) -> None:
    content = yaml.safe_load(block.text)
    if "services" in content:
        for name, service in content["services"].items():
            assert name in COMPOSE["services"]
            assert set(service["networks"]) <= set(COMPOSE["networks"])
    elif "scrape_configs" in content:
        assert content["scrape_configs"][0]["static_configs"][0]["targets"] == [f"127.0.0.1:{DEFAULT_PORT}"]
    elif block.page == "docs/kubernetes.md":
        schema = json.loads((ROOT / "deploy" / "helm" / "deckhands" / "values.schema.json").read_text())
        jsonschema_rs.validate(schema, content)
    else:
        _, _, script = content["livenessProbe"]["exec"]["command"]
        assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("block", of("markdown"))
def test_markdown_is_a_skill_or_an_agent(block: Block) -> None:
    folder = "agents" if "\ntools:" in block.text else "skills"
    found = parse_skills([(f".agents/{folder}/a.md", block.text)])
    names = [*(skill.name for skill in found.skills), *(agent.name for agent in found.agents.values())]
    assert names == [{"agents": "reviewer", "skills": "release"}[folder]]


@pytest.mark.parametrize("block", [pytest.param(block, id=block.place) for block in NOT_RUN])
def test_what_cannot_run_names_what_exists(block: Block) -> None:
    text = block.commands
    if block.language == "python":
        compile(text, block.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        return
    assert subprocess.run(["bash", "-n", "-c", text.replace("<", "").replace(">", "")], check=False).returncode == 0
    for command in commands_in(text):
        check(command)
    names = set(re.findall(rf"\b{PREFIX}(\w+)=", text))
    assert {name.lower() for name in names} <= WORKER_SETTINGS | {field.name for field in fields(BrokerSettings)}
    assert {name.lower() for name in re.findall(r"\bLLM_(\w+)=", text)} <= LLMConfig.model_fields.keys()


@pytest.mark.parametrize("page", pages())
def test_every_command_in_prose_has_a_real_verb_and_options(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for command in re.findall(r"`((?:[A-Z_]+=\S+ )*deckhands [a-z][^`]*)`", text):
        for words in commands_in(command.replace("\\|", "-or-")):
            check(words)


@pytest.mark.parametrize(("command", "code"), [("git push --force", 2), ("git push", 0)])
def test_the_command_of_the_page_on_hooks_vetoes(tmp_path: Path, command: str, code: int) -> None:
    (hook,) = [block for block in blocks_of("docs/security.md") if block.file == "no-force-push"]
    (tmp_path / "hook").write_text(hook.text)
    asked = json.dumps({"point": "before_action", "event": {"kind": "action.run", "command": command}})
    done = subprocess.run(["sh", tmp_path / "hook"], input=asked, capture_output=True, text=True, check=False)
    assert (done.returncode, bool(done.stderr)) == (code, code == 2)


def json_values(text: str) -> Iterator[dict[str, object]]:
    decoder, start = json.JSONDecoder(), 0
    while start < len(text.rstrip()):
        value, end = decoder.raw_decode(text, start)
        yield value
        start = end + len(text[end:]) - len(text[end:].lstrip())


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, without variables, comments and redirections."""
    for line in text.splitlines():
        for part in re.split(r"[;|]", line.partition("  #")[0]):
            words = shlex.split(part, comments=True)
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words:
                yield words


def check(words: list[str]) -> None:
    program, *rest = words
    match Path(program).name, rest:
        case "deckhands", [verb, *arguments]:
            context = click.Context(cli)
            command = cli.get_command(context, verb)
            assert command is not None, verb
            command.make_parser(click.Context(command, info_name=verb)).parse_args(arguments)
        case "make", targets:
            known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert {target for target in targets if "=" not in target} <= set(known), targets
        case "python", ["-m", module, *_]:
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
        case "pip", ["install", package]:
            extras = re.findall(r"\[(.+)\]", package)
            assert all(set(extra.split(",")) <= PROJECT["optional-dependencies"].keys() for extra in extras)
        case "docker", ["compose", "run", "--rm", "cli", *arguments] | ["compose", "exec", _, "deckhands", *arguments]:
            check(["deckhands", *arguments])
        case "docker", ["compose", *arguments]:
            files = [name for flag, name in pairwise(arguments) if flag == "-f"]
            assert all((ROOT / name).is_file() for name in files if "/" in name or name.endswith(".yaml")), files
            services = {name for name in arguments if name in ("cli", "controller", "tools", "store", "queue")}
            assert services <= COMPOSE["services"].keys()
        case name, _:
            is_ours = program.startswith("deploy/")
            assert (ROOT / program).is_file() if is_ours else name in OTHERS, words


OTHERS = {
    "apt-get",
    "celery",
    "chmod",
    "cp",
    "curl",
    "docker",
    "echo",
    "export",
    "grep",
    "llama-server",
    "mkdir",
    "valkey-cli",
}
"""Programs that are not ours."""
