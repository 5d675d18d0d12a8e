"""`deckhands budget`: budgets and spending of tenants, experiments and conversations."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import click

from broker.limits import BudgetAccount, Ledger, parse_account
from deckhands.cli.authorship import author_options, recording
from deckhands.cli.command_group import with_options
from deckhands.cli.options import ListOptions, json_option
from deckhands.client import Client, Spending, compute_spending, note, on_cluster, print_json, print_text, render_table

SECTION = "Budgets, secrets, notes"
SUMMARIES = {"budget": "Show and set budgets of tenants and experiments."}

HEAD = ("ACCOUNT", "LIMIT", "SPENT", "RESERVED", "LOST", "LEFT", "CALLS", "WAITING")


@dataclass(frozen=True, slots=True)
class AccountOptions:
    """Options of `budget show` and `budget report`."""

    account: str
    as_json: bool


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Options of `budget set`; without `usd` the account is unlimited."""

    account: str
    usd: float | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class TopUpOptions:
    """Options of `budget add`."""

    account: str
    usd: float
    as_json: bool


@click.group()
def budget() -> None:
    """Show and set budgets, and show spending.

    ACCOUNT is tenant:NAME, experiment:TENANT/NAME or conversation:ID.
    """


@budget.command(name="ls")
@json_option
@with_options(ListOptions)
def list_accounts(options: ListOptions) -> None:
    """List the accounts of tenants and experiments, and of conversations that have their own limit."""
    found = on_cluster(lambda client: Ledger(client.store).load_accounts())
    _show(found, as_json=options.as_json)
    if not found and not options.as_json:
        note("There are no budgets yet. `deckhands budget set tenant:NAME USD` sets one.")


@budget.command()
@click.argument("account")
@json_option
@with_options(AccountOptions)
def show(options: AccountOptions) -> None:
    """Show one account."""
    _show([on_cluster(lambda client: Ledger(client.store).load_account(options.account))], as_json=options.as_json)


@budget.command(name="set")
@click.argument("account")
@click.argument("usd", type=float, required=False)
@json_option
@author_options
@with_options(LimitOptions)
def set_limit(options: LimitOptions) -> None:
    """Set the limit of ACCOUNT to USD; without USD, remove it."""
    found = on_cluster(
        recording(
            lambda client: Ledger(client.store).set_limit(options.account, options.usd), "budget.set", options.account
        )
    )
    _show([found], as_json=options.as_json)


@budget.command(name="add")
@click.argument("account")
@click.argument("usd", type=float)
@json_option
@author_options
@with_options(TopUpOptions)
def top_up(options: TopUpOptions) -> None:
    """Raise the limit of ACCOUNT by USD; conversations that wait for it continue."""
    found = on_cluster(
        recording(
            lambda client: Ledger(client.store).top_up(options.account, options.usd), "budget.add", options.account
        )
    )
    _show([found], as_json=options.as_json)


@budget.command()
@click.argument("account")
@json_option
@with_options(AccountOptions)
def report(options: AccountOptions) -> None:
    """Break the spending of ACCOUNT down: work, retries, loops, condensation, lost calls. Reads every log."""
    parse_account(options.account)
    found, spending = on_cluster(lambda client: _report(client, options.account))
    if options.as_json:
        print_json(
            {"account": options.account, "lost_usd": found.lost_usd, "lost_calls": found.lost_calls} | asdict(spending)
        )
        return
    rows = (
        ("work", spending.work_usd),
        ("retries", spending.retries_usd),
        ("loops", spending.loops_usd),
        ("condensation", spending.condensation_usd),
        ("lost calls, at worst", found.lost_usd),
    )
    print_text("\n".join(render_table(("WENT TO", "USD"), [(name, f"{usd:.6f}") for name, usd in rows])))
    note(
        f"Replies: {spending.calls:,}, {spending.unpriced_calls:,} of unknown price; "
        f"calls that failed: {spending.failed_calls:,}, that were lost: {found.lost_calls:,}."
    )


async def _report(client: Client, account: str) -> tuple[BudgetAccount, Spending]:
    ledger = Ledger(client.store)
    total = Spending()
    for conversation_id in await ledger.list_conversation_ids(account):
        total += compute_spending(await client.events(conversation_id))
    return await ledger.load_account(account), total


def _show(accounts: list[BudgetAccount], *, as_json: bool) -> None:
    if as_json:
        for account in accounts:
            print_json(asdict(account) | {"left_usd": account.left_usd})
    elif accounts:
        print_text("\n".join(render_table(HEAD, [_cells(account) for account in accounts])))


def _cells(account: BudgetAccount) -> tuple[str, ...]:
    amounts = (account.limit_usd, account.spent_usd, account.reserved_usd, account.lost_usd, account.left_usd)
    shown = ("-" if usd is None else f"${usd:.4f}" for usd in amounts)
    return (account.name, *shown, str(account.calls), str(account.waiting))
