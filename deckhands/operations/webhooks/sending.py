"""One request to a webhook: signed according to Standard Webhooks, to an allowed address.

Holds: a name is resolved once per request, and the connection goes to the address that was checked; redirects are not
followed and no proxy is used; a request has a time limit, and the body of its answer is not read.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import SplitResult, urlsplit

import httpx2
from standardwebhooks import Webhook as Signer

from broker.runtime import AddressRules, UsageError
from deckhands.operations.webhooks.webhook import MAX_URL_CHARS

LIMIT_SECONDS = 15.0
RESOLVE_SECONDS = 5.0


class AddressRefused(UsageError):
    """Webhooks may not be sent to this address."""


@dataclass(frozen=True, slots=True)
class WebhookResponse:
    """The result of a request.

    Attributes:
        status: the HTTP status; None if there was no answer.
        error: the error; empty for none.
    """

    status: int | None
    error: str = ""

    @property
    def is_gone(self) -> bool:
        """Whether the receiver asks for no more deliveries."""
        return self.status == 410


def parse_url(url: str) -> SplitResult:
    """Parse an address.

    Raises:
        UsageError: the address is not allowed.
    """
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0
    except ValueError:
        parts, has_port = SplitResult("", "", "", "", ""), False
    is_plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= MAX_URL_CHARS
    if not (is_plain and has_port and parts.scheme in ("https", "http") and parts.hostname) or parts.fragment:
        raise UsageError(f"The address {ascii(url)[:200]} cannot be used.", remedy="Write https://host/path.")
    if parts.username is not None or parts.password is not None:
        raise UsageError("An address with a user or a password cannot be used.", remedy="Check the signature instead.")
    return parts


async def resolve_address(url: str, rules: AddressRules) -> str:
    """Return the address of a webhook's host, if it is allowed.

    Raises:
        AddressRefused: it is private, or the host has no address.
        UsageError: the URL cannot be used.
    """
    parts = parse_url(url)
    host = parts.hostname or ""
    try:
        async with asyncio.timeout(RESOLVE_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(
                host, parts.port or 443, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
            )
    except (OSError, TimeoutError, UnicodeError) as error:
        raise AddressRefused(f"The host {host[:200]} of the webhook has no address.") from error
    addresses = [str(sockaddr[0]) for *_, sockaddr in found]
    if not addresses or not all(map(rules.may_reach, addresses)):
        raise AddressRefused(
            f"The host {host[:200]} of the webhook has an address that is not public.",
            remedy="DECKHANDS_WEBHOOK_PRIVATE names private networks that are allowed.",
        )
    if parts.scheme == "http" and AddressRules().may_reach(addresses[0]):
        raise AddressRefused("A webhook on the internet needs TLS.", remedy="Write https://…")
    return addresses[0]


def sign(secret: str, message_id: str, moment: datetime, body: str) -> dict[str, str]:
    """Return the headers of a request; see standardwebhooks.com."""
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(moment.timestamp())),
        "webhook-signature": Signer(secret).sign(message_id, moment, body),
    }


async def send_request(
    url: str,
    body: str,
    headers: dict[str, str],
    rules: AddressRules,
    trust: ssl.SSLContext,
    *,
    limit_seconds: float = LIMIT_SECONDS,
) -> WebhookResponse:
    """Send one request, and return its result."""
    try:
        address = await resolve_address(url, rules)
        parts = parse_url(url)
        where = f"[{address}]" if ":" in address else address
        port = f":{parts.port}" if parts.port else ""
        to = parts._replace(netloc=where + port).geturl()
        name = parts.netloc.rpartition("@")[2]
        own = {**headers, "host": name, "content-type": "application/json", "user-agent": "deckhands-webhooks"}
        extensions = {"sni_hostname": parts.hostname}
        async with (
            asyncio.timeout(limit_seconds),
            httpx2.AsyncClient(verify=trust, trust_env=False, follow_redirects=False, timeout=None) as client,
            client.stream("POST", to, content=body.encode(), headers=own, extensions=extensions) as answer,
        ):
            status = answer.status_code
    except TimeoutError:
        return WebhookResponse(None, f"The receiver has not answered within {limit_seconds:g} s.")
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ssl.SSLError) as error:
        return WebhookResponse(None, f"{type(error).__name__}: {error}"[:300])
    except UsageError as error:
        return WebhookResponse(None, error.message[:300])
    return WebhookResponse(status, "" if 200 <= status < 300 else f"The receiver answered with status {status}.")


def parse_networks(private: str) -> AddressRules:
    """Return the networks of a setting, separated by `,`.

    Raises:
        UsageError: a part of the setting is not a network.
    """
    names: Sequence[str] = [name.strip() for name in private.split(",") if name.strip()]
    try:
        return AddressRules.parse(names)
    except ValueError as error:
        raise UsageError(
            f"DECKHANDS_WEBHOOK_PRIVATE: {error}.", remedy="Write networks such as 10.2.0.0/16."
        ) from error
