from .addresses import AddressRules as AddressRules
from .bounds import Count as Count, Seconds as Seconds, resolve_setting_types as resolve_setting_types
from .chain import Rest as Rest, make_chain as make_chain
from .child import EXIT_FUNCTIONS as EXIT_FUNCTIONS, EXIT_STORE_REPLACED as EXIT_STORE_REPLACED
from .child import EXIT_USAGE as EXIT_USAGE, ChildProcess as ChildProcess, read_last_lines as read_last_lines
from .child import rotate_log as rotate_log
from .clock import SYSTEM_CLOCK as SYSTEM_CLOCK, Clock as Clock, SharedClock as SharedClock, SystemClock as SystemClock
from .clock import from_millis as from_millis, to_millis as to_millis
from .ids import make_delegate_id as make_delegate_id
from .ids import format_count as format_count
from .environment import BEAT as BEAT, CONTROLLER as CONTROLLER, INGRESS as INGRESS, JOBS as JOBS
from .environment import SERVICES as SERVICES, TOOLS as TOOLS
from .environment import VARIABLE as VARIABLE, explain_passing as explain_passing
from .environment import find_missing_variable as find_missing_variable
from .environment import make_worker_environment as make_worker_environment
from .errors import AdmissionRefused as AdmissionRefused, ConversationBusy as ConversationBusy
from .errors import ConversationMoved as ConversationMoved, CorruptEntry as CorruptEntry
from .errors import DeckhandsError as DeckhandsError, EventUnfit as EventUnfit, EventsLost as EventsLost
from .errors import FunctionsReplaced as FunctionsReplaced, FunctionsTooOld as FunctionsTooOld
from .errors import OutcomeUnknown as OutcomeUnknown, OwnershipLost as OwnershipLost, StoreError as StoreError
from .errors import StoreMisconfigured as StoreMisconfigured, StoreRefused as StoreRefused
from .errors import DataForgotten as DataForgotten, DataLocked as DataLocked
from .errors import ShardsRaised as ShardsRaised
from .errors import StoreReplaced as StoreReplaced, StoreTooNew as StoreTooNew, StoreUnavailable as StoreUnavailable
from .errors import UnknownConversation as UnknownConversation, UnknownKind as UnknownKind, UsageError as UsageError
from .failpoints import arm as arm, failpoint as failpoint
from .front_matter import parse_front_matter as parse_front_matter
from .child import harden_process as harden_process
from .host_load import HostLoad as HostLoad
from .ids import check_conversation_id as check_conversation_id, derive_task_id as derive_task_id
from .ids import draw_jitter as draw_jitter, is_conversation_id as is_conversation_id
from .ids import make_connection_name as make_connection_name
from .ids import make_worker_id_prefix as make_worker_id_prefix, new_conversation_id as new_conversation_id
from .ids import new_key as new_key, new_token as new_token, new_worker_id as new_worker_id
from .ids import shorten_randomly as shorten_randomly
from .logs import ACTION as ACTION, CONVERSATION as CONVERSATION, WORKER as WORKER, make_extra as make_extra
from .logs import start_logging as start_logging, use_json as use_json
from .modules import find_classes as find_classes, import_modules as import_modules
from .opening import open_beneath as open_beneath, read_regular_file as read_regular_file
from .settings import CONFIG_FILE as CONFIG_FILE, CONFIG_FILES_READ as CONFIG_FILES_READ
from .settings import IDEMPOTENCY_KEY_VARIABLE as IDEMPOTENCY_KEY_VARIABLE
from .settings import HEARTBEAT_TTL_SECONDS as HEARTBEAT_TTL_SECONDS, PREFIX as PREFIX, USE_SDK_AGENTS as USE_SDK_AGENTS
from .settings import Acks as Acks, BrokerSettings as BrokerSettings
from .settings import UrlInFile as UrlInFile
from .settings import find_agent_variables as find_agent_variables, hide_password as hide_password
from .settings import join_paths as join_paths, load_current_url as load_current_url, logs_json as logs_json
from .settings import make_celery_url as make_celery_url, split_paths as split_paths
from .clock import wait_for_tick as wait_for_tick
from .addresses import read_tls as read_tls
from .tracing import OpenSpan as OpenSpan, Tracing as Tracing, Value as Value, make_traceparent as make_traceparent
from .tracing import open_tracing as open_tracing, parse_traceparent as parse_traceparent
from .tracing import render_content as render_content
from .version import read_version as read_version
