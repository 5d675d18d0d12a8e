"""All keys in the store, with their types and lifetimes; docs/deployment.md lists their writers.

    deck:store                     hash     forever        schema, shards, generation
    deck:tools                     hash     forever        tool → its offer (JSON)
    deck:tools:failed              hash     while alive    worker → the tools it cannot offer, with reasons (JSON)
    deck:inbox                     stream   until done     tasks of trusted producers that do not use Celery
    deck:inbox:<name>              stream   until removed  the same, of one producer
    deck:inbox:moved               hash     until read     stream that ran out of ids → when it was moved (ms)
    {deck:inbox}:moved:<id>        stream   until read     such a stream; likewise for `deck:inbox:<name>`
    deck:producers                 hash     until removed  producer with its own stream → its tenant (JSON)
    deck:replies:<name>            stream   seven days     results of tasks, for the producer of that name
    deck:{k}:index                 zset     forever        conversation → created (ms)
    deck:{k}:label:<name>=<value>  zset     with the log   conversations with a label → created (ms)
    deck:{k}:label:=<tenant>       zset     with the log   conversations of a tenant → created (ms)
    deck:{k}:ready                 stream   trimmed        conversations without an owner that have new events
    deck:{k}:ready:interactive     stream   trimmed        the same, of interactive ones
    deck:{k}:turns:<stream>…       several  while in line  the queue in front of a stream, see turns.lua
    deck:{k}:tenants               hash     forever        tenant → weight and limits, see turns.lua
    deck:{k}:open:<tenant>         zset     until settled  conversation → created (ms)
    deck:{k}:paces                 hash     forever        tenant → when its rate limit is fully available again (ms)
    deck:{k}:refused               hash     forever        reason → number of refused starts
    deck:{k}:unread                zset     until claimed  conversation → notified (ms); finds lost wake-ups
    deck:{k}:parked                zset     until due      conversation → due (ms)
    deck:{k}:dead                  zset     until resumed  conversations that crashed three workers
    deck:{k}:unreadable            stream   about 1,000    quarantined entries and keys
    deck:{k}:workers               zset     while alive    worker → heartbeat deadline (ms)
    deck:{k}:clock                 hash     forever        the shard's time; webhook flag
    deck:{k}:layout                hash     forever        least number of shards known to those that create here
    deck:{k}:nodes                 zset     forever        node → when it is considered lost (ms)
    deck:{k}:takeovers             stream   about 10,000   takeovers, for reports
    deck:{k}:awaited               zset     until done     conversation with a waiting caller → its next check (ms)
    deck:{k}:expiring              zset     until started  conversation → latest start (ms)
    deck:{k}:notices               stream   until read     conversations with waiting callers and news
    deck:{k}:ended                 stream   about 1,000    conversations that have settled, for clients that wait
    deck:{k}:hooked                hash     forever        tenants whose conversations webhooks follow
    deck:{k}:news                  zset     until sent     conversation → its first event not yet reported to webhooks
    deck:{k}:webhooks              hash     until removed  webhook → its configuration (JSON)
    deck:{k}:webhooks:due          zset     until done     webhook and conversation → next delivery (ms)
    deck:{k}:webhook:<id>:sent     hash     see webhooks   delivery → its content and progress (JSON)
    deck:{k}:webhook:<id>:order    zset     see webhooks   delivery → planned (ms)
    deck:{k}:webhook:<id>:ended    zset     see webhooks   delivery → ended (ms)
    deck:{k}:webhook:<id>:line:<c> zset     until done     deliveries of a conversation, in order
    deck:{k}:schedules             hash     until removed  schedule → its task and times (JSON)
    deck:{k}:schedules:standing    hash     until removed  schedule → its progress (JSON)
    deck:{k}:schedules:due         zset     until removed  schedule → its next run (ms)
    deck:{0}:evaluations           zset     a month        evaluation → the latest report of its driver (ms)
    deck:{0}:evaluation:<name>     hash     a month        the desired state and status of an evaluation
    deck:{0}:evaluation:<n>:rows   hash     a month        attempt → its result (JSON)
    deck:{0}:rollouts              zset     a month        rollout run → its last change (ms)
    deck:{0}:rollout:<n>           hash     a month        the specification of a rollout run, and its groups' starts
    deck:{0}:rollout:<n>:state     string   a month        the state of a rollout run
    deck:{0}:rollout:<n>:events    stream   a month        the events of a rollout run, such as new weights
    deck:{0}:rollout:<n>:groups    stream   a month        the finished groups of a rollout run, in order of delivery
    deck:{0}:rollout:<n>:driver    string   while driven   the driver of a rollout run
    deck:{0}:rollout:<n>:version   zset     a month        the version of a rollout run's policy
    deck:{0}:keys                  hash     until removed  id of an API key → its permissions (JSON)
    deck:{0}:keys:used             hash     until removed  id of an API key → last used (ms)
    deck:{0}:keys:rate:<id>:<n>    string   two minutes    requests of a key in one minute
    deck:{0}:keys:ticket:<sha256>  string   half a minute  the key whose ticket opens one stream
    deck:{0}:keys:once:<sha256>    string   a day          request with an idempotency key, and its response (JSON)
    deck:{0}:keys:uploads:<sha256> zset     an hour        uploaded files of a tenant without a conversation
    deck:{0}:data_keys             hash     forever        id → the data key of a tenant, encrypted; see encryption
    deck:{0}:mcp_tokens            hash     until removed  MCP server → its login, encrypted; see mcp_login
    deck:{0}:mcp_answer:<state>    string   10 min         answer of a browser for a login at an MCP server, encrypted
    deck:{0}:operations:record     list     400 days       operations through the server: author and reason (JSON)
    deck:{0}:history:<step>        stream   an hour, a day figures of the cluster, see history
    deck:{0}:history:lease         string   while kept     the server that takes samples of these figures
    deck:{0}:revoked               zset     a week         revoked Celery task → when (ms)
    deck:{0}:job:<name>            string   while running  the worker that runs an exclusive job
    deck:{k}:worker:<w>:owned      set      while alive    the conversations it owns
    deck:{k}:worker:<w>:mail       stream   while alive    wake-ups for the conversations it owns
    deck:{k}:worker:<w>:about      hash     while alive    role, node, streams, progress
    deck:{k}:act:<route>           stream   trimmed        actions for a pool (`pool:bash`) or a node
    deck:{k}:act:interactive:<r>   stream   trimmed        the same, of interactive conversations
    deck:{k}:terminal:<id>:<t>     hash     20 seconds     the request for an operator's terminal, see terminals
    deck:{k}:terminal_input:<id>:<t> stream two minutes    its input, encrypted for the tool worker
    deck:{k}:terminal_output:<id>:<t> stream two minutes   its output, encrypted for the server
    deck:{k}:quota:<pool>:…        several  forever        quotas and the queues for them, see governor.lua
    deck:{k}:budget:<account>      hash     forever        spent, reserved; of a conversation with the log
    deck:{k}:budget:<account>:…    several  as the account the accounts below it, and waiting calls; see ledger.lua
    deck:{k}:limits                hash     until removed  account → its limit; and the keys of its latest changes
    deck:{k}:budgets               set      forever        accounts of tenants and experiments, or with a limit
    deck:{k}:ledger:…              several  forever        budgets reserved for calls in flight
    deck:{0}:notes:<t>/<u>/<p>     hash     until erased   notes of one notebook, by id
    deck:{0}:notebooks             set      forever        the existing notebooks
    deck:{0}:batch:…               several  until closed   calls for a provider's batch API
    deck:{k}:c:<id>:events         stream   forever        the log
    deck:{k}:c:<id>:meta           hash     with the log   owner, token, last id, fields shown by `ls`
    deck:{k}:c:<id>:once           hash     with the log   idempotency keys; claims of running actions; remote_work
    deck:{k}:c:<id>:results        stream   until settled  observations that tool workers may not add to the log
    deck:{k}:c:<id>:grants         hash     until settled  action → marks of its capability and of its content;
                                                           deaths that count against the conversation
    deck:{k}:c:<id>:snapshot       string   with the log   the state at some event
    deck:{k}:c:<id>:caller         hash     with the log   the waiting caller, and its reply
    deck:{k}:c:<id>:caller:lock    string   half a minute  the ingress that sends the reply
    deck:{k}:c:<id>:live           stream   a minute       chunks of the reply being streamed, see live_text
    deck:{k}:c:<id>:watched        string   half a minute  present while a client watches
    deck:{k}:c:<id>:blob:<sha256>  string   with the log   large texts
    deck:{k}:c:<id>:parcel:<name>  hash     with the log   a file for the initial workspace
    deck:{k}:c:<id>:parcel:<t>     hash     ten minutes    files in transfer; see transfers
    deck:{k}:c:<id>:transfer:<t>   hash     ten minutes    the request to transfer files, and its outcome
    deck:{k}:c:<id>:secrets        hash     with the log   secrets by name, encrypted, see secrets
    deck:{k}:c:<id>:masked         set      with the log   all their current and former values, encrypted
    deck:{k}:c:<id>:secrets_of     string   with the log   for a delegate: the conversation whose secrets it shares

Holds: all keys of a conversation, and those its functions touch, share the hash tag `{k}` of its shard. A test compares
this table and the page's table with the keys that a run leaves. `broker.log.deletion` deletes the keys of one
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


def inbox_key(name: str) -> str:
    """Return the inbox stream of a producer."""
    return f"{INBOX}:{name}"


def replies_key(name: str) -> str:
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
        """The prefix of all its keys; the functions derive the others."""
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

    def open_conversations(self, tenant: str) -> str:
        """The conversations of a tenant that are not settled."""
        return f"{self.root}:open:{tenant}"

    @property
    def index(self) -> str:
        """The index of conversations."""
        return f"{self.root}:index"

    def label_index(self, name: str, value: str) -> str:
        """The index of conversations with a label."""
        return f"{self.root}:label:{name}={value}"

    def tenant_index(self, tenant: str) -> str:
        """The index of the conversations of a tenant."""
        return f"{self.root}:label:={tenant}"

    @property
    def api_keys(self) -> str:
        """The permissions of the API keys, and the prefix of their other keys. All are in the first shard."""
        return f"{self.root}:keys"

    @property
    def mcp_tokens(self) -> str:
        """The encrypted logins at MCP servers; all of them are in the first shard."""
        return f"{self.root}:mcp_tokens"

    def mcp_answer(self, state: str) -> str:
        """Return the key of the answer for a login at an MCP server."""
        return f"{self.root}:mcp_answer:{state}"

    @property
    def data_keys(self) -> str:
        """The encrypted data keys of tenants; all of them are in the first shard."""
        return f"{self.root}:data_keys"

    @property
    def operations(self) -> str:
        """The record of operations through the server; all of it is in the first shard."""
        return f"{self.root}:operations:record"

    @property
    def history(self) -> str:
        """The recent figures of the cluster; all of them are in the first shard."""
        return f"{self.root}:history"

    @property
    def dead(self) -> str:
        """The dead letters."""
        return f"{self.root}:dead"

    @property
    def quarantine(self) -> str:
        """Quarantined entries and keys."""
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
        """The conversations with waiting callers."""
        return f"{self.root}:awaited"

    @property
    def notices(self) -> str:
        """The stream of conversations with waiting callers and news."""
        return f"{self.root}:notices"

    @property
    def ended(self) -> str:
        """The stream of conversations that have settled."""
        return f"{self.root}:ended"

    @property
    def revoked(self) -> str:
        """The revoked Celery tasks; all of them are in the first shard."""
        return f"{self.root}:revoked"

    def job_lock(self, name: str) -> str:
        """The lock of an exclusive job; all of them are in the first shard."""
        return f"{self.root}:job:{name}"

    @property
    def refused(self) -> str:
        """The number of refused starts, by reason."""
        return f"{self.root}:refused"

    @property
    def clock(self) -> str:
        """The shard's time, and whether webhooks follow its conversations."""
        return f"{self.root}:clock"

    @property
    def layout(self) -> str:
        """The least number of shards that a process must know to create a conversation in this one."""
        return f"{self.root}:layout"

    @property
    def webhook_tenants(self) -> str:
        """The tenants whose conversations webhooks follow."""
        return f"{self.root}:hooked"

    @property
    def webhook_news(self) -> str:
        """The conversations with events not yet reported to webhooks."""
        return f"{self.root}:news"

    @property
    def webhooks(self) -> str:
        """The webhooks whose ids belong to this shard."""
        return f"{self.root}:webhooks"

    def webhook_deliveries(self, webhook_id: str, part: str) -> str:
        """Deliveries of a webhook. `part` is `sent` or `order`."""
        return f"{self.root}:webhook:{webhook_id}:{part}"

    @property
    def schedules(self) -> str:
        """The schedules whose names belong to this shard."""
        return f"{self.root}:schedules"

    @property
    def schedules_status(self) -> str:
        """The progress of each schedule."""
        return f"{self.root}:schedules:standing"

    @property
    def schedules_due(self) -> str:
        """The next tick of each schedule."""
        return f"{self.root}:schedules:due"

    @property
    def evaluations(self) -> str:
        """The index of evaluations."""
        return f"{self.root}:evaluations"

    def evaluation_rows(self, name: str) -> str:
        """The results of an evaluation's attempts."""
        return f"{self.root}:evaluation:{name}:rows"

    def evaluation(self, name: str) -> str:
        """The desired state and the status of an evaluation; all of them are in the first shard."""
        return f"{self.root}:evaluation:{name}"

    @property
    def rollouts(self) -> str:
        """The index of rollout runs."""
        return f"{self.root}:rollouts"

    def rollout(self, name: str) -> str:
        """The specification of a rollout run; all of a run is in the first shard."""
        return f"{self.root}:rollout:{name}"

    def rollout_state(self, name: str) -> str:
        """The state of a rollout run."""
        return f"{self.root}:rollout:{name}:state"

    def rollout_events(self, name: str) -> str:
        """The events of a rollout run."""
        return f"{self.root}:rollout:{name}:events"

    def rollout_groups(self, name: str) -> str:
        """The delivered groups of a rollout run."""
        return f"{self.root}:rollout:{name}:groups"

    def rollout_driver(self, name: str) -> str:
        """The lease of the driver of a rollout run."""
        return f"{self.root}:rollout:{name}:driver"

    def rollout_version(self, name: str) -> str:
        """The version of the policy of a rollout run."""
        return f"{self.root}:rollout:{name}:version"

    def mailbox(self, worker: str) -> str:
        """The mailbox stream of a worker."""
        return f"{self.root}:worker:{worker}:mail"

    def worker_conversations(self, worker: str) -> str:
        """The conversations that a worker owns."""
        return f"{self.root}:worker:{worker}:owned"

    def worker_facts(self, worker: str) -> str:
        """The hash with a worker's facts."""
        return f"{self.root}:worker:{worker}:about"

    def quota(self, pool: str) -> str:
        """The prefix of the governor's keys of a pool; it is in the shard of its name."""
        return f"{self.root}:quota:{pool}"

    def budget(self, account: str) -> str:
        """The hash of a budget; it is in the shard of its tenant."""
        return f"{self.root}:budget:{account}"

    @property
    def limits(self) -> str:
        """The limits of accounts, which controllers read and do not write."""
        return f"{self.root}:limits"

    @property
    def budgets(self) -> str:
        """The set of listed accounts."""
        return f"{self.root}:budgets"

    def notes(self, notebook: str) -> str:
        """The hash of a notebook; all notebooks are in the first shard."""
        return f"{self.root}:notes:{notebook}"

    @property
    def notebooks(self) -> str:
        """The set of listed notebooks."""
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
        """The prefix of all its keys; the functions derive the others."""
        return f"{self.shard.root}:c:{self.conversation_id}"

    @property
    def events(self) -> str:
        """The log."""
        return f"{self.root}:events"

    @property
    def meta(self) -> str:
        """The hash with the conversation's metadata."""
        return f"{self.root}:meta"

    @property
    def once(self) -> str:
        """The idempotency keys."""
        return f"{self.root}:once"

    @property
    def grants(self) -> str:
        """The capabilities of actions, and the deaths that count against the conversation."""
        return f"{self.root}:grants"

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
        """The set of all current and former values of secrets, encrypted."""
        return f"{self.root}:masked"

    @property
    def secrets_of(self) -> str:
        """The conversation whose secrets it shares."""
        return f"{self.root}:secrets_of"

    @property
    def caller(self) -> str:
        """The hash with the waiting caller."""
        return f"{self.root}:caller"

    @property
    def live(self) -> str:
        """The chunks of the reply being streamed."""
        return f"{self.root}:live"

    @property
    def watcher_mark(self) -> str:
        """The mark that a watcher is present."""
        return f"{self.root}:watched"

    def blob(self, sha256: str) -> str:
        """A large text."""
        return f"{self.root}:blob:{sha256}"

    def stored_file(self, name: str) -> str:
        """A file stored beside the log, or in transfer."""
        return f"{self.root}:parcel:{name}"

    def transfer(self, token: str) -> str:
        """A request to transfer files."""
        return f"{self.root}:transfer:{token}"

    def terminal(self, token: str) -> str:
        """A request for an operator's terminal. Not below `root`: ingress and jobs may write all keys there."""
        return f"{self.shard.root}:terminal:{self.conversation_id}:{token}"

    def terminal_input(self, token: str) -> str:
        """The input of a terminal."""
        return f"{self.shard.root}:terminal_input:{self.conversation_id}:{token}"

    def terminal_output(self, token: str) -> str:
        """The output of a terminal."""
        return f"{self.shard.root}:terminal_output:{self.conversation_id}:{token}"


@lru_cache(maxsize=CACHED_CONVERSATIONS)
def conversation_keys(conversation_id: str, shards: int) -> ConversationKeys:
    """Return the keys of a conversation in a store of `shards` shards."""
    return ConversationKeys(ShardKeys(shard_of(conversation_id, shards)), conversation_id)
