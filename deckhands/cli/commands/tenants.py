"""`deckhands tenants`: the rules of tenants that are in force."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from broker.limits import load_tenants
from deckhands.cli.command_group import with_options
from deckhands.cli.options import ListOptions, json_option
from deckhands.client import count_columns, note, on_cluster, print_json, print_text, render_table

SECTION = "Operate a cluster"
SUMMARIES = {"tenants": "List the weights, bounds and pools of tenants that are in force."}
HEAD = ("TENANT", "WEIGHT", "OPEN", "MAX OPEN", "A MINUTE", "POOLS")


@click.command()
@json_option
@with_options(ListOptions)
def tenants(options: ListOptions) -> None:
    """List the rules of DECKHANDS_TENANTS that are in force, and how many conversations of each tenant are open.

    The controller workers set them when they start. `*` stands for all tenants without a rule.
    """
    found = on_cluster(lambda client: load_tenants(client.store))
    if options.as_json:
        for one in found:
            print_json(asdict(one))
        return
    if not found:
        note("All tenants are equal. DECKHANDS_TENANTS of the controller workers sets weights, bounds and pools.")
        return
    rows = [
        (
            one.name,
            f"{one.weight:g}",
            str(one.open),
            "-" if one.max_open is None else f"{one.max_open:,}",
            "-" if one.submissions_per_minute is None else f"{one.submissions_per_minute:g}",
            ", ".join(one.pools) or "any",
        )
        for one in found
    ]
    print_text("\n".join(render_table(HEAD, rows, columns=count_columns(sys.stdout))))
