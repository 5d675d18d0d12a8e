from .action_streams import ActionClaimed as ActionClaimed, ActionDelivery as ActionDelivery, ActionQueue as ActionQueue
from .action_streams import ActionReclaimed as ActionReclaimed, ClaimOutcome as ClaimOutcome
from .action_streams import ControlDelivery as ControlDelivery
from .crash_attribution import NOT_SUSPECTED as NOT_SUSPECTED, CrashAttribution as CrashAttribution
from .crash_attribution import Mark as Mark
from .crash_attribution import SuspectTurns as SuspectTurns
from .membership import FIELD as FIELD, Figures as Figures, LabeledValues as LabeledValues, read_figures as read_figures
from .heartbeat_thread import HeartbeatThread as HeartbeatThread
from .membership import BEATS_PER_FACTS as BEATS_PER_FACTS, HEARTBEAT_SECONDS as HEARTBEAT_SECONDS, ROLES as ROLES
from .membership import WALL_FIELD as WALL_FIELD, ClusterMember as ClusterMember, Membership as Membership
from .shard_raise import ShardRaise as ShardRaise, raise_shards as raise_shards
from .membership import find_silent_roles as find_silent_roles, list_members as list_members
from .notebooks import FULL_MESSAGE as FULL_MESSAGE, FULL_REMEDY as FULL_REMEDY, Notebooks as Notebooks
from .ownership import ClaimFailure as ClaimFailure, ClaimedConversation as ClaimedConversation
from .ownership import DispatchOutcome as DispatchOutcome, Owners as Owners, StartStatus as StartStatus
from .placement import NodeOffer as NodeOffer, NotServed as NotServed, accepts_directory as accepts_directory
from .placement import find_placement as find_placement, has_needs as has_needs, serves_pool as serves_pool
from .slots import Slots as Slots
from .producers import ANY_TENANT as ANY_TENANT, GROUP as GROUP, Producer as Producer, Producers as Producers
from .producers import list_moved_streams as list_moved_streams, make_moved_key as make_moved_key
from .producers import make_moved_prefix as make_moved_prefix
from .producers import parse_moved_ms as parse_moved_ms
from .transfers import MAX_STORED_FILE_BYTES as MAX_STORED_FILE_BYTES, StoredFiles as StoredFiles
from .transfers import check_size as check_size, make_content_name as make_content_name
from .transfers import LONG_ANSWER_LIMIT_SECONDS as LONG_ANSWER_LIMIT_SECONDS, MAX_COPY_BYTES as MAX_COPY_BYTES
from .transfers import MAX_COPY_FILES as MAX_COPY_FILES, PART_BYTES as PART_BYTES, FileEntry as FileEntry
from .transfers import NoWorkspace as NoWorkspace, TransferAnswer as TransferAnswer, TransferFailed as TransferFailed
from .transfers import TransferRequest as TransferRequest, Transfers as Transfers
from .quarantine import PARSE_ERRORS as PARSE_ERRORS, Quarantine as Quarantine, QuarantinedItem as QuarantinedItem
from .quarantine import find_conversation_keys as find_conversation_keys, list_quarantined as list_quarantined
from .wakeups import settle_results as settle_results
from .wakeups import CarriedEvent as CarriedEvent, ReadyStream as ReadyStream, WorkerMailbox as WorkerMailbox
from .wakeups import wake_conversations as wake_conversations
from .action_streams import WorkspaceOrders as WorkspaceOrders
from .terminals import MOST_BYTES as MOST_BYTES, TerminalFailed as TerminalFailed, TerminalLink as TerminalLink
from .terminals import TerminalLost as TerminalLost, TerminalMessage as TerminalMessage, Terminals as Terminals
from .terminals import parse_size as parse_size, was_answered as was_answered
