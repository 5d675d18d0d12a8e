"""`--redo`: repeat finished attempts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from broker.runtime import UsageError
from deckhands.evaluation.attempts.results import OUTCOMES
from deckhands.evaluation.attempts.steering import Requeue
from deckhands.evaluation.datasets.instances import Instance

redo_option = click.option(
    "--redo", multiple=True, metavar="OUTCOME|ID",
    help="Repeat attempts with this outcome, or at this instance. May be given several times.",
)  # fmt: skip


def check_redo(redo: Iterable[str], instances: Iterable[Instance]) -> None:
    """Refuse a word that is neither an outcome nor an instance.

    Raises:
        UsageError: there is such a word; names it.
    """
    known = {*OUTCOMES, *(one.id for one in instances)}
    for what in redo:
        if what not in known:
            raise UsageError(
                f"--redo {what!r} is neither an outcome nor an instance of the dataset.",
                remedy=f"Write one of {', '.join(OUTCOMES)}, or the id of an instance.",
            )


def build_orders(redo: Sequence[str]) -> list[Requeue]:
    """Return the orders to repeat attempts; an attempt that several orders match is repeated once."""
    outcomes = tuple(what for what in redo if what in OUTCOMES)
    instances = tuple(what for what in redo if what not in OUTCOMES)
    orders = [Requeue(outcomes=outcomes)] if outcomes else []
    return orders + ([Requeue(instances=instances)] if instances else [])
