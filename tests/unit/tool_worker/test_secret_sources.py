"""Sources of secrets: the operator decides addresses, programs and tenants; a task chooses a path."""

from __future__ import annotations

import base64
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from broker.runtime import UsageError
from broker.secrets import SecretReference, SecretUnavailable
from tests.entry_points import install_package
from tool_worker.secret_sources import MAX_ANSWER_BYTES, SecretSources, SecretSourceSpec, read_secret_sources
from tool_worker.settings import load_tool_settings

VALUE = "hvs-0123456789"
KEY = base64.b64encode(bytes(32)).decode()


class Vault:
    """A server with the answers of HashiCorp Vault's KV engine, version 2."""

    def __init__(self) -> None:
        self.values = {"/v1/secret/data/acme/api": {"token": VALUE}}
        self.asked: list[tuple[str, str]] = []
        self.token = "root"
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.path_qs, request.headers.get("X-Vault-Token", "")))
        if request.path == "/moved":
            raise web.HTTPFound("/v1/secret/data/acme/api")
        if request.path == "/large":
            return web.Response(text="x" * (MAX_ANSWER_BYTES + 1))
        if request.headers.get("X-Vault-Token") != self.token:
            return web.json_response({"errors": ["permission denied", VALUE]}, status=403)
        if request.path not in self.values:
            return web.json_response({"errors": []}, status=404)
        return web.json_response({"data": {"data": self.values[request.path]}})


@pytest.fixture
async def vault() -> AsyncIterator[Vault]:
    found = Vault()
    app = web.Application()
    app.router.add_get("/{tail:.*}", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


def of_vault(vault: Vault, **fields: Any) -> SecretSourceSpec:
    usual = {
        "url": vault.url + "/v1/secret/data/{tenant}/{path}",
        "headers": {"X-Vault-Token": "root"},
        "pointer": "/data/data/{field}",
        "tenants": ("*",),
        "cache_seconds": 0,
    }
    return SecretSourceSpec(name="vault", **{**usual, **fields})


async def look_up(spec: SecretSourceSpec, text: str, tenant: str = "acme") -> str:
    return await SecretSources([spec], os.environ, time.monotonic).look_up(SecretReference.parse(text), tenant=tenant)


async def refusal(spec: SecretSourceSpec, text: str, tenant: str = "acme") -> str:
    with pytest.raises(SecretUnavailable) as refused:
        await look_up(spec, text, tenant)
    assert VALUE not in str(refused.value)
    return str(refused.value)


async def test_vault_answers_below_the_tenants_own_path(vault: Vault) -> None:
    assert await look_up(of_vault(vault), "vault:api#token") == VALUE
    assert vault.asked == [("/v1/secret/data/acme/api", "root")]
    assert "status 404" in await refusal(of_vault(vault), "vault:api#token", "other")


async def test_renewed_token_of_an_agent_is_read_at_each_lookup(vault: Vault, tmp_path: Path) -> None:
    file = tmp_path / "token"
    spec = of_vault(vault, headers={}, header_files={"X-Vault-Token": file})
    file.write_text("root\n")
    assert await look_up(spec, "vault:api#token") == VALUE
    vault.token = "renewed"
    assert "status 403" in await refusal(spec, "vault:api#token")
    file.write_text("renewed\n")
    assert await look_up(spec, "vault:api#token") == VALUE


async def test_rotated_value_is_found_when_the_cache_ends(vault: Vault) -> None:
    now = [0.0]
    sources = SecretSources([of_vault(vault, cache_seconds=10)], {}, lambda: now[0])
    reference = SecretReference.parse("vault:api#token")
    assert await sources.look_up(reference, tenant="acme") == VALUE
    vault.values["/v1/secret/data/acme/api"] = {"token": "rotated-value"}
    now[0] = 9.9
    assert await sources.look_up(reference, tenant="acme") == VALUE
    with pytest.raises(SecretUnavailable):  # the cache is of one tenant
        await sources.look_up(reference, tenant="other")
    now[0] = 10.0
    assert await sources.look_up(reference, tenant="acme") == "rotated-value"


async def test_a_redirect_is_not_followed(vault: Vault) -> None:
    spec = of_vault(vault, url=vault.url + "/moved")
    assert "status 302" in await refusal(spec, "vault:api#token")
    assert [path for path, _ in vault.asked] == ["/moved"]


async def test_a_large_answer_is_refused(vault: Vault) -> None:
    assert f"more than {MAX_ANSWER_BYTES}" in await refusal(
        of_vault(vault, url=vault.url + "/large"), "vault:api#token"
    )


async def test_an_absent_server_is_named_without_its_address(unused_tcp_port: int) -> None:
    spec = SecretSourceSpec(name="vault", url=f"http://127.0.0.1:{unused_tcp_port}/", tenants=("acme",))
    text = await refusal(spec, "vault")
    assert "vault cannot be reached: ConnectError" in text
    assert str(unused_tcp_port) not in text


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@pytest.mark.parametrize(
    ("tenants", "tenant", "may"),
    [
        (("acme",), "acme", True),
        (("acme", "b-*"), "b-2", True),
        (("acme",), "other", False),
        (("acme",), "", False),
        ((), "", True),
        ((), "acme", False),
        (("*",), "", True),
    ],
)
async def test_source_serves_only_tenants_that_it_lists(tmp_path: Path, tenants: Any, tenant: str, may: bool) -> None:
    (tmp_path / "a").write_text(VALUE)
    spec = SecretSourceSpec(name="s", file=f"{tmp_path}/{{path}}", tenants=tenants)
    if may:
        assert await look_up(spec, "s:a", tenant) == VALUE
    else:
        assert "may not use the source s" in await refusal(spec, "s:a", tenant)


async def test_source_serves_only_paths_that_it_lists(tmp_path: Path) -> None:
    (tmp_path / "a.b").mkdir()
    (tmp_path / "a.b" / "key").write_text(VALUE)
    spec = SecretSourceSpec(name="s", file=f"{tmp_path}/{{path}}", tenants=("*",), paths=("{tenant}/*",))
    assert await look_up(spec, "s:a.b/key", "a.b") == VALUE
    assert "does not serve the path 'a.b/key'" in await refusal(spec, "s:a.b/key", "a")
    assert "does not serve the path 'a.b/key'" in await refusal(spec, "s:a.b/key", "*")  # no pattern of a tenant


@pytest.mark.parametrize(
    "path", ["../etc/shadow", "a/../b", "/etc/shadow", "-rf", "a//b", "a b", "a\0b", "a\n", "a%2e", "a/.git"]
)
def test_path_that_leaves_its_source_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="does not name the source of a secret"):
        SecretReference.parse(f"vault:{path}")
    with pytest.raises(ValueError, match="path"):
        SecretReference(source="vault", path=path)


@pytest.mark.parametrize("field", ["..", ".", "-n", "a/b"])
def test_field_that_leaves_its_source_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="field"):
        SecretReference(source="vault", path="a", field=field)


def program(tmp_path: Path, source: str) -> tuple[str, ...]:
    file = tmp_path / "program.py"
    file.write_text(source)
    return (sys.executable, str(file), "{path}")


async def test_program_prints_the_value_of_its_path(tmp_path: Path) -> None:
    settings = load_tool_settings({"DECKHANDS_SECRET_KEY": KEY, "PASSED": "passed", "DECKHANDS_HOME": str(tmp_path)})
    source = "import os, sys; print(sys.argv[1], os.environ['PASSED'], 'DECKHANDS_SECRET_KEY' in os.environ)"
    spec = SecretSourceSpec(name="s", command=program(tmp_path, source))
    sources = SecretSources([spec], settings.program_environment, time.monotonic)
    assert await sources.look_up(SecretReference.parse("s:team/key"), tenant="") == "team/key passed False"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (f"import sys; print('{VALUE}'); print('{VALUE}', file=sys.stderr); sys.exit(3)", "ended with code 3"),
        (f"print('x' * {MAX_ANSWER_BYTES + 1})", "printed more than"),
        ("import sys; sys.stdout.buffer.write(bytes([255]) * 9)", "is not text"),
        ("import os; os.fork() or print(1, flush=True); import signal; signal.pause()", "did not answer within 2 s"),
    ],
)
async def test_failed_program_gives_no_value(tmp_path: Path, source: str, named: str) -> None:
    spec = SecretSourceSpec(name="s", command=program(tmp_path, source), timeout=2)
    assert named in await refusal(spec, "s:a", "")


async def test_special_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    spec = SecretSourceSpec(name="s", file=f"{tmp_path}/{{path}}")
    assert "is no regular file" in await refusal(spec, "s:pipe", "")
    assert "cannot be read: No such file" in await refusal(spec, "s:absent", "")


SOURCE = f"""
import threading

main = threading.current_thread()

def mint(reference, *, tenant):
    assert threading.current_thread() is not main
    return f"{{reference.path}}-{{reference.field}}-{{tenant}}-{VALUE}"

async def mint_async(reference, *, tenant):
    return "{VALUE}"

def fail(reference, *, tenant):
    raise SystemExit("{VALUE}")

def number(reference, *, tenant):
    return 7
"""


async def test_functions_are_named_or_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_package(tmp_path, monkeypatch, "minting", SOURCE, {"deckhands.secret_sources": {"minter": "mint_async"}})
    named = SecretSourceSpec(name="s", callable="minting:mint")
    assert await look_up(named, "s:a#b", "") == f"a-b--{VALUE}"
    assert await look_up(SecretSourceSpec(name="s", callable="minter"), "s", "") == VALUE
    failing = SecretSourceSpec(name="s", callable="minting:fail")
    assert "the function of the source s failed: RuntimeError" in await refusal(failing, "s", "")
    assert "returned int, not str" in await refusal(SecretSourceSpec(name="s", callable="minting:number"), "s", "")
    assert "failed: KeyError" in await refusal(SecretSourceSpec(name="s", callable="absent"), "s", "")


async def test_unknown_source_names_the_table(tmp_path: Path) -> None:
    text = await refusal(SecretSourceSpec(name="s", file="/x"), "other:a")
    assert "no source other" in text
    assert "DECKHANDS_SECRET_SOURCES" in text


async def test_missing_part_of_a_reference_is_named(vault: Vault) -> None:
    assert "needs a field" in await refusal(of_vault(vault), "vault:api")
    assert "needs a tenant" in await refusal(of_vault(vault), "vault:api#token", "")
    assert "no text at /data/data/other" in await refusal(of_vault(vault), "vault:api#other")


def test_table_is_read_with_variables(tmp_path: Path) -> None:
    file = tmp_path / "sources.toml"
    file.write_text('[vault]\nurl = "https://v.example/{path}"\nheaders = { Authorization = "Bearer ${TOKEN}" }\n')
    (spec,) = read_secret_sources(file, {"TOKEN": VALUE})
    assert spec.headers == {"Authorization": f"Bearer {VALUE}"}
    assert set(spec.secrets) == {VALUE, f"Bearer {VALUE}"}
    assert VALUE not in repr(spec)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[a", "is not a table of secret sources"),
        ("a = 1", "'a' cannot be used"),
        ("[a]", "exactly one of url, command, file and callable"),
        ('[a]\nurl = "https://x/"\nfile = "/x"', "exactly one of"),
        ('[a]\ncommand = ["pass", "{path}"]', "absolute path of a program"),
        ('[a]\nfile = "relative"', "file:"),
        ('[a]\nurl = "https://{path}.example/"', "url:"),
        ('[a]\nurl = "https://me:pw@x.example/"', "contains a user"),
        ('[a]\nurl = "https://x/{name}"', "the placeholders are"),
        ('[a]\nfile = "/x"\nheaders = { A = "b" }', "headers belong to a url"),
        ('[a]\nurl = "https://x/"\nheaders = { A = "${ABSENT}" }', "needs the variable ABSENT"),
        ('[a]\nfile = "/x"\ntenant = "typo"', "tenant:"),
    ],
)
def test_faulty_table_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "sources.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as refused:
        read_secret_sources(file, {})
    assert named in str(refused.value)
