"""Every key in the store, with its type and how long it is kept; docs/deployment.md says who writes it.

    deck:store                     hash     for ever       schema, shards, generation
    deck:tools                     hash     for ever       key of a tool → its offer (JSON)
    deck:tools:failed              hash     while alive    worker → the tools it cannot offer, and why (JSON)
    deck:inbox                     stream   until done     tasks of a trusted producer that speaks no Celery
    deck:inbox:<name>              stream   until removed  the same, of one producer alone
    deck:inbox:moved               hash     until read     streams that had no id left → when they were moved (ms)
    deck:inbox:moved:<id>          stream   until read     such a stream; likewise for `deck:inbox:<name>`
    deck:producers                 hash     until removed  producer with its own stream → its tenant (JSON)
    deck:replies:<name>            stream   seven days     what became of them, for the producer of that name
    deck:{k}:index                 zset     for ever       conversation → created (ms)
    deck:{k}:label:<name>=<value>  zset     with the log   conversation → created (ms), of those with a label
    deck:{k}:label:=<tenant>       zset     with the log   conversation → created (ms), of those of a tenant
    deck:{k}:ready                 stream   trimmed        conversations nobody owns that have new events
    deck:{k}:ready:interactive     stream   trimmed        the same, of interactive ones
    deck:{k}:turns:<stream>…       several  while in line  who waits to get into a stream, see turns.lua
    deck:{k}:tenants               hash     for ever       tenant → weight and bounds, see turns.lua
    deck:{k}:open:<tenant>         zset     until settled  conversation → created (ms)
    deck:{k}:paces                 hash     for ever       tenant → when its minute is whole again (ms)
    deck:{k}:refused               hash     for ever       reason → how many beginnings were refused for it
    deck:{k}:unread                zset     until claimed  conversation → notified (ms); finds lost ones
    deck:{k}:parked                zset     until due      conversation → due (ms)
    deck:{k}:dead                  zset     until resumed  conversations that crashed three workers
    deck:{k}:unreadable            stream   about 1,000    entries and keys that could not be used
    deck:{k}:workers               zset     while alive    worker → heartbeat deadline (ms)
    deck:{k}:clock                 hash     for ever       the shard's time at the latest beat; if webhooks hear of it
    deck:{k}:nodes                 zset     for ever       node → when it is given up (ms)
    deck:{k}:takeovers             stream   about 10,000   who took over what from whom, for reports
    deck:{k}:awaited               zset     until done     conversation → when a door looks at it (ms)
    deck:{k}:expiring              zset     until begun    conversation → when it is too late to begin it (ms)
    deck:{k}:notices               stream   until read     conversations that somebody waits for and that got on
    deck:{k}:hooked                hash     for ever       tenants whose conversations webhooks hear of
    deck:{k}:news                  zset     until told     conversation → its first event that they have not heard of
    deck:{0}:webhooks              hash     until removed  webhook → what it is (JSON)
    deck:{0}:webhooks:due          zset     until done     webhook and conversation → next delivery (ms)
    deck:{0}:webhook:<id>:sent     hash     see webhooks   delivery → what it is, and how far it has come (JSON)
    deck:{0}:webhook:<id>:order    zset     see webhooks   delivery → planned (ms)
    deck:{0}:webhook:<id>:ended    zset     see webhooks   delivery → ended (ms)
    deck:{0}:webhook:<id>:line:<c> zset     until done     deliveries of a conversation, in their order
    deck:{0}:schedules             hash     until removed  name of a schedule → what it begins, and when (JSON)
    deck:{0}:schedules:standing    hash     until removed  name of a schedule → how far it has come (JSON)
    deck:{0}:schedules:due         zset     until removed  name of a schedule → its next tick (ms)
    deck:{0}:evaluations           zset     a month        evaluation → when its driver last said how it stands (ms)
    deck:{0}:evaluation:<name>     hash     a month        what somebody wants of an evaluation, and how it stands
    deck:{0}:evaluation:<n>:rows   hash     a month        attempt → its result (JSON)
    deck:{0}:keys                  hash     until removed  id of an API key → what it may do (JSON)
    deck:{0}:keys:used             hash     until removed  id of an API key → when it was used last (ms)
    deck:{0}:keys:rate:<id>:<n>    string   two minutes    requests of a key in one minute
    deck:{0}:keys:ticket:<sha256>  string   half a minute  key that may open one stream
    deck:{0}:keys:once:<sha256>    string   a day          request under an idempotency key, and its answer (JSON)
    deck:{0}:keys:uploads:<sha256> zset     an hour        files of a tenant that wait for conversations
    deck:{0}:operations            stream   about 100,000  what was done through the server, by whom and why
    deck:{0}:revoked               zset     a week         Celery task that was revoked → when (ms)
    deck:{0}:job:<name>            string   while at work  which worker does a job that is done alone
    deck:{k}:worker:<w>:owned      set      while alive    the conversations it owns
    deck:{k}:worker:<w>:mail       stream   while alive    wake-ups for what the worker owns
    deck:{k}:worker:<w>:about      hash     while alive    role, node, streams, progress
    deck:{k}:act:<route>           stream   trimmed        actions for a pool (`pool:bash`) or a node
    deck:{k}:act:interactive:<r>   stream   trimmed        the same, of interactive conversations
    deck:{0}:quota:<pool>:…        several  for ever       who may call a model, see governor.lua
    deck:{0}:budget:<account>      hash     for ever       limit, spent, reserved; of a conversation with the log
    deck:{0}:budget:<account>:…    several  as the account the accounts below it, and who waits; see ledger.lua
    deck:{0}:budgets               set      for ever       those of tenants and experiments, or with a limit
    deck:{0}:ledger:…              several  for ever       budgets reserved for calls under way
    deck:{0}:notes:<t>/<u>/<p>     hash     until erased   notes of a tenant's user's project, by id
    deck:{0}:notebooks             set      for ever       which of them there are
    deck:{0}:batch:…               several  until closed   calls for a provider's batch API
    deck:{k}:c:<id>:events         stream   for ever       the log
    deck:{k}:c:<id>:meta           hash     with the log   owner, token, last id, what `ls` shows
    deck:{k}:c:<id>:once           hash     with the log   idempotency keys; claims of running actions
    deck:{k}:c:<id>:snapshot       string   with the log   the state at some event
    deck:{k}:c:<id>:caller         hash     with the log   who waits for its end, and their answer
    deck:{k}:c:<id>:caller:lock    string   half a minute  which door tells them
    deck:{k}:c:<id>:live           stream   a minute       pieces of the reply under way, see live_text
    deck:{k}:c:<id>:watched        string   half a minute  that somebody looks on
    deck:{k}:c:<id>:blob:<sha256>  string   with the log   large texts
    deck:{k}:c:<id>:parcel:<name>  hash     with the log   a file that the workspace begins with
    deck:{k}:c:<id>:parcel:<t>     hash     ten minutes    files on their way; see transfers
    deck:{k}:c:<id>:transfer:<t>   hash     ten minutes    what is to be carried, and the outcome
    deck:{k}:c:<id>:secrets        hash     with the log   secrets by name, encrypted, see secrets
    deck:{k}:c:<id>:masked         set      with the log   every value they had, encrypted
    deck:{k}:c:<id>:secrets_of     string   with the log   of a delegate: whose secrets it has too

Holds: all keys of a conversation, and those its functions touch, share the hash tag `{k}` of its shard. A test compares
this table and that of the page with the keys that a run leaves. `broker.log.deletion` deletes those of one
conversation.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass
from functools import lru_cache

STORE = "deck:store"
TOOLS = "deck:tools"
TOOLS_FAILED = "deck:tools:failed"
INBOX = "deck:inbox"
PRODUCERS = "deck:producers"
CACHED_CONVERSATIONS = 4_096


def inbox(name: str) -> str:
    """Return the inbox stream of a producer."""
    return f"{INBOX}:{name}"


def replies(name: str) -> str:
    """Return the reply stream of a producer."""
    return f"deck:replies:{name}"


def shard_of(conversation_id: str, shards: int) -> int:
    """Return the shard of a conversation: CRC-16 (XMODEM, as Redis Cluster uses) of its id, modulo `shards`."""
    return binascii.crc_hqx(conversation_id.encode(), 0) % shards


@dataclass(frozen=True, slots=True)
class ShardKeys:
    """The keys of one shard."""

    shard: int

    @property
    def root(self) -> str:
        """The name all its keys begin with; the functions derive the rest."""
        return f"deck:{{{self.shard}}}"

    @property
    def ready(self) -> str:
        """The ready stream."""
        return f"{self.root}:ready"

    @property
    def ready_interactive(self) -> str:
        """The ready stream of interactive conversations."""
        return f"{self.root}:ready:interactive"

    @property
    def tenants(self) -> str:
        """The weights and bounds of tenants."""
        return f"{self.root}:tenants"

    def open(self, tenant: str) -> str:
        """The conversations of a tenant that are not settled."""
        return f"{self.root}:open:{tenant}"

    @property
    def index(self) -> str:
        """The index of conversations."""
        return f"{self.root}:index"

    def label(self, name: str, value: str) -> str:
        """The index of conversations with a label."""
        return f"{self.root}:label:{name}={value}"

    def of_tenant(self, tenant: str) -> str:
        """The index of the conversations of a tenant."""
        return f"{self.root}:label:={tenant}"

    @property
    def api_keys(self) -> str:
        """What the API keys may do; what else there is of them has names that begin so. All are in the first shard."""
        return f"{self.root}:keys"

    @property
    def operations(self) -> str:
        """What was done through the server; all of it is in the first shard."""
        return f"{self.root}:operations"

    @property
    def dead(self) -> str:
        """The dead letters."""
        return f"{self.root}:dead"

    @property
    def unreadable(self) -> str:
        """What was put aside because it could not be read."""
        return f"{self.root}:unreadable"

    @property
    def parked(self) -> str:
        """The parked set."""
        return f"{self.root}:parked"

    @property
    def workers(self) -> str:
        """The live workers."""
        return f"{self.root}:workers"

    @property
    def nodes(self) -> str:
        """The nodes of tool workers."""
        return f"{self.root}:nodes"

    @property
    def takeovers(self) -> str:
        """The record of takeovers."""
        return f"{self.root}:takeovers"

    @property
    def awaited(self) -> str:
        """The conversations that somebody waits for."""
        return f"{self.root}:awaited"

    @property
    def notices(self) -> str:
        """The stream of conversations that somebody waits for and that have news."""
        return f"{self.root}:notices"

    @property
    def revoked(self) -> str:
        """The Celery tasks that were revoked; all of them are in the first shard."""
        return f"{self.root}:revoked"

    def job(self, name: str) -> str:
        """Who does a job that is done alone; all of them are in the first shard."""
        return f"{self.root}:job:{name}"

    @property
    def refused(self) -> str:
        """How many beginnings were refused, by reason."""
        return f"{self.root}:refused"

    @property
    def clock(self) -> str:
        """The shard's time, and what every append has to know."""
        return f"{self.root}:clock"

    @property
    def hooked(self) -> str:
        """The tenants whose conversations webhooks hear of."""
        return f"{self.root}:hooked"

    @property
    def news(self) -> str:
        """The conversations with events that webhooks have not heard of."""
        return f"{self.root}:news"

    @property
    def webhooks(self) -> str:
        """The webhooks; all of them are in the first shard."""
        return f"{self.root}:webhooks"

    def webhook(self, webhook_id: str, part: str) -> str:
        """Deliveries of a webhook: `sent`, or `order`."""
        return f"{self.root}:webhook:{webhook_id}:{part}"

    @property
    def schedules(self) -> str:
        """What people have scheduled; all of it is in the first shard."""
        return f"{self.root}:schedules"

    @property
    def schedules_standing(self) -> str:
        """How far each schedule has come."""
        return f"{self.root}:schedules:standing"

    @property
    def schedules_due(self) -> str:
        """The next tick of each schedule."""
        return f"{self.root}:schedules:due"

    @property
    def evaluations(self) -> str:
        """Which evaluations there are."""
        return f"{self.root}:evaluations"

    def evaluation_rows(self, name: str) -> str:
        """The results of an evaluation's attempts."""
        return f"{self.root}:evaluation:{name}:rows"

    def evaluation(self, name: str) -> str:
        """What somebody wants of an evaluation, and how it stands; all of them are in the first shard."""
        return f"{self.root}:evaluation:{name}"

    def mail(self, worker: str) -> str:
        """The mailbox stream of a worker."""
        return f"{self.root}:worker:{worker}:mail"

    def owned(self, worker: str) -> str:
        """The conversations that a worker owns."""
        return f"{self.root}:worker:{worker}:owned"

    def about(self, worker: str) -> str:
        """The hash about a worker."""
        return f"{self.root}:worker:{worker}:about"

    def quota(self, pool: str) -> str:
        """What the governor's keys of a pool begin with; all pools are in the first shard."""
        return f"{self.root}:quota:{pool}"

    def budget(self, account: str) -> str:
        """The hash of a budget; all budgets are in the first shard."""
        return f"{self.root}:budget:{account}"

    @property
    def budgets(self) -> str:
        """The set of accounts that a listing shows."""
        return f"{self.root}:budgets"

    def notes(self, notebook: str) -> str:
        """The hash of a notebook; all notebooks are in the first shard."""
        return f"{self.root}:notes:{notebook}"

    @property
    def notebooks(self) -> str:
        """The set of notebooks that a listing shows."""
        return f"{self.root}:notebooks"

    def actions(self, route: str, *, is_interactive: bool = False) -> str:
        """The action stream of a route, `pool:<name>` or `node:<id>`."""
        return f"{self.root}:act:interactive:{route}" if is_interactive else f"{self.root}:act:{route}"


@dataclass(frozen=True, slots=True)
class ConversationKeys:
    """The keys of one conversation."""

    shard: ShardKeys
    conversation_id: str

    @property
    def root(self) -> str:
        """The name all its keys begin with; the functions derive the rest."""
        return f"{self.shard.root}:c:{self.conversation_id}"

    @property
    def events(self) -> str:
        """The log."""
        return f"{self.root}:events"

    @property
    def meta(self) -> str:
        """The hash about the conversation."""
        return f"{self.root}:meta"

    @property
    def once(self) -> str:
        """The idempotency keys."""
        return f"{self.root}:once"

    @property
    def snapshot(self) -> str:
        """The latest snapshot."""
        return f"{self.root}:snapshot"

    @property
    def secrets(self) -> str:
        """The hash of the secrets, encrypted."""
        return f"{self.root}:secrets"

    @property
    def masked(self) -> str:
        """The set of all values that secrets ever had, encrypted."""
        return f"{self.root}:masked"

    @property
    def secrets_of(self) -> str:
        """The conversation whose secrets it has too."""
        return f"{self.root}:secrets_of"

    @property
    def caller(self) -> str:
        """The hash about who waits for its end."""
        return f"{self.root}:caller"

    @property
    def live(self) -> str:
        """The pieces of the reply under way."""
        return f"{self.root}:live"

    @property
    def watched(self) -> str:
        """The mark that somebody watches."""
        return f"{self.root}:watched"

    def blob(self, sha256: str) -> str:
        """A large text."""
        return f"{self.root}:blob:{sha256}"

    def stored_file(self, name: str) -> str:
        """A file kept beside the log, or on its way."""
        return f"{self.root}:parcel:{name}"

    def transfer(self, token: str) -> str:
        """A request to carry files."""
        return f"{self.root}:transfer:{token}"


@lru_cache(maxsize=CACHED_CONVERSATIONS)
def conversation_keys(conversation_id: str, shards: int) -> ConversationKeys:
    """Return the keys of a conversation in a store of `shards` shards."""
    return ConversationKeys(ShardKeys(shard_of(conversation_id, shards)), conversation_id)
