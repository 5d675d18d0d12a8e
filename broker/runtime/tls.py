"""The TLS options in a Redis URL: of the store, of Celery's broker and of its result backend.

Holds: the server's certificate is verified unless the URL has `ssl_cert_reqs=none`. An invalid option raises an error
before any connection.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

CERTIFICATE_CHECKS = {
    **{name: name for name in ("required", "optional", "none")},
    **{f"CERT_{name.upper()}": name for name in ("required", "optional", "none")},
}
"""The values of a URL's certificate option, from redis-py and Celery, with redis-py's equivalents."""


def read_tls(options: Mapping[str, Any]) -> tuple[dict[str, Any], ssl.SSLContext]:
    """Return the TLS options of a URL in redis-py's format, and an SSL context made of them.

    Args:
        options: those of a `rediss://` URL; `ssl_check_hostname` as a bool.

    Raises:
        ValueError: an option is invalid; the message names it.
    """
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    check = tls.get("ssl_cert_reqs", "required")
    if check not in CERTIFICATE_CHECKS:
        raise ValueError(f"ssl_cert_reqs={check} cannot be used: it is required, optional or none")
    tls["ssl_cert_reqs"] = CERTIFICATE_CHECKS[check]
    option = "ssl_ca_certs"
    try:
        context = ssl.create_default_context(
            cafile=tls.get(option), capath=tls.get("ssl_ca_path"), cadata=tls.get("ssl_ca_data")
        )
        option = "ssl_certfile"
        if option in tls:
            context.load_cert_chain(tls[option], tls.get("ssl_keyfile"), tls.get("ssl_password"))
    except OSError as error:
        key = f" with ssl_keyfile={tls['ssl_keyfile']}" if option == "ssl_certfile" and "ssl_keyfile" in tls else ""
        raise ValueError(f"{option}={tls.get(option)}{key} cannot be used: {error.strerror or error}") from error
    if tls["ssl_cert_reqs"] == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif "ssl_check_hostname" in tls:
        context.check_hostname = tls["ssl_check_hostname"]
    return tls, context
