from . import keys as keys
from .keys import INBOX as INBOX, PRODUCERS as PRODUCERS, STORE as STORE, TOOLS_FAILED as TOOLS_FAILED
from .keys import ConversationKeys as ConversationKeys, ShardKeys as ShardKeys, inbox_key as inbox_key
from .keys import replies_key as replies_key, shard_of as shard_of
from .connection import WRONG_TYPE_PREFIX as WRONG_TYPE_PREFIX, Argument as Argument, Connection as Connection
from .connection import MultiplexedConnection as MultiplexedConnection, check_reply as check_reply
from .connection import decode_fields as decode_fields
from .sentinel import SentinelUrl as SentinelUrl, is_sentinel_url as is_sentinel_url
from .sentinel import NamedPrimary as NamedPrimary, find_latest_primary as find_latest_primary
from .server_control import close_connections as close_connections, replace_primary as replace_primary
from .routing import find_command_slot as find_command_slot, find_slot as find_slot, is_cluster_url as is_cluster_url
from .server_checks import APPEND_ONLY_REMEDY as APPEND_ONLY_REMEDY, describe_volatility as describe_volatility
from .server_checks import describe_missing_replica as describe_missing_replica
from .server_checks import find_vulnerability as find_vulnerability
from .confirmation import NO_REPLICA_REMEDY as NO_REPLICA_REMEDY
from .cluster import ClusterConnection as ClusterConnection, connect as connect
from .encryption import KEY_ID_BYTES as KEY_ID_BYTES
from .encryption import Cipher as Cipher, DataKeyRecord as DataKeyRecord, Encryption as Encryption
from .encryption import MasterKeys as MasterKeys, encrypt_fields as encrypt_fields
from .embedded import SPACE_FOR_LOG_BYTES as SPACE_FOR_LOG_BYTES, EmbeddedValkey as EmbeddedValkey
from .function_library import ANNOUNCED_FIELD as ANNOUNCED_FIELD, LIBRARY as LIBRARY, READ_FACTS as READ_FACTS
from .function_library import VERSION_FIELD as VERSION_FIELD, WORKER_FIELD as WORKER_FIELD
from .function_library import FunctionsVersion as FunctionsVersion, UpgradePlan as UpgradePlan, deploy as deploy
from .function_library import own_version as own_version, plan_upgrade as plan_upgrade
from .group_reader import BLOCK_SECONDS as BLOCK_SECONDS, HEARTBEAT_SECONDS as HEARTBEAT_SECONDS
from .group_reader import MISSING_STREAM_ERRORS as MISSING_STREAM_ERRORS, GroupReader as GroupReader
from .group_reader import LARGEST as LARGEST, decode_text as decode_text, parse_number as parse_number
from .group_reader import read_tolerantly as read_tolerantly, to_pairs as to_pairs
from .layout import MAX_NUMBERS as MAX_NUMBERS, MAX_SHARDS as MAX_SHARDS, ShardLayout as ShardLayout
from .layout import parse_numbers as parse_numbers
from .store import Store as Store, load_all_server_facts as load_all_server_facts
from .store import load_server_facts as load_server_facts, open_store as open_store
