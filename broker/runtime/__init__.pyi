from .addresses import AddressRules as AddressRules
from .chain import Rest as Rest, make_chain as make_chain
from .child import EXIT_FUNCTIONS as EXIT_FUNCTIONS, EXIT_STORE_REPLACED as EXIT_STORE_REPLACED
from .child import EXIT_USAGE as EXIT_USAGE, Child as Child, last_lines as last_lines, rotate as rotate
from .clock import SYSTEM_CLOCK as SYSTEM_CLOCK, Clock as Clock, SharedClock as SharedClock
from .clock import SystemClock as SystemClock, from_millis as from_millis, to_millis as to_millis
from .counting import counted as counted
from .environment import BEAT as BEAT, CONTROLLER as CONTROLLER, DOOR as DOOR, JOBS as JOBS, TOOLS as TOOLS
from .environment import VARIABLE as VARIABLE, find_missing_variable as find_missing_variable
from .environment import say_how_to_pass as say_how_to_pass, worker_environment as worker_environment
from .errors import AdmissionRefused as AdmissionRefused, ConversationBusy as ConversationBusy
from .errors import ConversationMoved as ConversationMoved, CorruptEntry as CorruptEntry
from .errors import DeckhandsError as DeckhandsError, EventUnfit as EventUnfit, EventsLost as EventsLost
from .errors import FunctionsReplaced as FunctionsReplaced, FunctionsTooOld as FunctionsTooOld
from .errors import OutcomeUnknown as OutcomeUnknown, OwnershipLost as OwnershipLost, StoreError as StoreError
from .errors import StoreMisconfigured as StoreMisconfigured, StoreRefused as StoreRefused
from .errors import StoreReplaced as StoreReplaced, StoreTooNew as StoreTooNew, StoreUnavailable as StoreUnavailable
from .errors import UnknownConversation as UnknownConversation, UnknownKind as UnknownKind, UsageError as UsageError
from .failpoints import arm as arm, failpoint as failpoint
from .hardening import seclude as seclude
from .host_load import HostLoad as HostLoad
from .ids import check_conversation_id as check_conversation_id, id_at as id_at
from .ids import is_conversation_id as is_conversation_id, jitter as jitter
from .ids import new_conversation_id as new_conversation_id, new_key as new_key, new_token as new_token
from .ids import new_worker_id as new_worker_id, shortened as shortened, worker_id_prefix as worker_id_prefix
from .logs import ACTION as ACTION, CONVERSATION as CONVERSATION, WORKER as WORKER, about as about, as_json as as_json
from .logs import begin_logging as begin_logging
from .modules import classes_in as classes_in, import_modules as import_modules
from .opening import open_beneath as open_beneath, read_regular_file as read_regular_file
from .settings import CONFIG_FILE as CONFIG_FILE, CONFIG_FILES_READ as CONFIG_FILES_READ
from .settings import HEARTBEAT_TTL_SECONDS as HEARTBEAT_TTL_SECONDS, PREFIX as PREFIX
from .settings import USE_SDK_AGENTS as USE_SDK_AGENTS, BrokerSettings as BrokerSettings, Count as Count
from .settings import Seconds as Seconds, UrlInFile as UrlInFile, agent_variables as agent_variables
from .settings import celery_url_beside as celery_url_beside, current_url as current_url
from .settings import hide_password as hide_password, joined_paths as joined_paths, logs_json as logs_json
from .settings import split_paths as split_paths
from .tls import read_tls as read_tls
from .tracing import OpenSpan as OpenSpan, Tracing as Tracing, Value as Value
from .tracing import checked_traceparent as checked_traceparent, open_tracing as open_tracing
from .tracing import traceparent_of as traceparent_of
from .version import installed_version as installed_version
