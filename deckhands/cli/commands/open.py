"""`deckhands open`: the web page of a server, in the browser of this machine."""

from __future__ import annotations

import webbrowser
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import quote, urlsplit

import click

from broker.runtime import UsageError
from broker.store import Store
from deckhands.cli.command_group import with_options
from deckhands.cli.conversation_ids import CONVERSATION_ID
from deckhands.client import note, on_cluster, print_text
from deckhands.server import EVERY_TENANT, ApiKeys, Scope, Tickets

SECTION = "Read conversations"
SUMMARIES = {"open": "Open the web page of a server, or of one conversation."}

ADDRESS = "http://127.0.0.1:8900"
LIFE = timedelta(hours=12)


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """Options of `open`."""

    conversation_id: str | None
    server: str
    link: bool
    only_print: bool


@click.command(name="open")
@click.argument("conversation_id", metavar="[ID]", required=False, type=CONVERSATION_ID)
@click.option("--server", default=ADDRESS, show_default=True, metavar="URL", help="Where `deckhands serve` listens.")
@click.option(
    "--link", is_flag=True, help="Open it by a link that works once and brings a new key, valid for twelve hours."
)
@click.option("--print", "only_print", is_flag=True, help="Print the address and do not open a browser.")
@with_options(OpenOptions)
def open_(options: OpenOptions) -> None:
    """Open the web page of `deckhands serve` or `deckhands up --web`, or one conversation there.

    The page asks for an API key and keeps it until its tab is closed. With --link, you type no key: the link works
    once, within two minutes. It needs the server's store, as `deckhands key add` does.
    """
    address = page_of(options.server, options.conversation_id)
    if options.link:
        if options.conversation_id is not None:
            raise UsageError("With --link, the page opens at the list.", remedy="Leave out the id, or --link.")
        address = entry_of(address, on_cluster(lambda client: issue_entry(client.store)))
    if options.only_print:
        print_text(address)
    else:
        show_page(address)


async def issue_entry(store: Store) -> str:
    """Return a ticket that a page exchanges for a new key, valid for twelve hours."""
    _, token = await ApiKeys(store).add("web page", tenant=EVERY_TENANT, scopes=Scope, life=LIFE)
    return await Tickets(store).issue_entry(token)


def entry_of(address: str, ticket: str) -> str:
    """Return the address at which a page exchanges a ticket for its key. Browsers never send the part after `#`."""
    return f"{address}#/enter/{ticket}"


def show_page(address: str) -> None:
    """Open the page in this machine's browser, and print its address."""
    is_open = webbrowser.open(address)
    note(f"The page is {'open' if is_open else 'at'}: {address}")


def page_of(server: str, conversation_id: str | None = None) -> str:
    """Return the address of the page, or of a conversation in it.

    Raises:
        UsageError: the server's address is invalid.
    """
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(
            f"The address {ascii(server)[:200]} is not the address of a server.", remedy=f"Write one such as {ADDRESS}."
        )
    path = f"#/c/{quote(conversation_id)}" if conversation_id else ""
    return f"{server.rstrip('/')}/{path}"
