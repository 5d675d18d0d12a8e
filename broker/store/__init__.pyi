from . import keys as keys
from .keys import INBOX as INBOX, PRODUCERS as PRODUCERS, STORE as STORE, TOOLS_FAILED as TOOLS_FAILED
from .keys import ConversationKeys as ConversationKeys, ShardKeys as ShardKeys, inbox as inbox, replies as replies
from .keys import shard_of as shard_of
from .connection import WRONG_TYPE as WRONG_TYPE, Argument as Argument, Connection as Connection
from .connection import MultiplexedConnection as MultiplexedConnection, check_reply as check_reply
from .connection import texts_by_name as texts_by_name
from .server_versions import REMEDY as REMEDY, volatility_of as volatility_of
from .embedded import SPACE_FOR_LOG_BYTES as SPACE_FOR_LOG_BYTES, EmbeddedValkey as EmbeddedValkey
from .function_libraries import ANNOUNCED as ANNOUNCED, FACTS as FACTS, FIELD as FIELD, LIBRARY as LIBRARY
from .function_libraries import WORKER_FIELD as WORKER_FIELD, FunctionsVersion as FunctionsVersion, deploy as deploy
from .function_libraries import own_version as own_version
from .group_reader import BLOCK_SECONDS as BLOCK_SECONDS, HEARTBEAT_SECONDS as HEARTBEAT_SECONDS
from .group_reader import MADE_WITH_THE_NEXT_BEAT as MADE_WITH_THE_NEXT_BEAT, GroupReader as GroupReader
from .readings import LARGEST as LARGEST, ask as ask, number as number, pairs as pairs, text as text
from .server_versions import weakness_of as weakness_of
from .store import Store as Store, open_store as open_store, server_facts as server_facts
