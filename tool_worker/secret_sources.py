"""The operator's table of secret sources: HTTP addresses, commands, files and Python functions.

    [vault]
    url = "https://vault.example.com/v1/secret/data/{tenant}/{path}"
    headers = { X-Vault-Token = "${VAULT_TOKEN}" }
    pointer = "/data/data/{field}"
    tenants = ["*"]

Holds: a task chooses an entry, a path and a field, and nothing else: no address, host, program, file or credential. An
entry serves only the tenants and paths that it lists. An error contains no value and no part of an answer.
Does not: keep a value longer than its entry's `cache_seconds`, or anywhere but in memory.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import re
import signal
import ssl
import stat
import tomllib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import quote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from broker.runtime import VARIABLE, UsageError
from broker.secrets import SOURCE_PATTERN, SecretReference, SecretUnavailable
from broker.tools import entry_points
from tool_worker.tools import run_in_own_thread

ENTRY_POINTS = "deckhands.secret_sources"
MAX_ANSWER_BYTES = 256 * 1024
MAX_CACHED_VALUES = 1_000
MAX_FILE_BYTES = 2**20
"""Limit of the table itself."""
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


class SecretSourceSpec(BaseModel):
    """One source of the operator's table.

    Attributes:
        url: the address, read by GET. Its path and query may contain `{path}`, `{field}` and `{tenant}`.
        headers: the request's headers; `${NAME}` is replaced by an environment variable.
        header_files: headers whose values are read from files at each lookup, such as a token that an agent renews.
        command: a program, by its absolute path, and its arguments, which may contain the placeholders; it prints the
            value.
        file: the absolute path of a file with the value; it may contain the placeholders.
        callable: a function as `module:attribute`, or the name of an entry point of `deckhands.secret_sources`. It is
            called with the `SecretReference` and `tenant=`, and returns the value; it may be a coroutine function.
        pointer: JSON Pointer of the value in an answer that is JSON; empty if the whole answer is the value.
        tenants: names or patterns of the tenants that may use it; empty for conversations without a tenant only.
        paths: patterns of the paths that may be looked up; `{tenant}` stands for the tenant.
        cache_seconds: how long a value is cached; 0 to look it up for each command.
        timeout: seconds for one lookup.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=SOURCE_PATTERN)]
    url: Annotated[str, Field(pattern=r"^(https?://[^\s/{}?#]+(/\S*)?)?$")] = ""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    header_files: dict[str, Path] = Field(default_factory=dict)
    command: tuple[str, ...] = ()
    file: Annotated[str, Field(pattern=r"^(/.*)?$")] = ""
    callable: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]*$")] = ""
    pointer: Annotated[str, Field(pattern=r"^(/.*)?$")] = ""
    tenants: tuple[str, ...] = ()
    paths: tuple[str, ...] = ("*",)
    cache_seconds: Annotated[float, Field(ge=0, le=3600)] = 10.0
    timeout: Annotated[float, Field(gt=0, le=120)] = 10.0

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        kinds = [kind for kind in ("url", "command", "file", "callable") if getattr(self, kind)]
        if len(kinds) != 1:
            raise ValueError("give exactly one of url, command, file and callable")
        if self.command and (not self.command[0].startswith("/") or "{" in self.command[0]):
            raise ValueError("command starts with the absolute path of a program")
        if (self.headers or self.header_files) and not self.url:
            raise ValueError("headers belong to a url")
        if urlsplit(self.url).username is not None:
            raise ValueError("url contains a user; use headers")
        templates = (self.url, *self.command, self.file, self.pointer)
        unknown = {name for text in templates for name in _PLACEHOLDER.findall(text)} - {"path", "field", "tenant"}
        if unknown:
            raise ValueError(f"the placeholders are {{path}}, {{field}} and {{tenant}}, not {sorted(unknown)}")
        return self

    @property
    def secrets(self) -> tuple[str, ...]:
        """Its own credentials, to be masked in every conversation."""
        return tuple({part for text in self.headers.values() for part in (text, text.rpartition(" ")[2]) if part})

    def check_use(self, reference: SecretReference, tenant: str) -> None:
        """Check that a tenant may look up a path here.

        Raises:
            SecretUnavailable: the tenant may not use this source or path.
        """
        is_listed = any(fnmatchcase(tenant, pattern) for pattern in self.tenants) if self.tenants else not tenant
        if not is_listed:
            who = f"the tenant {tenant}" if tenant else "a conversation without a tenant"
            raise SecretUnavailable(
                f"{who} may not use the source {self.name}.",
                remedy="The tool workers' operator lists the tenants of a source.",
            )
        patterns = [pattern.replace("{tenant}", escape(tenant)) for pattern in self.paths]
        if not any(fnmatchcase(reference.path, pattern) for pattern in patterns):
            raise SecretUnavailable(
                f"the source {self.name} does not serve the path {reference.path!r}.",
                remedy="The tool workers' operator lists the paths of a source.",
            )


def read_secret_sources(path: Path, environment: Mapping[str, str]) -> tuple[SecretSourceSpec, ...]:
    """Read the operator's table, a TOML file.

    Raises:
        UsageError: it cannot be read or used; the text names the entry and never a value.
    """
    try:
        with path.open("rb") as file:
            entries = tomllib.loads(file.read(MAX_FILE_BYTES).decode())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is not a table of secret sources: {type(error).__name__}.", remedy="Write TOML: [NAME] url = …"
        ) from None
    return tuple(_parse_source(name, entry, environment) for name, entry in entries.items())


def _parse_source(name: str, entry: object, environment: Mapping[str, str]) -> SecretSourceSpec:
    def variable(found: re.Match[str]) -> str:
        if found[1] not in environment:
            raise UsageError(
                f"The secret source {name!r} needs the variable {found[1]}, which is not set.",
                remedy=f"Set {found[1]}.",
            )
        return environment[found[1]]

    try:
        fields = dict(entry) if isinstance(entry, dict) else {"entry": entry}
        headers = fields.get("headers")
        if isinstance(headers, dict):
            fields["headers"] = {key: VARIABLE.sub(variable, str(text)) for key, text in headers.items()}
        return SecretSourceSpec.model_validate({**fields, "name": name})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        why = f"{where}: {first['msg']}" if where else first["msg"].removeprefix("Value error, ")
        # `from None`: the original's text may contain values.
        raise UsageError(f"The secret source {name!r} cannot be used: {why}.", remedy="Change its entry.") from None


class SecretSources:
    """Looks up secrets in the operator's sources; see `SecretLookup`.

    Args:
        environment: the environment of programs.
        monotonic: the clock of the cache.
    """

    def __init__(
        self, specs: Iterable[SecretSourceSpec], environment: Mapping[str, str], monotonic: Callable[[], float]
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._environment = environment
        self._monotonic = monotonic
        self._cache: OrderedDict[tuple[SecretReference, str], tuple[float, str]] = OrderedDict()
        self._functions: dict[str, Callable[..., Any]] = {}

    async def look_up(self, reference: SecretReference, *, tenant: str) -> str:
        """See `SecretLookup.look_up`."""
        spec = self._specs.get(reference.source)
        if spec is None:
            raise SecretUnavailable(
                f"the tool workers have no source {reference.source}.",
                remedy="The operator defines sources in the file DECKHANDS_SECRET_SOURCES.",
            )
        spec.check_use(reference, tenant)
        cached = self._cache.get((reference, tenant))
        if cached is not None and self._monotonic() - cached[0] < spec.cache_seconds:
            return cached[1]
        asked_at = self._monotonic()
        try:
            async with asyncio.timeout(spec.timeout):
                value = await self._ask(spec, reference, tenant)
        except TimeoutError:
            raise SecretUnavailable(f"the source {spec.name} did not answer within {spec.timeout:g} s.") from None
        if spec.cache_seconds:
            self._cache[reference, tenant] = (asked_at, value)
            self._cache.move_to_end((reference, tenant))
            while len(self._cache) > MAX_CACHED_VALUES:
                self._cache.popitem(last=False)
        return value

    async def _ask(self, spec: SecretSourceSpec, reference: SecretReference, tenant: str) -> str:
        if spec.callable:
            answer = await self._call(spec, reference, tenant)
        elif spec.url:
            answer = await _fetch(spec, _fill(spec, spec.url, reference, tenant, quoted=True))
        elif spec.command:
            arguments = [_fill(spec, text, reference, tenant) for text in spec.command]
            answer = await _run(spec, arguments, self._environment)
        else:
            path = Path(_fill(spec, spec.file, reference, tenant))
            answer = await asyncio.to_thread(_read_file, spec, path)
        if not spec.pointer:
            return answer.rstrip("\r\n")
        return _find_value(spec, answer, _fill(spec, spec.pointer, reference, tenant))

    async def _call(self, spec: SecretSourceSpec, reference: SecretReference, tenant: str) -> str:
        try:
            if spec.name not in self._functions:
                self._functions[spec.name] = await asyncio.to_thread(_load_function, spec.callable)
            function = self._functions[spec.name]
            if inspect.iscoroutinefunction(function):
                found = await function(reference, tenant=tenant)
            else:
                found = await run_in_own_thread(partial(function, reference, tenant=tenant))
        except TimeoutError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a foreign function may raise anything, with a value in it)
            raise SecretUnavailable(f"the function of the source {spec.name} failed: {type(error).__name__}.") from None
        if not isinstance(found, str):
            raise SecretUnavailable(f"the function of the source {spec.name} returned {type(found).__name__}, not str.")
        return found


def _fill(
    spec: SecretSourceSpec, template: str, reference: SecretReference, tenant: str, *, quoted: bool = False
) -> str:
    parts = {"path": reference.path, "field": reference.field, "tenant": tenant}

    def part(found: re.Match[str]) -> str:
        text = parts[found[1]]
        if not text or (found[1] == "tenant" and text[0] in ".-"):  # another folder, or an option of a program
            raise SecretUnavailable(
                f"the source {spec.name} needs a {found[1]}.",
                remedy="Write SOURCE:PATH#FIELD." if found[1] != "tenant" else "Name the task's tenant.",
            )
        return quote(text, safe="/") if quoted else text

    return _PLACEHOLDER.sub(part, template)


async def _fetch(spec: SecretSourceSpec, url: str) -> str:
    """Ask an HTTP source; redirects are not followed, because they would carry the headers elsewhere."""
    import httpx2

    headers = {"Accept-Encoding": "identity", **spec.headers}
    for name, path in spec.header_files.items():
        headers[name] = (await asyncio.to_thread(_read_file, spec, path)).strip()
    try:
        tls = await asyncio.to_thread(ssl.create_default_context)
        async with (
            httpx2.AsyncClient(verify=tls, follow_redirects=False, timeout=spec.timeout) as client,
            client.stream("GET", url, headers=headers) as response,
        ):
            if response.status_code != 200:
                raise SecretUnavailable(f"the source {spec.name} answered with status {response.status_code}.")
            answer = bytearray()
            async for chunk in response.aiter_raw():
                answer += chunk
                if len(answer) > MAX_ANSWER_BYTES:
                    raise SecretUnavailable(f"the source {spec.name} answered with more than {MAX_ANSWER_BYTES} bytes.")
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
        raise SecretUnavailable(f"the source {spec.name} cannot be reached: {type(error).__name__}.") from None
    return _decode(spec, bytes(answer))


async def _run(spec: SecretSourceSpec, arguments: list[str], environment: Mapping[str, str]) -> str:
    """Run a program of the operator in a separate process group."""
    pipe, silence = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        program = await asyncio.create_subprocess_exec(
            *arguments, stdin=silence, stdout=pipe, stderr=silence, env=environment, start_new_session=True
        )
    except (OSError, ValueError) as error:
        raise SecretUnavailable(
            f"the program of the source {spec.name} cannot be run: {type(error).__name__}."
        ) from None
    assert program.stdout is not None
    try:
        answer = bytearray()
        while len(answer) <= MAX_ANSWER_BYTES and (chunk := await program.stdout.read(65_536)):
            answer += chunk
        if len(answer) > MAX_ANSWER_BYTES:
            raise SecretUnavailable(
                f"the program of the source {spec.name} printed more than {MAX_ANSWER_BYTES} bytes."
            )
        code = await program.wait()
    finally:
        with suppress(ProcessLookupError):  # its children, too, which may hold its output open
            os.killpg(program.pid, signal.SIGKILL)
        await asyncio.shield(program.wait())
    if code:
        raise SecretUnavailable(f"the program of the source {spec.name} ended with code {code}.")
    return _decode(spec, bytes(answer))


def _read_file(spec: SecretSourceSpec, path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SecretUnavailable(f"the file of the source {spec.name} is no regular file.")
            answer = file.read(MAX_ANSWER_BYTES + 1)
    except OSError as error:
        raise SecretUnavailable(f"a file of the source {spec.name} cannot be read: {error.strerror}.") from None
    if len(answer) > MAX_ANSWER_BYTES:
        raise SecretUnavailable(f"a file of the source {spec.name} has more than {MAX_ANSWER_BYTES} bytes.")
    return _decode(spec, answer)


def _decode(spec: SecretSourceSpec, answer: bytes) -> str:
    try:
        return answer.decode()
    except UnicodeDecodeError:
        raise SecretUnavailable(f"the answer of the source {spec.name} is not text.") from None


def _find_value(spec: SecretSourceSpec, answer: str, pointer: str) -> str:
    """Return the text at a JSON Pointer (RFC 6901)."""
    try:
        found = json.loads(answer)
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            found = found[int(key)] if isinstance(found, list) else found[key]
    except (ValueError, LookupError, TypeError, RecursionError):
        found = None
    if not isinstance(found, str):
        raise SecretUnavailable(f"the answer of the source {spec.name} has no text at {pointer}.")
    return found


def _load_function(name: str) -> Callable[..., Any]:
    if ":" not in name:
        function: Callable[..., Any] = entry_points(ENTRY_POINTS)[name].load()
        return function
    module, _, attribute = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    loaded: Callable[..., Any] = found
    return loaded
