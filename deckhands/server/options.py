"""How a server is run: where it listens, whom it believes, and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

DEFAULT_PORT = 8_900
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What is chosen when a server starts.

    Attributes:
        certificate, certificate_key: files of the TLS certificate; None: no TLS.
        proxies: addresses of proxies whose `X-Forwarded-…` headers are believed.
        origins: of pages of other sites that may call it.
        head_seconds: how long the head of a request may take; `body_seconds`: its body, unless it is a file.
        slow_seconds: how long a reader of a stream may take nothing of what is written for it.
        quiet_seconds: after so long without an event, a stream says that it lives, and its key is checked again.
        max_streams: how many streams are open at once.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    certificate: Path | None = None
    certificate_key: Path | None = None
    proxies: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    slow_seconds: float = 30.0
    quiet_seconds: float = 15.0
    max_streams: int = 5_000

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine can reach it."""
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False
