"""`python -m deckhands.headless`: OpenHands' headless mode: its options and configuration, and one run.

Holds: however the run ends, its logs and its trajectory are written, if it started. Success means the state `finished`
and a result that fulfils the contract.
Does not: use a cluster that DECKHANDS_URL names, because the workspace is a directory of this machine.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click

from broker.contract import (
    DEFAULT_CONDENSER,
    AgentSpec,
    ConfirmationPolicy,
    Event,
    Limits,
    LLMSpec,
    NoOpCondenserSpec,
    WorkspaceSpec,
    asks_model,
)
from broker.log import render_event_line
from broker.runtime import DeckhandsError, UsageError
from deckhands.cli.command_group import with_options
from deckhands.cli.options import Amount, read_task
from deckhands.cli.stop_signals import on_stop_signals
from deckhands.cli.task_options import BROWSER_POOL, BROWSING_AGENTS, IPYTHON_POOL
from deckhands.client import (
    Ending,
    EventPrinter,
    ExitCode,
    Renderer,
    RunCallbacks,
    RunFolder,
    Task,
    TaskSpec,
    check_acp_command,
    check_directory,
    ignore_closed_output,
    list_local_agents,
    note,
    require_local_agent,
    resolve_local_directory,
    resolve_script_path,
    run_privately,
)
from deckhands.cluster import Home
from deckhands.interop import (
    DENIED_PATHS,
    MAX_ITERATIONS,
    MAX_SECONDS,
    VARIABLES,
    Config,
    Contract,
    DeniedChanges,
    Fingerprints,
    HeadlessExit,
    Inside,
    PathDenied,
    PermittedFolders,
    WorkerFiles,
    experiment_id,
    locate,
    read_config,
    to_condenser,
    to_trajectory,
    with_sdk_choice,
)
from deckhands.operations import find_sandbox_fault
from deckhands.settings import CliSettings, read_configuration_files

RUNTIMES = ("local", "docker")
IMAGES = "DECKHANDS_DOCKER_IMAGES"
ANALYZERS = ("llm",)
OF_AGENT = (
    *("disabled_microagents", "enable_browsing", "enable_cmd", "enable_condensation_request", "enable_editor"),
    *("enable_finish", "enable_history_truncation", "enable_jupyter", "enable_plan_mode"),
    *("enable_prompt_extensions", "enable_som_visual_browsing", "enable_think"),
)
"""Keys of `[agent]` that have the same name in `AgentSpec`."""
AUTO_CONTINUE = (
    "Continue the task as you think best. If you have done it, use the tool finish. "
    "Never ask a person for help: nobody reads your questions."
)
"""The answer to an agent's question (the intent of OpenHands 12; own words)."""


@dataclass(frozen=True, slots=True)
class HeadlessOptions:
    """The options."""

    text: str | None
    file: Path | None
    name: str | None
    max_iterations: int | None
    directory: str | None
    agent: str | None
    config_file: Path | None
    budget: float | None
    llm_config: str | None
    no_auto_continue: bool
    timeout: float
    permit: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadlessTask:
    """The parameters of a run.

    Attributes:
        trajectory: the directory where the trajectory is saved, and its path below it; None to save none.
        is_continued: whether `AUTO_CONTINUE` answers an agent's questions.
        permitted: the folders that the run may change.
        files: further files for the workers.
        environment: for the workers.
    """

    task: str
    contract: Contract
    permitted: PermittedFolders
    agent: AgentSpec
    workspace: WorkspaceSpec
    limits: Limits
    seconds: float
    trajectory: tuple[Path, str] | None
    is_continued: bool
    home: Home
    files: WorkerFiles
    environment: Mapping[str, str] = field(repr=False)


@click.command("headless", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("-t", "--task", "text", help="The task. Without one, standard input is read.")
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A file that holds the task. It wins over -t.")
@click.option("-n", "--name", help="The name of the run: the id of its experiment. By default a new one.")
@click.option("-i", "--max-iterations", type=click.IntRange(min=1), help="The most iterations.  [default: 80]")
@click.option("-d", "--directory", help="The workspace, by default WORKSPACE_BASE. It is created if it does not exist.")
@click.option("-c", "--agent-cls", "agent", help="The agent.  [default: CodeActAgent]")
@click.option("--config-file", type=click.Path(path_type=Path), help="By default config.toml, if it exists.")
@click.option("-b", "--max-budget-per-task", "budget", type=Amount(min=0, min_open=True), help="The budget, in USD.")
@click.option("-l", "--llm-config", help="The section [llm.NAME] of the configuration that names the model.")
@click.option("--no-auto-continue", is_flag=True, help="End with code 5 when the agent asks a question.")
@click.option(
    "--timeout",
    type=Amount(min=0, min_open=True),
    default=MAX_SECONDS,
    show_default=True,
    help="Stop after this many seconds.",
)
@click.option(
    "--permit",
    multiple=True,
    metavar="FOLDER",
    help="End with code 9 if a file outside of this folder of the workspace was changed. May be repeated. README.md, "
    "experiments and logs are always permitted.  [default: the whole workspace]",
)
@click.version_option(None, "-v", "--version", package_name="deckhands", message="deckhands %(version)s")
@with_options(HeadlessOptions)
def headless(options: HeadlessOptions) -> int:
    """Run one task on a directory like OpenHands' headless mode, and leave experiments/ID/results/final.json there.

    Exit codes: 0 finished, 1 error, 2 usage, 3 rejected by the agent, 4 out of time, 5 needs an answer, 6 a limit was
    reached, 8 the result is missing, 9 a path outside of the workspace was refused or a file outside of the permitted
    folders was changed, 130 interrupted.
    """
    try:
        return run_headless(_task_of(options))
    except PathDenied as error:
        note(f"deckhands: {error.message}")
        note(f"  {error.remedy}")
        return int(HeadlessExit.PATH_DENIED)


def _task_of(options: HeadlessOptions) -> HeadlessTask:
    for notice in read_configuration_files(others=(*VARIABLES, "LITELLM_API_BASE")):
        note(notice)
    settings = CliSettings.from_env()
    config = read_config(options.config_file, settings.environment, Path.cwd())
    config.select_agent(_agent_name(options, config), list_local_agents())
    profile = options.llm_config or config.get("agent", "llm_config")
    environment = config.environment(settings.environment, None if profile == "llm" else profile)
    experiment = experiment_id(options.name)
    task = read_task(None if options.file is not None else options.text, file=options.file)
    agent = with_sdk_choice(_agent(options, config, CliSettings.from_env(environment)), config, environment)
    workspace = _workspace(config, settings.sandbox, agent)
    files = WorkerFiles.of(config, environment, has_network=bool(workspace.network))
    for notice in config.notices:
        note(notice)
    if image := workspace.image:
        environment.setdefault(IMAGES, image)
    if workspace.sandbox == "docker":
        _require_docker(environment)
    iterations = options.max_iterations or config.get("core", "max_iterations", MAX_ITERATIONS)
    budget = options.budget or config.get("core", "max_budget_per_task") or None  # 0: no limit, as in OpenHands
    for name, number in (("max_iterations", iterations), ("max_budget_per_task", budget), ("timeout", options.timeout)):
        if number is not None and not (math.isfinite(number) and number > 0):
            raise UsageError(f"{name} is {number}.", remedy="Use a number above 0.")
    root = _root(options.directory or config.get("core", "workspace_base"), environment)
    if workspace.sandbox == "docker" and root.stat().st_uid == 0:
        raise UsageError(
            f"{root} belongs to root, and no program in a container may run as root.", remedy="Give it to another user."
        )
    saved = config.get("core", "save_trajectory_path", "")
    return HeadlessTask(
        task=task,
        contract=Contract(root, experiment),
        permitted=PermittedFolders.parse(root, options.permit),
        agent=agent,
        workspace=workspace.model_copy(update={"path": str(root)}),
        limits=Limits(max_iterations=iterations, max_budget_usd=budget),
        seconds=options.timeout,
        trajectory=locate(root, saved, f"{experiment}.json") if saved else None,
        is_continued=not options.no_auto_continue,
        home=Home(settings.home),
        files=files,
        environment=environment,
    )


def _require_docker(environment: dict[str, str]) -> None:
    """Refuse a run whose commands could not run, before it causes costs. Blocks for a second or two.

    Raises:
        UsageError: no image is named, the engine is missing, or it lacks the image; the text says which.
    """
    if not environment.get(IMAGES):
        raise UsageError(
            "RUNTIME is docker, and no image is named.",
            remedy=f"Name one by base_container_image in [sandbox], SANDBOX_BASE_CONTAINER_IMAGE or {IMAGES}.",
        )
    if reason := find_sandbox_fault({**environment, "DECKHANDS_SANDBOX": "docker"}):
        raise UsageError(f"RUNTIME is docker, and docker does not work here: {reason}.", remedy="Or use RUNTIME=local.")


def _root(named: str | None, environment: dict[str, str]) -> Path:
    """Return the directory of the workspace; create it if its parent exists."""
    if named is None:
        raise UsageError("No workspace is named.", remedy="Name a directory with -d, or set WORKSPACE_BASE.")
    path = Path(named).expanduser()
    check_directory(path.absolute(), environment)
    if path.absolute().parent.is_dir() and not path.exists():
        try:
            path.mkdir()
        except OSError as error:
            raise UsageError(
                f"The directory {path} cannot be made: {error.strerror}.", remedy="Name another with -d."
            ) from error
    return resolve_local_directory(path, environment)


def _agent_name(options: HeadlessOptions, config: Config) -> str:
    return str(options.agent or config.get("core", "default_agent", "CodeActAgent"))


def _agent(options: HeadlessOptions, config: Config, settings: CliSettings) -> AgentSpec:
    name = _agent_name(options, config)
    check_acp_command(name)
    if settings.model is None and not settings.has_profiles and asks_model(name):
        raise UsageError(
            "No model is configured.",
            remedy="Set LLM_MODEL and LLM_API_KEY, or `model` and `api_key` in the section [llm] of config.toml.",
        )
    chosen = {key: value for key in OF_AGENT if (value := config.get("agent", key)) is not None}
    if config.get("core", "enable_browser"):
        chosen.setdefault("enable_browsing", True)
    elif config.get("core", "enable_browser") is False:
        chosen["enable_browsing"] = False
    if (condenser := to_condenser(config)) is not None:
        chosen["condenser"] = condenser
    elif config.get("core", "enable_default_condenser") is False:
        chosen["condenser"] = NoOpCondenserSpec()
    agent = AgentSpec.model_validate(
        {
            "name": name,
            "llm": LLMSpec(model=settings.model),
            "condenser": DEFAULT_CONDENSER,
            "confirmation": _confirmation(config),
            "enable_workspace_skills": True,
            **chosen,
        }
    )
    require_local_agent(agent)
    return resolve_script_path(agent)


def _confirmation(config: Config) -> ConfirmationPolicy:
    """Return the confirmation policy. No user can answer, so a question ends the run."""
    analyzer = config.get("security", "security_analyzer", "")
    if analyzer and analyzer not in ANALYZERS:
        raise UsageError(
            f"[security] security_analyzer is {ascii(analyzer)[:100]}.", remedy=f"Use {', '.join(ANALYZERS)}."
        )
    if not config.get("security", "confirmation_mode"):
        return ConfirmationPolicy()
    return ConfirmationPolicy(mode="risky", analyzer=analyzer) if analyzer else ConfirmationPolicy(mode="always")


def _workspace(config: Config, sandbox: str, agent: AgentSpec) -> WorkspaceSpec:
    """Return the workspace without its directory."""
    runtime = config.get("core", "runtime", "local")
    if runtime not in RUNTIMES:
        raise UsageError(f"RUNTIME is {ascii(runtime)[:100]}.", remedy=f"Use {' or '.join(RUNTIMES)}.")
    image = config.get("sandbox", "runtime_container_image") or config.get("sandbox", "base_container_image") or ""
    if image and runtime != "docker":
        note(f"The image {image} has no effect: RUNTIME is not docker.")
        image = ""
    pool = "bash"
    if agent.enable_browsing or agent.name in BROWSING_AGENTS:
        pool = BROWSER_POOL
    elif agent.enable_jupyter:
        pool = IPYTHON_POOL
    return WorkspaceSpec.model_validate(
        {
            "sandbox": "docker" if runtime == "docker" else sandbox,
            "image": image,
            "network": bool(config.get("sandbox", "use_host_network", False)),
            "pool": pool,
        }
    )


def run_headless(order: HeadlessTask) -> int:
    """Run a task and return the exit code.

    Raises:
        PathDenied: a path of the contract or of a permitted folder is a link.
        DeckhandsError: the workspace cannot be read or written, or the store or the workers cannot be started or kept
            running.
    """
    contract = order.contract
    with contract.inside.lock(f"experiments/{contract.experiment}"):
        before = order.permitted.prepare()
        contract.prepare(order.task, iterations=order.limits.max_iterations, seconds=order.seconds)
        note(f"Experiment {contract.experiment} in {contract.root}")
        ending, denied = asyncio.run(_run(order, before))
        code = _judge(contract, ending, denied)
        with ignore_closed_output():
            EventPrinter(as_json=False).summary(ending.summary)
    return code


def _judge(contract: Contract, ending: Ending, denied: DeniedChanges) -> int:
    """Return the exit code, and print the faults of the result."""
    if denied:
        note(str(denied))
        return int(HeadlessExit.PATH_DENIED)
    fault = contract.find_fault()
    if not fault:
        note(f"Result: {contract.final}")
        return int(ending.exit_code)
    note(f"No result: {fault}")
    may_be_why = ending.exit_code in (ExitCode.FINISHED, ExitCode.ERROR)
    is_why = ending.exit_code is ExitCode.FINISHED or ending.summary.error_code == "goal_not_reached"
    return int(HeadlessExit.MISSING_ARTIFACT if may_be_why and is_why else ending.exit_code)


async def _run(order: HeadlessTask, before: Fingerprints) -> tuple[Ending, DeniedChanges]:
    contract = order.contract
    inside = order.contract.inside
    printer = EventPrinter(as_json=False)
    renderer = Renderer(is_coloured=False)
    started: list[str] = []
    watcher = RunCallbacks(on_notice=note, reply=AUTO_CONTINUE if order.is_continued else None)
    on_stop_signals(partial(_interrupt, watcher))
    watcher.on_start = started.append
    task = Task(
        TaskSpec(
            task=contract.instructions(order.task),
            agent=order.agent,
            workspace=order.workspace,
            limits=order.limits,
            tools=tuple(f"{name}/*" for name in order.files.servers),
            title=contract.experiment,
        ),
        time_limit_seconds=order.seconds,
    )
    with (
        inside.create(f"{contract.logs}/run.log") as log,
        tempfile.TemporaryDirectory(prefix="deckhands-headless-") as folder,
    ):
        environment = {**order.environment, **order.files.write(Path(folder))}

        def show(event: Event) -> None:
            lines = renderer.lines(event)
            log.write("".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
            log.flush()
            with ignore_closed_output(watcher.interrupted.set):
                printer.event(event)

        watcher.on_event = show
        try:
            ending = await run_privately(order.home, task, environment, watcher)
        except DeckhandsError as error:
            log.write(f"{error}\n".encode())
            raise
        finally:
            denied = order.permitted.find_changes(before)  # before the command itself writes a trajectory
            if started:
                _store_logs(order, RunFolder(order.home.run_folder(started[0])), denied)
    return ending, denied


def _store_logs(order: HeadlessTask, folder: RunFolder, denied: DeniedChanges) -> None:
    """Copy the log of a run and its trajectory into the workspace."""
    events = folder.events() if folder.has_events else []
    if not events:
        return
    contract = order.contract
    inside = order.contract.inside
    lines = "".join(render_event_line(event) + "\n" for event in events)
    inside.write(f"{contract.logs}/events.jsonl", lines.encode())
    summary = json.dumps({**folder.summary().as_json(), DENIED_PATHS: denied.paths}, indent=2) + "\n"
    inside.write(f"{contract.logs}/summary.json", summary.encode())
    if order.trajectory is not None:
        trajectory, _ = to_trajectory(events)
        directory, path = order.trajectory
        if (directory / path).is_dir():  # the agent may have created it
            path = f"{path}/{contract.experiment}.json"
        Inside(directory).write(path, json.dumps(trajectory, indent=4).encode())


def _interrupt(watcher: RunCallbacks) -> None:
    """Stop gracefully the first time, immediately the second time."""
    if watcher.interrupted.is_set():
        watcher.at_once()
        sys.stdout.flush()
        os._exit(ExitCode.INTERRUPTED)
    watcher.interrupted.set()
