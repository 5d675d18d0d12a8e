"""A model server in a separate process, started from here and ended by its id."""

import json
import os
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from tests.forked_programs import ForkedProgram

STOP_LIMIT_SECONDS = 60.0
CONTROL_LIMIT_SECONDS = 610.0


class RunningModelServer:
    """A model server in a separate process.

    Attributes:
        url: for Anthropic's client; OpenAI's wants `url + "/v1"`.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        reader, writer = os.pipe()
        self._output = os.fdopen(reader)
        with os.fdopen(writer, "w") as output:
            self._process = ForkedProgram(
                "tests.model_server", *arguments, environment=os.environ, output=output.fileno(), errors=2
            )
        port = self._output.readline().strip()
        if not port:
            raise RuntimeError(f"the model server ended with exit code {self._process.wait(STOP_LIMIT_SECONDS)}")
        self.pid = self._process.pid
        self.url = f"http://127.0.0.1:{port}"

    def requests(self) -> list[dict[str, Any]]:
        """Return the last requests, oldest first: number, path, headers, body, fault, outcome."""
        requests: list[dict[str, Any]] = self._control("GET", "/requests")
        return requests

    def clear(self) -> None:
        """Forget the requests so far and any plan of faults."""
        self._control("DELETE", "/requests")
        self.plan()

    def plan(self, *faults: Mapping[str, Any]) -> None:
        """Set the plan of faults; see tests/model_server/faults.py."""
        self._control("POST", "/faults", list(faults))

    def counts(self) -> dict[str, int]:
        """Return how many requests were received, answered, refused, disconnected, and are in flight."""
        counts: dict[str, int] = self._control("GET", "/counts")
        return counts

    def batches(self) -> list[dict[str, Any]]:
        """Return the batches that were made, oldest first: id, items (custom_id, body), metadata."""
        batches: list[dict[str, Any]] = self._control("GET", "/batches")
        return batches

    def wait(self, **counts: int) -> dict[str, int]:
        """Return as soon as the named counts are reached; fail after ten minutes. Blocks the thread."""
        reached: dict[str, int] = self._control("GET", "/wait?" + urllib.parse.urlencode(counts))
        return reached

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_SECONDS)
        finally:
            self._process.kill()
            self._process.wait(STOP_LIMIT_SECONDS)
            self._output.close()

    def _control(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self.url + path, method=method, data=None if body is None else json.dumps(body).encode()
        )
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=CONTROL_LIMIT_SECONDS) as response:
            return json.load(response)
