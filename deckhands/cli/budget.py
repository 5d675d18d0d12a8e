"""`deckhands budget`: what tenants, experiments and conversations may spend, and what they have spent."""

from __future__ import annotations

from dataclasses import asdict

import click

from broker.limits.ledger import Account, Ledger, account_path
from deckhands.cli.options import json_option
from deckhands.cli.output import note, print_json, table
from deckhands.cli.reach import on_cluster
from deckhands.client.client import Client
from deckhands.reading.spending import Spending, spending_of
from deckhands.reading.terminal import print_text

HEAD = ("ACCOUNT", "LIMIT", "SPENT", "RESERVED", "LOST", "LEFT", "CALLS", "WAITING")


@click.group()
def budget() -> None:
    """Say what may be spent, and what was.

    ACCOUNT is tenant:NAME, experiment:TENANT/NAME or conversation:ID.
    """


@budget.command(name="ls")
@json_option
def list_accounts(*, as_json: bool) -> None:
    """List the accounts of tenants and experiments, and of conversations with a limit of their own."""
    found = on_cluster(lambda client: Ledger(client.store).accounts())
    _show(found, as_json=as_json)
    if not found and not as_json:
        note("There are no budgets yet. `deckhands budget set tenant:NAME USD` makes one.")


@budget.command()
@click.argument("account")
@json_option
def show(*, account: str, as_json: bool) -> None:
    """Show one account."""
    _show([on_cluster(lambda client: Ledger(client.store).account(account))], as_json=as_json)


@budget.command(name="set")
@click.argument("account")
@click.argument("usd", type=float, required=False)
@json_option
def set_limit(*, account: str, usd: float | None, as_json: bool) -> None:
    """Set the limit of ACCOUNT to USD; without USD there is none any more."""
    _show([on_cluster(lambda client: Ledger(client.store).set_limit(account, usd))], as_json=as_json)


@budget.command(name="add")
@click.argument("account")
@click.argument("usd", type=float)
@json_option
def top_up(*, account: str, usd: float, as_json: bool) -> None:
    """Raise the limit of ACCOUNT by USD; conversations that wait for it go on."""
    _show([on_cluster(lambda client: Ledger(client.store).top_up(account, usd))], as_json=as_json)


@budget.command()
@click.argument("account")
@json_option
def report(*, account: str, as_json: bool) -> None:
    """Show what ACCOUNT's money went to: work, retries, loops, condensation, lost calls. Reads every log below it."""
    account_path(account)
    found, spending = on_cluster(lambda client: _report(client, account))
    if as_json:
        print_json({"account": account, "lost_usd": found.lost_usd, "lost_calls": found.lost_calls} | asdict(spending))
        return
    rows = (
        ("work", spending.work_usd),
        ("retries", spending.retries_usd),
        ("loops", spending.loops_usd),
        ("condensation", spending.condensation_usd),
        ("lost calls, at worst", found.lost_usd),
    )
    print_text("\n".join(table(("WENT TO", "USD"), [(name, f"{usd:.6f}") for name, usd in rows])))
    note(
        f"{spending.calls} replies, {spending.unpriced_calls} of unknown price; "
        f"{spending.failed_calls} calls failed, {found.lost_calls} were lost."
    )


async def _report(client: Client, account: str) -> tuple[Account, Spending]:
    ledger, total = Ledger(client.store), Spending()
    for conversation_id in await ledger.conversation_ids(account):
        total += spending_of(await client.events(conversation_id))
    return await ledger.account(account), total


def _show(accounts: list[Account], *, as_json: bool) -> None:
    if as_json:
        for account in accounts:
            print_json(asdict(account) | {"left_usd": account.left_usd})
    elif accounts:
        print_text("\n".join(table(HEAD, [_cells(account) for account in accounts])))


def _cells(account: Account) -> tuple[str, ...]:
    amounts = (account.limit_usd, account.spent_usd, account.reserved_usd, account.lost_usd, account.left_usd)
    shown = ("-" if usd is None else f"${usd:.4f}" for usd in amounts)
    return (account.name, *shown, str(account.calls), str(account.waiting))
