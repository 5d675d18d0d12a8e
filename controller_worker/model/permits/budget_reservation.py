"""Money that a conversation reserves in the budgets above it for one model call.

Holds: a budget is charged only for costs in the log. A conversation without a tenant, an experiment or a parent has no
budget above it and makes no request to the store here.
"""

from __future__ import annotations

from broker.contract import ModelCallDeferred, Ownership
from broker.limits import list_accounts
from controller_worker.core import BUDGET, State
from controller_worker.model.permits.permits import Permits


class BudgetReservation:
    """The reservation of one conversation.

    Attributes:
        is_held: a reservation is not settled yet.
    """

    def __init__(self, permits: Permits, ownership: Ownership) -> None:
        self.is_held = False
        self._permits = permits
        self._ownership = ownership
        self._accounts: list[str] = []
        self._is_waiting = False

    async def reserve(
        self, state: State, accounts: list[str], worst_usd: float, *, is_batched: bool
    ) -> ModelCallDeferred | None:
        """Reserve the maximum cost of a call. Return why the call must wait; None if it may be made. Idempotent."""
        self._accounts = accounts
        self._permits.keeps_budgets = True
        exhausted = await self._permits.ledger.reserve(
            self._ownership,
            self._accounts,
            worst_usd=worst_usd,
            total_usd=sum_own_cost_usd(state),
            is_batched=is_batched,
        )
        self.is_held = exhausted is None
        self._is_waiting = exhausted is not None
        if exhausted is None:
            return None
        return ModelCallDeferred(
            code=BUDGET,
            content=f"The budget of {exhausted.account} has no room for the call.",
            waits_for=exhausted.account,
        )

    async def settle(self, state: State, *, is_lost: bool = False) -> None:
        """Charge the costs in the log and release the rest of the reservation.

        Args:
            is_lost: the call may have cost something that the log does not show.
        """
        if self.is_held:
            self.is_held = False
            await self.charge(state, self._accounts, is_lost=is_lost)

    async def charge(self, state: State, accounts: list[str], *, is_lost: bool = False) -> None:
        """Charge the accounts up to the costs in the log. Idempotent."""
        total_usd = sum_own_cost_usd(state)
        await self._permits.ledger.settle(self._ownership, accounts, total_usd=total_usd, is_lost=is_lost)

    async def leave_queue(self) -> None:
        """Stop waiting for a top-up."""
        if self._is_waiting:
            self._is_waiting = False
            await self._permits.ledger.withdraw(self._ownership.conversation_id, self._accounts)


def list_accounts_above(state: State) -> list[str]:
    """Return the accounts that a conversation's calls are charged to; may be empty."""
    tenancy = state.setup.tenancy
    parent = state.setup.parent
    return list_accounts(
        state.setup.conversation_id,
        tenant=tenancy.tenant,
        experiment=tenancy.experiment,
        parent_id=parent.conversation_id if parent is not None else None,
    )


def sum_own_cost_usd(state: State) -> float:
    """Return the cost of the replies in the log. Costs of delegates and of a fork's origin are charged elsewhere."""
    if state.version <= state.setup.forked_at:
        return 0.0
    return state.usage.cost_usd - state.delegation.spent_usd - state.usage.inherited_usd
