"""Directories of tasks in Harbor's and Terminal-Bench's format: supported and unsupported parts of a container."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from deckhands.evaluation.datasets.dataset import read_dataset
from deckhands.evaluation.datasets.file_trees import TreeFile, read_tree
from deckhands.evaluation.datasets.instances import Instance, list_left_out
from deckhands.evaluation.rewards import Rewards, find_rewards
from tests.dataset_parts import checked, harbor_task
from tests.trees import write_files


def only(folder: Path) -> Instance:
    (found,) = read_dataset(folder)
    return found


def test_task_becomes_a_workspace_and_check_by_reward(tmp_path: Path) -> None:
    found = only(harbor_task(tmp_path / "hello"))
    assert found.id == "hello"
    assert "Your working directory stands for /app" in found.task
    assert found.tags == ("easy", "files", "greeting")
    assert read_tree(found.workspace) == {"names/a.txt": TreeFile(b"Ann\n")}
    assert found.setup is not None
    assert found.setup.startswith("export LANGUAGE='en us' && test -e .deckhands_check || ")
    assert '( echo made > "$PWD"/made.txt )' in found.setup
    assert "apt-get" not in found.setup
    assert checked(found, tmp_path / "wrong").returncode == 1
    assert checked(found, tmp_path / "right", {"hello.txt": "Hello, Ann\n"}).returncode == 0
    assert found.turns


def test_the_first_terminal_bench_is_read_too(tmp_path: Path) -> None:
    folder = tmp_path / "tasks" / "old"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text("instruction: Write /app/a.txt.\ndifficulty: easy\ntags: [files]\n")
    (folder / "Dockerfile").write_text("FROM debian\nWORKDIR /app\n")
    (folder / "docker-compose.yaml").write_text("services:\n  client: {}\n")
    (folder / "run-tests.sh").write_text("apt-get install -y curl\nuv run pytest $TEST_DIR/test_outputs.py\n")
    test = "from pathlib import Path\ndef test_it():\n    assert Path('/app/a.txt').exists()\n"
    (folder / "tests" / "test_outputs.py").write_text(test)
    found = only(tmp_path / "tasks")
    assert (found.id, found.tags) == ("old", ("easy", "files"))
    assert checked(found, tmp_path / "right", {"a.txt": ""}).returncode == 0


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("environment/Dockerfile", "FROM a AS b\nFROM c\n", "Dockerfile, line 2: a workspace is built in one stage"),
        (
            "environment/Dockerfile",
            "FROM a\nWORKDIR /app\nCOPY x /etc/\n",
            "line 3: it copies to /etc; a workspace has",
        ),
        ("environment/Dockerfile", "FROM a\nCOPY ../x /app/\nWORKDIR /app\n", "it copies ../x; only files beside it"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /app\nCOPY none /app/\n", "there is no none to copy"),
        ("environment/Dockerfile", "FROM a\nFETCH x\n", "line 2: FETCH is not known"),
        ("environment/docker-compose.yaml", "services: {a: {}, b: {}}\n", "it has 2 services"),
        ("tests/test.sh", "curl -LsSf https://x | sh\n", "installs programs, and a check has no network"),
        ("instruction.md", "\n", "it has no instruction"),
        ("task.toml", "[[", "its description cannot be read"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /\n", "its working directory is /"),
        ("environment/Dockerfile", "FROM a\nWORKDIR $HOME/x\n", "line 2: WORKDIR names a variable"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /app\nCOPY <<EOF /app/x\n", "line 3: COPY with a here-document"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /app\nCOPY --from=b /x /app/\n", "built in one stage"),
        ("environment/Dockerfile", "FROM a\nRUN <<EOF\necho\nEOF\n", "line 2: RUN with a here-document"),
        ("environment/Dockerfile", "FROM a\nRUN --mount=type=cache make\n", "line 2: RUN --mount is not supported"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /b\nRUN make\nWORKDIR /app\n", "line 3: it runs a command in /b"),
        ("environment/Dockerfile", "FROM a\nENV x=${y:-z}\n", "line 2: a variable of this form"),
        ("environment/Dockerfile", "FROM a\nONBUILD RUN make\n", "line 2: ONBUILD is not known"),
        ("trajectory.json", "{}", "trajectory.json is not supported"),
        ("task.toml", "[[steps]]\nname = 'a'\n", "steps is not supported: a conversation has one task"),
        ("task.toml", "multi_step_reward_strategy = 'mean'\n", "multi_step_reward_strategy is not supported"),
        ("task.toml", "[environment]\ngpus = 1\n", "environment.gpus is not supported"),
        ("task.toml", "[environment]\ngpu_types = ['T4']\n", "environment.gpu_types is not supported"),
        ("task.toml", "[environment.tpu]\ntype = 'v4'\n", "environment.tpu is not supported"),
        ("task.toml", "[environment]\nos = 'windows'\n", "environment.os is windows"),
        ("task.toml", "[[environment.mcp_servers]]\nname = 'a'\n", "environment.mcp_servers is not supported"),
        ("task.toml", "[environment.env]\nKEY = '${KEY}'\n", "environment.env.KEY is a value of the host"),
        ("task.toml", "[verifier]\nenvironment_mode = 'separate'\n", "verifier.environment_mode is separate"),
        ("task.toml", "[verifier.environment]\ncpus = 1\n", "verifier.environment is not supported"),
        ("task.toml", "[[verifier.collect]]\ncommand = 'x'\n", "verifier.collect is not supported"),
    ],
)
def test_unsupported_parts_are_named_by_task(tmp_path: Path, name: str, text: str, why: str) -> None:
    harbor_task(tmp_path / "good")
    (harbor_task(tmp_path / "hello") / name).write_text(text)
    with pytest.raises(UsageError, match="task hello: ") as raised:
        read_dataset(tmp_path)
    assert why in str(raised.value)
    assert "task good" not in str(raised.value)


def test_a_directory_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no tasks"):
        read_dataset(tmp_path)


def test_an_archive_that_would_be_unpacked_is_refused(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "hello")
    (folder / "environment" / "x.tar.gz").write_bytes(b"")
    (folder / "environment" / "Dockerfile").write_text("FROM a\nWORKDIR /app\nADD x.tar.gz /app/\n")
    with pytest.raises(UsageError, match="line 3: ADD unpacks "):
        read_dataset(folder)


DOCKERFILE = """FROM python:3.13-slim AS only
LABEL a=b
MAINTAINER somebody
ARG LEVEL=3
ENV TOOLS=/task/tools PATH=/task/tools:$PATH
ENV GREETING "say \\"hello\\""
RUN apt-get update && apt-get install -y tmux && echo $LEVEL > level.txt
WORKDIR /task
COPY --chown=me:me --chmod=755 a.txt b/ ./
ADD c.txt renamed.txt
WORKDIR /task/sub
RUN ["sh", "-c", "echo two words > made.txt"]
WORKDIR /task
RUN pip install x; echo "$TOOLS" > tools.txt || true
USER me
SHELL ["/bin/sh", "-c"]
VOLUME /cache
EXPOSE 80
HEALTHCHECK CMD true
ENTRYPOINT ["/start"]
CMD ["bash"]
"""
DESCRIPTION = """schema_version = "1.4"
source = "somewhere"
artifacts = ["/task/out.txt"]
odd = 1
[task]
name = "acme/all"
[metadata]
difficulty = "hard"
[agent]
timeout_sec = 60.0
user = "me"
network_mode = "no-network"
[verifier]
timeout_sec = 60.0
user = "me"
environment_mode = "shared"
network_mode = "public"
strange = 1
[verifier.env]
EXPECTED = "3"
[environment]
docker_image = "acme/all"
build_timeout_sec = 60.0
os = "linux"
cpus = 1
memory_mb = 512
storage_mb = 512
gpus = 0
allow_internet = false
skills_dir = "/skills"
workdir = "/task"
[environment.env]
MODE = "strict"
[environment.healthcheck]
command = "true"
[solution.env]
WORD = "done"
"""


def everything(folder: Path) -> Path:
    """Make a task that uses whatever the published form has and a workspace can do without."""
    files = {
        "task.toml": DESCRIPTION,
        "instruction.md": "Write /task/out.txt.\n",
        "README.md": "About it.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/docker-compose.yaml": "services: {main: {build: ., privileged: true, ports: [80]}}\n",
        "environment/a.txt": "a\n",
        "environment/b/b.txt": "b\n",
        "environment/c.txt": "c\n",
        "tests/test.sh": 'cat /task/level.txt; [ "$(cat /task/level.txt)" = "$EXPECTED" ] && [ "$MODE" = strict ] && '
        '[ "$GREETING" = \'say "hello"\' ] && [ "$(cat /task/sub/made.txt)" = "two words" ] && '
        '[ "$(cat /task/out.txt)" = "done in solution" ] && echo 1 > /logs/verifier/reward.txt\n',
        "solution/solve.sh": 'echo "$WORD in $(cat /solution/word.txt)" > /task/out.txt\n',
        "solution/word.txt": "solution\n",
    }
    return write_files(folder, files)


def test_unsupported_parts_of_a_task_are_named_on_reading(tmp_path: Path) -> None:
    found = only(everything(tmp_path / "all"))
    assert list(found.left_out) == [
        "FROM python:3.13-slim AS only is ignored: the programs are those of the node",
        "RUN installs nothing: apt-get update && apt-get install -y tmux && echo $LEVEL > l…",
        "COPY --chown is ignored",
        "COPY --chmod is ignored",
        'RUN runs without the network: pip install x; echo "$TOOLS" > tools.txt || true',
        "USER is ignored: me",
        'SHELL is ignored: ["/bin/sh", "-c"]',
        "VOLUME is ignored: /cache",
        "HEALTHCHECK is ignored: CMD true",
        'ENTRYPOINT is ignored: ["/start"]',
        'CMD is ignored: ["bash"]',
        "artifacts is ignored: the patch has all files that were changed",
        "odd is ignored: it is not known",
        "agent.timeout_sec is ignored: use --max-seconds",
        "agent.user is ignored: commands run as the sandbox has it",
        "agent.network_mode is ignored: workers decide which hosts agents reach",
        "verifier.timeout_sec is ignored: a check may take 600 seconds",
        "verifier.user is ignored: commands run as the sandbox has it",
        "verifier.network_mode is ignored: a check has no network",
        "verifier.strange is ignored: it is not known",
        "environment.docker_image is ignored: the Dockerfile is followed",
        "environment.build_timeout_sec is ignored: no image is built",
        "environment.cpus is ignored: workers decide on that",
        "environment.memory_mb is ignored: workers decide on that",
        "environment.storage_mb is ignored: workers decide on that",
        "environment.allow_internet is ignored: workers decide which hosts agents reach",
        "environment.skills_dir is ignored: agents have the skills of the cluster",
        "environment.healthcheck is ignored: nothing is started",
        "docker-compose.yaml: ports is ignored",
        "docker-compose.yaml: privileged is ignored",
    ]
    assert set(read_tree(found.workspace)) == {"a.txt", "b.txt", "renamed.txt"}


def test_supported_parts_of_a_task_work_in_shell_and_tests(tmp_path: Path) -> None:
    found = only(everything(tmp_path / "all"))
    assert found.setup is not None
    place = tmp_path / "place"
    write_files(place, {name: file.content for name, file in read_tree(found.workspace).items()})
    (place / ".openhands").mkdir()
    solving = found.turns[0]["tool_calls"][0]["arguments"]["command"]
    shell = f"pip() {{ false; }}; {found.setup}; echo $PATH > path.txt; {solving}"
    subprocess.run(("bash", "-c", shell), cwd=place, check=True)
    assert (place / "tools.txt").read_text() == f"{place}/tools\n"
    assert (place / "path.txt").read_text().startswith(f"{place}/tools:/")
    assert (place / "out.txt").read_text() == "done in solution\n"
    write_files(place, {name: file.content for name, file in read_tree(found.hidden).items()})
    checking = subprocess.run(("bash", "-c", f"{found.setup} && {found.check}"), cwd=place, check=False)
    assert checking.returncode == 0


def test_part_missing_in_many_tasks_is_one_line() -> None:
    some = [Instance(name, "x", left_out=("FROM a is ignored",)) for name in "abcde"]
    assert list_left_out(some) == ["a, b, c and 2 more: FROM a is ignored"]


def test_the_first_terminal_bench_says_what_it_ignores(tmp_path: Path) -> None:
    (tmp_path / "old" / "tests").mkdir(parents=True)
    about = "instruction: Do it.\nparser_name: pytest\nmax_agent_timeout_sec: 9\nrun_tests_in_same_shell: true\n"
    (tmp_path / "old" / "task.yaml").write_text(about)
    (tmp_path / "old" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\n")
    (tmp_path / "old" / "tests" / "test_outputs.py").write_text("def test_it(): pass\n")
    assert list(only(tmp_path / "old").left_out)[1:] == [
        "max_agent_timeout_sec is ignored: use --max-seconds",
        "run_tests_in_same_shell is ignored: a check has a shell for itself",
        "solution.sh is missing, so no script comes with the task",
    ]
    (tmp_path / "old" / "task.yaml").write_text(about.replace("pytest", "odd"))
    with pytest.raises(UsageError, match="parser_name is odd"):
        read_dataset(tmp_path / "old")


@pytest.mark.parametrize(
    ("file", "text", "reward", "metrics"),
    [
        ("reward.txt", "0.5", 0.5, {}),
        ("reward.txt", "1", 1.0, {}),
        ("reward.json", '{"reward": 0.25, "style": 0.5}', 0.25, {"style": 0.5}),
        ("reward.json", '{"accuracy": 0.75}', 0.75, {"accuracy": 0.75}),
        ("reward.json", '{"accuracy": 0.75, "style": 1}', 0.0, {}),
        ("reward.txt", "nan", 0.0, {}),
    ],
)
def test_rewards_of_a_task_stay_numbers(
    tmp_path: Path, file: str, text: str, reward: float, metrics: dict[str, float]
) -> None:
    folder = harbor_task(tmp_path / "hello")
    (folder / "tests" / "test.sh").write_text(f"echo '{text}' > /logs/verifier/{file}\n")
    found = only(folder)
    done = checked(found, tmp_path / "work")
    assert found.has_rewards
    assert find_rewards(done.stdout) == Rewards(reward, metrics)
    assert done.returncode == (reward < 1.0)
