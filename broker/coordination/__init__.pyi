from .action_streams import ActionClaimed as ActionClaimed, ActionDelivery as ActionDelivery
from .action_streams import ActionQueue as ActionQueue, ActionReclaimed as ActionReclaimed
from .action_streams import ClaimOutcome as ClaimOutcome, ControlDelivery as ControlDelivery
from .crash_attribution import NOT_SUSPECTED as NOT_SUSPECTED, CrashAttribution as CrashAttribution, Turns as Turns
from .figures import FIELD as FIELD, Figures as Figures, Labelled as Labelled, read_figures as read_figures
from .heartbeat_thread import HeartbeatThread as HeartbeatThread
from .membership import FACTS_EVERY as FACTS_EVERY, HEARTBEAT_SECONDS as HEARTBEAT_SECONDS, ROLES as ROLES
from .membership import WALL_FIELD as WALL_FIELD, Member as Member, Membership as Membership, members as members
from .membership import silent_roles as silent_roles
from .notebooks import FULL as FULL, FULL_REMEDY as FULL_REMEDY, Notebooks as Notebooks
from .ownership import Claimed as Claimed, DispatchOutcome as DispatchOutcome, NotClaimed as NotClaimed
from .ownership import Owners as Owners, StartStatus as StartStatus
from .placement import NodeOffer as NodeOffer, NotServed as NotServed, find_placement as find_placement
from .placement import has_needs as has_needs, serves_pool as serves_pool, takes_directory as takes_directory
from .places import Places as Places
from .producers import EVERY_TENANT as EVERY_TENANT, GROUP as GROUP, Producer as Producer, Producers as Producers
from .producers import moved as moved, moved_streams as moved_streams, parse_moved_ms as parse_moved_ms
from .stored_files import MAX_STORED_FILE_BYTES as MAX_STORED_FILE_BYTES, StoredFiles as StoredFiles
from .stored_files import check_size as check_size, content_name as content_name
from .transfers import LONG_ANSWER_LIMIT_SECONDS as LONG_ANSWER_LIMIT_SECONDS, MAX_COPY_BYTES as MAX_COPY_BYTES
from .transfers import MAX_COPY_FILES as MAX_COPY_FILES, PART_BYTES as PART_BYTES, FileEntry as FileEntry
from .transfers import NoWorkspace as NoWorkspace, TransferAnswer as TransferAnswer, TransferFailed as TransferFailed
from .transfers import TransferRequest as TransferRequest, Transfers as Transfers
from .unreadable import CANNOT_BE_READ as CANNOT_BE_READ, Unreadable as Unreadable, UnreadableEntry as UnreadableEntry
from .unreadable import conversation_of as conversation_of, entries_aside as entries_aside
from .wakeups import CarriedEvent as CarriedEvent, Mailbox as Mailbox, ReadyStream as ReadyStream, wake as wake
from .workspace_orders import WorkspaceOrders as WorkspaceOrders
