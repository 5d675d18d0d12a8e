"""Start a model server: `python -m tests.model_server --help`."""

import argparse
import asyncio
import contextlib
import json
import signal
import time
from pathlib import Path

from broker.runtime.errors import DeckhandsError
from controller_worker.providers.scripted import Script
from tests.model_server.faults import Fault, FaultPlan
from tests.model_server.latency import Latency
from tests.model_server.quota import Quota
from tests.model_server.scripts import builtin_script
from tests.model_server.server import ModelServer, serve


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m tests.model_server", description="A local model provider.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one; the first line printed is the port")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--script", type=Path, help="a file as in docs/models.md#scripted-models")
    source.add_argument("--builtin", default="finish", help="finish, say:TEXT, bash:N or forever")
    parser.add_argument("--latency", type=float, help="seconds per reply, instead of the script's")
    parser.add_argument(
        "--latency-sigma", type=float, default=0.0, help="log-normal around --latency, by `latency-key=NAME` of a task"
    )
    parser.add_argument("--model", action="append", default=[], help="a name it knows, repeatable; none: all")
    parser.add_argument("--key", help="the only key it accepts; none: all")
    parser.add_argument("--faults", help="a plan as JSON: a list of faults, see tests/model_server/faults.py")
    parser.add_argument("--records", type=int, default=200, help="how many of the last requests are kept")
    parser.add_argument("--requests-per-minute", type=float, default=0, help="of each key; 0: no limit")
    parser.add_argument("--tokens-per-minute", type=float, default=0, help="of each key, in and out; 0: no limit")
    parser.add_argument("--burst-seconds", type=float, default=2, help="how many seconds' worth may come at once")
    parser.add_argument("--concurrency", type=int, default=0, help="calls of each key at once; 0: no limit")
    parser.add_argument(
        "--by-text", nargs=2, action="append", default=[], metavar=("TEXT", "FILE"), help="a script for what has TEXT"
    )
    parser.add_argument("--batch-seconds", type=float, default=0.2, help="how long a batch takes")
    arguments = parser.parse_args()
    try:
        script = Script.load(arguments.script) if arguments.script else builtin_script(arguments.builtin)
        faults = json.loads(arguments.faults) if arguments.faults else None
        arguments.by_text = [(text, Script.load(Path(file))) for text, file in arguments.by_text]
    except (DeckhandsError, ValueError) as error:
        parser.error(str(error))
    asyncio.run(_run(arguments, script, faults))


async def _run(arguments: argparse.Namespace, script: Script, faults: list[dict[str, object]] | None) -> None:
    server = ModelServer(
        script,
        latency=Latency(arguments.latency, arguments.latency_sigma),
        models=arguments.model,
        key=arguments.key,
        records=arguments.records,
        batch_seconds=arguments.batch_seconds,
        by_text=arguments.by_text,
        faults=None if faults is None else FaultPlan([Fault.model_validate(fault) for fault in faults]),
        quota=Quota(
            arguments.requests_per_minute,
            arguments.tokens_per_minute,
            arguments.concurrency,
            arguments.burst_seconds,
            time.monotonic,
        ),
    )
    serving = asyncio.current_task()
    assert serving is not None
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serve(server, arguments.host, arguments.port)


if __name__ == "__main__":
    main()
