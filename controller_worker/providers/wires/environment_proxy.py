"""The environment's proxy for a server, and credentials in URLs.

Holds: a proxy URL for use in errors contains no credentials.
Does not: make requests.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from controller_worker.providers.errors import LLMConfigError

PROXY_REMEDY = "Set HTTP_PROXY, HTTPS_PROXY or ALL_PROXY to an HTTP proxy such as http://host:3128, or set NO_PROXY."


def find_environment_proxy(url: str) -> str | None:
    """Return the environment's proxy for a URL (`HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`), or None."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    proxies = getproxies()
    if proxy_bypass(host) or _is_in_networks(parts.hostname or "", proxies.get("no", "")):
        return None
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy or None


def _is_in_networks(host: str, names: str) -> bool:
    """Return whether an address is among addresses (`::1`) and networks (`10.0.0.0/8`), as urllib cannot."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        return False
    for name in names.split(","):
        with contextlib.suppress(ValueError):  # not a network
            if address in ipaddress.ip_network(name.strip().strip("[]"), strict=False):
                return True
    return False


def strip_login(proxy: str | None) -> tuple[str | None, str]:
    """Return a proxy's URL without credentials, for errors, and its login header; empty without one.

    Raises:
        LLMConfigError: the URL is invalid.
    """
    if proxy is None:
        return None, ""
    try:
        address = urlsplit(proxy)
        has_place = bool(address.hostname) and address.port != 0
    except ValueError:  # a bad port or bad brackets
        raise LLMConfigError("The proxy of the environment is not an address.", remedy=PROXY_REMEDY) from None
    shown = address._replace(netloc=address.netloc.rpartition("@")[2]).geturl()
    if address.scheme not in ("http", "https") or not has_place:
        raise LLMConfigError(f"The proxy {shown} of the environment cannot be used.", remedy=PROXY_REMEDY)
    return shown, make_login_header(address)


def make_login_header(address: SplitResult) -> str:
    """Return the header for the credentials in a URL; empty if there are none."""
    if address.username is None:
        return ""
    pair = f"{unquote(address.username)}:{unquote(address.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"
