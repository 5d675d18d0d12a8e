"""Chromium, started with a temporary profile that is removed with it.

Holds: it reaches nothing that the workspace cannot reach. If the environment names a proxy, all requests go through it,
except those to the loopback. PDF files are downloaded, not displayed. After its end, none of its processes is left.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies

from playwright.async_api import BrowserContext, Error, Playwright, ProxySettings, async_playwright

from tool_worker.host.descendants import kill_descendants

START_LIMIT_SECONDS = 60.0
ANSWER_LIMIT_SECONDS = 5.0
VIEWPORT = (1280, 720)
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--gcm-checkin-url=http://127.0.0.1:1/",  # prevents periodic requests for push messages
)
OF_THIS_MACHINE = "<-loopback>,localhost,127.0.0.1,[::1]"
"""Hosts to reach without the proxy. By default, Chromium would also bypass it for 127.0.0.0/8 and 169.254.0.0/16."""
PREFERENCES = {
    "plugins": {"always_open_pdf_externally": True},
    # Turn off everything that reports pages to Google or requests data from it.
    "autofill": {"enabled": False, "profile_enabled": False, "credit_card_enabled": False},
    "credentials_enable_service": False,
    "safebrowsing": {"enabled": False},
    "search": {"suggest_enabled": False},
    "alternate_error_pages": {"enabled": False},
    "net": {"network_prediction_options": 2},
    "translate": {"enabled": False},
}

_PREFIX = "deckhands-browser-"
_LOCK = "lock"
_DOWNLOADS = "downloads"


class ChromiumFailed(Exception):
    """Chromium cannot be started; the text names the reason."""


class Chromium:
    """One Chromium with its profile."""

    def __init__(self, playwright: Playwright, context: BrowserContext, folder: Path) -> None:
        self.context = context
        self._playwright = playwright
        self._folder = folder

    @property
    def downloads(self) -> Path:
        """The folder of incomplete downloads."""
        return self._folder / _DOWNLOADS

    @classmethod
    async def start(cls, executable: str) -> Chromium:
        """Start Chromium.

        Raises:
            ChromiumFailed: Chromium did not start.
        """
        folder = _new_folder()
        try:
            async with asyncio.timeout(START_LIMIT_SECONDS):
                playwright = await async_playwright().start()
                width, height = VIEWPORT
                context = await playwright.chromium.launch_persistent_context(
                    folder / "profile",
                    executable_path=executable,
                    headless=True,
                    chromium_sandbox=False,  # the workspace's sandbox does not allow a nested one
                    args=FLAGS,
                    proxy=find_proxy(getproxies()),
                    viewport={"width": width, "height": height},
                    accept_downloads=True,
                    downloads_path=folder / _DOWNLOADS,
                    timeout=START_LIMIT_SECONDS * 1000,
                )
        except (Error, OSError, TimeoutError) as error:
            _end_all(folder)
            first_lines = " ".join(line.strip() for line in str(error).splitlines()[:6] if line.strip())
            raise ChromiumFailed(f"Chromium cannot be started: {first_lines[:1000]}") from error
        except BaseException:
            _end_all(folder)
            raise
        return cls(playwright, context, folder)

    async def is_responding(self) -> bool:
        """Return whether Chromium responds; the death of its driver shows in no other way."""
        try:
            async with asyncio.timeout(ANSWER_LIMIT_SECONDS):
                await self.context.cookies("http://localhost")
        except (Error, TimeoutError):
            return False
        return True

    async def end(self) -> None:
        """Kill Chromium, whatever state it is in. Idempotent."""
        _end_all(self._folder)
        with suppress(Exception):  # the driver is dead; this only releases the rest of the connection
            async with asyncio.timeout(1.0):
                await self._playwright.stop()


def find_proxy(proxies: dict[str, str]) -> ProxySettings | None:
    """Return the proxy of an environment; None if there is none.

    Args:
        proxies: As returned by `urllib.request.getproxies`: by scheme, and exceptions under `no`.
    """
    address = proxies.get("https") or proxies.get("http") or proxies.get("all")
    if not address:
        return None
    parts = urlsplit(address if "://" in address else f"http://{address}")
    direct = [OF_THIS_MACHINE, *filter(None, [proxies.get("no")])]
    proxy: ProxySettings = {
        "server": f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}",
        "bypass": ",".join(direct),
    }
    if parts.username:
        proxy |= {"username": unquote(parts.username), "password": unquote(parts.password or "")}
    return proxy


def has_network() -> bool:
    """Return whether the sandbox has network access: an interface besides the loopback, or a proxy."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    except OSError:
        return True
    return bool(getproxies()) or any(line.partition(":")[0].strip() != "lo" for line in lines)


def _new_folder() -> Path:
    """Return a folder with a new profile; remove the folders of killed browsers."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), (left / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a running browser holds the lock of its folder
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    descriptor = os.open(folder / _LOCK, os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # held until this program ends
    default = folder / "profile" / "Default"
    default.mkdir(parents=True)
    (default / "Preferences").write_text(json.dumps(PREFERENCES))
    return folder


def _end_all(folder: Path) -> None:
    kill_descendants(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
