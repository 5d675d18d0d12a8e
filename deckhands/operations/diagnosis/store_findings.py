"""Check the settings of a store, its access rights, and its functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from urllib.parse import urlsplit

from broker.runtime import DeckhandsError, format_count
from broker.store import (
    ANNOUNCED_FIELD,
    LIBRARY,
    STORE,
    VERSION_FIELD,
    Connection,
    FunctionsVersion,
    MultiplexedConnection,
    Store,
    decode_text,
    own_version,
    parse_number,
    read_tolerantly,
    to_pairs,
)
from deckhands.operations.diagnosis.diagnostics import Finding, failed_finding, passed_finding, warning_finding

SETTINGS, RIGHTS, FUNCTIONS = "store settings", "store rights", "store functions"
ENCRYPTION = "encryption"
FULL_SHARE = 0.9
PERSISTING = {"aof_last_write_status": "its append-only file", "aof_last_bgrewrite_status": "a rewrite of that file"}
DEPLOY = "Run `deckhands setup` of the newer version with a store user that may load functions."


def check_settings(facts: Mapping[str, str]) -> list[Finding]:
    """Check a server's settings in its answer to INFO."""
    findings = []
    policy = facts.get("maxmemory_policy", "")
    if policy not in ("", "noeviction"):
        text = f"maxmemory-policy is {policy}: when the memory is full, the server evicts conversations"
        findings.append(failed_finding(SETTINGS, text, "Set `maxmemory-policy noeviction` on it."))
    used, limit = parse_number(facts.get("used_memory")), parse_number(facts.get("maxmemory"))
    if limit and used >= FULL_SHARE * limit:
        detail = f"{used / limit:.0%} of maxmemory is used; when it is full, no conversation makes progress"
        findings.append(
            warning_finding(SETTINGS, detail, "Archive or delete conversations (docs/archive.md), or give it more.")
        )
    elif not limit and "maxmemory" in facts:
        total = parse_number(facts.get("total_system_memory"))
        if total and used >= FULL_SHARE * total:
            detail = f"{used / total:.0%} of the machine's memory is used, and maxmemory sets no bound"
            findings.append(
                warning_finding(SETTINGS, detail, "Set `maxmemory`, so that writes are refused before it is killed.")
            )
    for name, what in PERSISTING.items():
        if facts.get(name, "ok") != "ok":
            findings.append(
                failed_finding(SETTINGS, f"the last write of {what} failed ({name})", "Check the server's disk.")
            )
    if facts.get("role", "master") not in ("master", "primary"):
        findings.append(
            failed_finding(SETTINGS, "it is a replica, which accepts no writes", "Name its primary in DECKHANDS_URL.")
        )
    return findings or [
        passed_finding(SETTINGS, f"maxmemory-policy {policy or 'unknown'}, {used / 2**20:,.0f} MiB used")
    ]


async def check_encryption(store: Store) -> list[Finding]:
    """Check whether this process has the master keys of the data keys; no finding if nothing is encrypted."""
    masters = Counter(record.master_id for record in await store.encryption.list_keys())
    if not masters:
        return []
    missing = sorted(masters.keys() - set(store.masters.ids))
    if missing:
        count = format_count(sum(masters[name] for name in missing), "data key")
        detail = f"{count} of {masters.total()} under master keys that are not set here: {', '.join(missing)}"
        remedy = "Add them to DECKHANDS_MASTER_KEYS_FILE; workers without any do not start (docs/archive.md)."
        return [failed_finding(ENCRYPTION, detail, remedy)]
    old = masters.total() - masters[store.masters.ids[0]]
    if old:
        detail = f"{format_count(old, 'data key')} of {masters.total()} not under the first master key"
        return [warning_finding(ENCRYPTION, detail, "Run `deckhands encryption rotate`.")]
    detail = f"{format_count(masters.total(), 'data key')} under the master key {store.masters.ids[0]}"
    return [passed_finding(ENCRYPTION, detail)]


async def check_rights(url: str) -> list[Finding]:
    """Check whether clients without a password can connect to the store. Skips a socket of this machine."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        return []
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = f":{parts.port}" if parts.port else ""
    stranger = MultiplexedConnection(parts._replace(netloc=f"{host}{port}").geturl())
    try:
        await stranger.call("PING")
    except DeckhandsError:
        return [passed_finding(RIGHTS, "no client can connect without a password")]
    finally:
        await stranger.aclose()
    detail = "every client that reaches its port can connect without a password"
    return [
        warning_finding(
            RIGHTS, detail, "Give its users passwords, as deploy/serve-valkey does, or keep its port to itself."
        )
    ]


async def check_functions(connection: Connection) -> list[Finding]:
    """Compare the functions in the store with those of this version."""
    facts, listed = await read_tolerantly(
        connection, [("HMGET", STORE, VERSION_FIELD, ANNOUNCED_FIELD), ("FUNCTION", "LIST", "LIBRARYNAME", LIBRARY)]
    )
    findings = []
    stamp, announced = map(decode_text, facts) if isinstance(facts, list) else ("", "")
    there, own = FunctionsVersion.parse(stamp), own_version()
    versions = f"the store has version {there}; this build has {own}"
    if not there.order:
        findings.append(
            failed_finding(FUNCTIONS, f"the store does not report its version; this build has {own}", DEPLOY)
        )
    elif there.code != own.code:
        serves = "which they serve" if there.serves(own) else "which they do not serve"
        remedy = DEPLOY if there.order < own.order else "Upgrade Deckhands on this machine, and workers that are older."
        findings.append(warning_finding(FUNCTIONS, f"{versions}, {serves}", remedy))
    if announced and announced != stamp:
        detail = f"version {FunctionsVersion.parse(announced)} is announced, and workers that it does not serve stop"
        findings.append(
            warning_finding(FUNCTIONS, detail, "Complete it by `deckhands setup --stop-older` of that version.")
        )
    if isinstance(listed, list) and LIBRARY not in {decode_text(to_pairs(each).get("library_name")) for each in listed}:
        findings.append(failed_finding(FUNCTIONS, f"the server has lost the library {LIBRARY}", DEPLOY))
    return findings or [passed_finding(FUNCTIONS, versions)]
