"""Reads the login for Celery's broker and its result backend from a file, again at each connection.

Does not: follow a change of host or port in the file; restart the worker for that.
"""

from __future__ import annotations

from urllib.parse import parse_qs, unquote, urlsplit

from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError

from broker.runtime import UrlInFile, UsageError


class UrlCredentials(CredentialProvider):
    """User and password of a URL in a file, read when needed."""

    def __init__(self, url: UrlInFile) -> None:
        self._url = url

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return user and password, or the password alone, in redis-py's format.

        Raises:
            AuthenticationError: the file cannot be read or has no password. redis-py's own class, so that it retries.
        """
        try:
            parts = urlsplit(self._url.read())
        except UsageError as error:
            raise AuthenticationError(str(error)) from error
        if not parts.password:
            raise AuthenticationError(f"The URL in {self._url.path} has no password any more.")
        password = unquote(parts.password)
        return (unquote(parts.username), password) if parts.username else (password,)


def split_login(url: str) -> tuple[str, UrlCredentials | None]:
    """Return a URL without its login, and the provider of the login.

    A URL that has no login, or is not from a file, stays unchanged and has no provider.
    """
    login = urlsplit(url).netloc.rpartition("@")[0]
    if not isinstance(url, UrlInFile) or not login:
        return str(url), None
    return url.replace(f"{login}@", "", 1), UrlCredentials(url)


def redis_url(broker_url: str) -> str:
    """Return the address of Celery's broker as redis-py writes it."""
    if isinstance(broker_url, UrlInFile):
        return broker_url.derive(redis_url)
    if not broker_url.startswith("redis+socket://"):
        return broker_url
    parts = urlsplit(broker_url)
    database = parse_qs(parts.query).get("virtual_host", ["0"])[0]
    return f"unix://{parts.netloc}{parts.path}?db={database}"
