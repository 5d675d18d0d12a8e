"""The ledger: budgets of tenants, experiments, conversations and their delegates, in USD.

Before a call, its worst-case cost is reserved in every account above the conversation; after it, the actual cost in the
log is charged. A conversation with an exhausted budget waits. A top-up or released reservations wake it.

Holds: an account exceeds its limit by at most one call. `spent` is the sum over the events of its conversations,
however often workers die. Reservations of a dead worker are released when its heartbeat expires. Waiting conversations
are served in order of arrival.
Does not: know prices. Without a price nothing is reserved; the cost counts against the limit once it is charged.
Keys: `deck:{k}:budget:…`, `deck:{k}:budgets`, `deck:{k}:ledger:…`, in the shard of the tenant's name; see ledger.lua.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from broker.contract import Ownership
from broker.coordination import wake_conversations
from broker.runtime import OwnershipLost, StoreRefused, UsageError, new_key
from broker.store import WRONG_TYPE_PREFIX, Argument, ShardKeys, Store, decode_fields

NANO = 1_000_000_000
MAX_USD = 1_000_000
SWEEP_PATIENCE_SECONDS = 0.5
"""How long a sweep waits for a shard that does not answer."""

_ACCOUNT = re.compile(
    r"(tenant:[A-Za-z0-9_.-]{1,64}|experiment:[A-Za-z0-9_.-]{0,64}/[A-Za-z0-9_.-]{1,64}|conversation:.+)"
)


@dataclass(frozen=True, slots=True)
class BudgetAccount:
    """The current state of an account.

    Attributes:
        limit_usd: its limit; None for no limit.
        spent_usd: the sum over the events of all conversations below.
        reserved_usd: reserved for calls in flight.
        lost_usd: reserved for calls without a reply, which the provider may bill; counts against the limit.
        calls: number of charged calls.
        waiting: number of conversations that wait for this budget.
    """

    name: str
    parent: str
    limit_usd: float | None
    spent_usd: float
    reserved_usd: float
    lost_usd: float
    calls: int
    lost_calls: int
    waiting: int

    @property
    def left_usd(self) -> float | None:
        """The amount that may still be committed; None without a limit."""
        if self.limit_usd is None:
            return None
        return max(0.0, self.limit_usd - self.spent_usd - self.lost_usd - self.reserved_usd)


@dataclass(frozen=True, slots=True)
class BudgetExhausted:
    """The budget of this account does not cover the call now."""

    account: str


def make_tenant_account(tenant: str) -> str:
    """Return the name of a tenant's account."""
    return f"tenant:{tenant}"


def make_experiment_account(tenant: str, experiment: str) -> str:
    """Return the name of an experiment's account. Each tenant has its own experiments."""
    return f"experiment:{tenant}/{experiment}"


def make_conversation_account(conversation_id: str) -> str:
    """Return the name of a conversation's account."""
    return f"conversation:{conversation_id}"


def list_accounts(
    conversation_id: str, *, tenant: str = "", experiment: str = "", parent_id: str | None = None
) -> list[str]:
    """Return a conversation's account and those above it, up to the root; empty if it has no budget.

    Args:
        parent_id: for a delegate, its parent conversation, whose accounts are above its own. Of these, only the
            parent's account and the root are returned.
    """
    if not tenant and not experiment:
        return []
    chain = [make_conversation_account(conversation_id)]
    if parent_id is not None:
        chain.append(make_conversation_account(parent_id))
    elif experiment:
        chain.append(make_experiment_account(tenant, experiment))
    if tenant:
        chain.append(make_tenant_account(tenant))
    elif parent_id is not None:
        chain.append(make_experiment_account(tenant, experiment))
    return chain


def parse_account(account: str) -> list[str]:
    """Return an account and the accounts above it, as its name lists them.

    Raises:
        UsageError: it is not the name of an account.
    """
    if not _ACCOUNT.fullmatch(account):
        raise UsageError(
            f"{account!r} is not an account.", remedy="Write tenant:NAME, experiment:TENANT/NAME or conversation:ID."
        )
    kind, _, name = account.partition(":")
    tenant = name.partition("/")[0]
    return [account, make_tenant_account(tenant)] if kind == "experiment" and tenant else [account]


def to_nano(usd: float) -> int:
    """Convert USD to the ledger's integers, rounded to the nearest billionth."""
    return round(Decimal(usd) * NANO)


class Ledger:
    """The budgets of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._used: set[ShardKeys] = set()
        self._turn = 0
        self._sweeping: dict[ShardKeys, asyncio.Task[tuple[str, str]]] = {}

    async def reserve(
        self,
        ownership: Ownership,
        accounts: Sequence[str],
        *,
        worst_usd: float,
        total_usd: float,
        is_batched: bool = False,
    ) -> BudgetExhausted | None:
        """Reserve the worst-case cost of one call in all accounts, and charge the total of the log.

        Idempotent: a conversation has one reservation. A later owner's call ends that of a former one.

        Args:
            accounts: see `list_accounts`; the last one is the root.
            worst_usd: worst-case cost; 0 if the price is unknown.
            total_usd: the sum over the conversation's log.
            is_batched: the call outlives its owner. Its reservation ends with a reply in the log, or by `settle`.

        Returns:
            None if it is reserved; otherwise the exhausted account. The conversation is woken when it has funds.

        Raises:
            OwnershipLost: the conversation's next owner has a call in flight.
        """
        outcome, account = await self._call(
            "deck_budget_reserve",
            *(ownership.conversation_id, "-" if is_batched else ownership.worker_id, ownership.token),
            *(to_nano(worst_usd), to_nano(total_usd), *_without_root(accounts)),
            accounts=accounts,
        )
        if outcome == "fenced":
            raise OwnershipLost(f"The conversation {ownership.conversation_id} has another owner.")
        return BudgetExhausted(account) if outcome == "exhausted" else None

    async def settle(
        self, ownership: Ownership, accounts: Sequence[str], *, total_usd: float, is_lost: bool = False
    ) -> None:
        """Charge the total of the log and end the reservation. Idempotent.

        Args:
            is_lost: the call may be billed, but added nothing to the log.
        """
        outcome = "lost" if is_lost else "done"
        arguments = (ownership.conversation_id, ownership.token, outcome, to_nano(total_usd), *_without_root(accounts))
        await self._call("deck_budget_settle", *arguments, accounts=accounts)

    async def withdraw(self, conversation_id: str, accounts: Sequence[str]) -> None:
        """Leave the queue. Idempotent."""
        await self._call("deck_budget_withdraw", conversation_id, accounts[0], accounts=accounts)

    async def sweep(self) -> None:
        """Move the reservations of dead workers to `lost`. Runs at most twice a second over all workers.

        It sweeps the shards in which this process has reservations, and one further shard at each call. A shard that
        does not answer delays only its own sweep; the next one waits for its end.
        """
        shards = await self._store.load_shards()
        self._turn = (self._turn + 1) % len(shards)
        for shard in {*self._used, shards[self._turn]} - self._sweeping.keys():
            self._sweeping[shard] = asyncio.create_task(self._call_in(shard, "deck_budget_sweep"))
        await asyncio.wait(self._sweeping.values(), timeout=SWEEP_PATIENCE_SECONDS)
        ended = [self._sweeping.pop(shard) for shard, task in list(self._sweeping.items()) if task.done()]
        errors = [error for task in ended if (error := task.exception()) is not None]
        if errors:
            raise errors[0]

    async def aclose(self) -> None:
        """Cancel the sweeps that still wait for a shard."""
        sweeping = list(self._sweeping.values())
        self._sweeping.clear()
        for task in sweeping:
            task.cancel()
        await asyncio.gather(*sweeping, return_exceptions=True)

    async def delete_account(self, conversation_id: str) -> None:
        """Delete the account of a deleted conversation. The accounts above it keep its spending. Idempotent.

        An account with a limit, a call in flight or delegates is deleted together with the last of these.
        """
        account = make_conversation_account(conversation_id)
        if (shard := await self._locate(account)) is not None:
            await self._store.call_function("deck_budget_forget", (shard.root,), conversation_id, account)

    async def restore_account(self, accounts: Sequence[str], *, total_usd: float, delegates_usd: float = 0.0) -> None:
        """Recreate the account of a restored conversation, whose log is charged already. Idempotent.

        Args:
            accounts: its own and those above it, see `list_accounts`; empty if it has no budget.
            delegates_usd: the spending of its delegates, which counts in its account too.
        """
        if accounts:
            arguments: list[Argument] = [to_nano(total_usd), *accounts[:2], to_nano(delegates_usd)]
            keys = (self._find_home(accounts[-1]).root,)
            await self._store.call_function("deck_budget_adopt", keys, *arguments)

    async def set_limit(
        self, account: str, limit_usd: float | None, *, check: Callable[[BudgetAccount], None] | None = None
    ) -> BudgetAccount:
        """Set the limit of an account, which need not exist yet; None removes it.

        Args:
            check: raises if the current limit must not be changed. The limit is set only if it is still the checked
                one.

        Raises:
            UsageError: it is not the name of an account, or the amount is invalid.
        """
        amount: int | str = "" if limit_usd is None else to_nano(_check_amount(limit_usd))
        if check is None:
            await self._change(account, "set", amount)
            return await self.load_account(account)
        while True:
            limit = await self._load_limit(account)
            check(await self.load_account(account))
            if await self._change(account, b"from " + limit, amount) != "other":
                return await self.load_account(account)

    async def top_up(self, account: str, amount_usd: float) -> BudgetAccount:
        """Raise the limit of an account and wake its waiting conversations. Raises the errors of `set_limit`."""
        await self._change(account, "add", to_nano(_check_amount(amount_usd)))
        return await self.load_account(account)

    async def move_limits(self) -> int:
        """Move the limits set by an earlier version to a key that controllers cannot write; return how many.

        Idempotent.
        """
        moved = 0
        for account in await self.load_accounts():
            shard = await self.find_shard(account.name)
            is_there, copy = await self._store.call_many(
                [("HEXISTS", shard.limits, account.name), ("HGET", shard.budget(account.name), "limit")]
            )
            if copy is not None and not is_there:
                # An unreadable one stays one: it allows nothing.
                outcome = await self._change(account.name, b"from " + copy, copy)
                moved += outcome == "changed"
        return moved

    async def load_account(self, account: str) -> BudgetAccount:
        """Return the current state of an account; an unused one is empty."""
        parse_account(account)
        shard = await self.find_shard(account)
        key = shard.budget(account)
        flat, waiting, limit = await self._store.call_many(
            [("HGETALL", key), ("ZCARD", f"{key}:waiting"), ("HGET", shard.limits, account)]
        )
        fields = decode_fields(flat)
        if limit is not None:  # else the copy, from a version that had no other
            fields["limit"] = limit.decode(errors="backslashreplace")
        return BudgetAccount(
            name=account,
            parent=fields.get("parent", ""),
            limit_usd=_parse_integer(fields["limit"]) / NANO if "limit" in fields else None,
            spent_usd=_parse_integer(fields.get("spent", "")) / NANO,
            reserved_usd=_parse_integer(fields.get("reserved", "")) / NANO,
            lost_usd=_parse_integer(fields.get("lost", "")) / NANO,
            calls=_parse_integer(fields.get("calls", "")),
            lost_calls=_parse_integer(fields.get("lost_calls", "")),
            waiting=waiting,
        )

    async def load_accounts(self) -> list[BudgetAccount]:
        """Return the accounts of tenants, of experiments, and of conversations with a limit, by name."""
        shards = await self._store.load_shards()
        found = await self._store.call_many([("SMEMBERS", shard.budgets) for shard in shards])
        names = {member.decode(errors="backslashreplace") for members in found for member in members}
        return [await self.load_account(name) for name in sorted(names)]

    async def list_conversation_ids(self, account: str) -> list[str]:
        """Return the conversations charged to an account, by id."""
        found: list[str] = []
        below = [account]
        shard = await self.find_shard(account)
        while below:
            name = below.pop()
            kind, _, conversation_id = name.partition(":")
            if kind == "conversation":
                found.append(conversation_id)
            members = await self._store.call("SMEMBERS", f"{shard.budget(name)}:children")
            below += sorted(member.decode(errors="backslashreplace") for member in members)
        return sorted(found)

    async def find_shard(self, account: str) -> ShardKeys:
        """Return the shard of an account: that of its tenant.

        Raises:
            UsageError: the tenant of a conversation cannot be found in the store.
        """
        if (shard := await self._locate(account)) is None:
            raise UsageError(
                f"There is neither the {account.replace(':', ' ', 1)} nor a budget of it.",
                remedy="A store with several shards keeps the budget of a conversation beside those of its tenant. Set "
                "it once the conversation exists.",
            )
        return shard

    async def _locate(self, account: str) -> ShardKeys | None:
        kind, _, conversation_id = account.partition(":")
        shards = await self._store.load_shards()
        if kind != "conversation" or len(shards) == 1:
            return self._find_home(account)
        meta = (await self._store.locate(conversation_id)).meta
        exists, tenant = await self._store.call_many([("EXISTS", meta), ("HGET", meta, "tenant")])
        if exists:
            return self._find_home(make_tenant_account((tenant or b"").decode(errors="backslashreplace")))
        found = await self._store.call_many([("EXISTS", shard.budget(account)) for shard in shards])
        return next((shard for shard, is_there in zip(shards, found, strict=True) if is_there), None)

    def _find_home(self, root: str) -> ShardKeys:
        """Return the shard of a tenant or an experiment."""
        _, _, name = root.partition(":")
        return self._store.find_home(make_tenant_account(name.partition("/")[0]))

    async def _load_limit(self, account: str) -> bytes:
        """Return a limit exactly as stored; empty if there is none."""
        parse_account(account)
        shard = await self.find_shard(account)
        limit, copy = await self._store.call_many(
            [("HGET", shard.limits, account), ("HGET", shard.budget(account), "limit")]
        )
        return bytes(limit or copy or b"")

    async def _change(self, account: str, how: str | bytes, amount: int | str | bytes) -> str:
        chain = parse_account(account)
        shard = await self.find_shard(account)
        outcome, _ = await self._call_in(shard, "deck_budget_limit", new_key(), how, amount, *chain)
        return outcome

    async def _call(self, function: str, *arguments: Any, accounts: Sequence[str]) -> tuple[str, str]:
        """Call a function in the shard of these accounts."""
        shard = self._find_home(accounts[-1])
        self._used.add(shard)
        return await self._call_in(shard, function, *arguments, accounts=accounts)

    async def _call_in(
        self, shard: ShardKeys, function: str, *arguments: Any, accounts: Sequence[str] = ()
    ) -> tuple[str, str]:
        """Call a function. If keys of another type are in its way, move them away and repeat the call."""
        keys = (shard.root,)
        try:
            outcome, detail, *woken = await self._store.call_function(function, keys, *arguments)
        except StoreRefused as error:
            if WRONG_TYPE_PREFIX not in error.message or not accounts:
                raise
            await self._call_in(shard, "deck_budget_sweep", *accounts)
            outcome, detail, *woken = await self._store.call_function(function, keys, *arguments)
        if woken:
            await wake_conversations(self._store, dict.fromkeys(cid.decode(errors="backslashreplace") for cid in woken))
        return outcome, detail.decode()


def _without_root(accounts: Sequence[str]) -> Sequence[str]:
    """Return a delegate's account and its parent's, without those above; other accounts unchanged."""
    is_delegate = len(accounts) > 1 and accounts[1].startswith("conversation:")
    return accounts[:2] if is_delegate else accounts


def _check_amount(usd: float) -> float:
    if not 0 <= usd <= MAX_USD:  # NaN fails too
        raise UsageError(f"{usd:g} USD is not a valid budget.", remedy=f"Use 0 to {MAX_USD:,} USD.")
    return usd


def _parse_integer(text: str) -> int:
    """Parse a field of an account; a value that is not an integer counts as 0, as in the functions."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else 0
